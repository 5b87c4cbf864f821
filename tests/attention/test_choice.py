"""The start-up line of the decode kernel."""

from __future__ import annotations

import pytest
import torch
from packed_kv.attention import choice
from packed_kv.attention.limits import Limits
from packed_kv.formats import FORMATS
from packed_kv.kernels.served import Latents, Pairs
from packed_kv.refusals.table import Refused


@pytest.mark.parametrize(
    ("option", "head_dim", "query_len", "capability", "line"),
    [
        ("auto", 128, 1, (9, 0), "CUDA (GQA group 4, 1 query token per request, at most 64)"),
        ("auto", 128, 5, (9, 0), "CUDA (GQA group 4, 5 query tokens per request, at most 64)"),
        ("auto", 80, 1, (9, 0), "Triton (the CUDA kernel does not support head size 80 (only 64, 128 and 256))"),
        ("triton", 128, 1, (9, 0), "Triton (the CUDA kernel is disabled by decode_kernel=triton)"),
        ("cuda", 128, 5, (9, 0), "CUDA (GQA group 4, 5 query tokens per request, at most 64)"),
        ("auto", 256, 1, (9, 0), "CUDA (GQA group 4, 1 query token per request, at most 64)"),
        ("cuda", 128, 5, (12, 1), "CUDA (GQA group 4, 5 query tokens per request, at most 8)"),
        (
            "auto", 128, 5, (12, 1),
            "Triton (the CUDA kernel compiles for compute capability 12.1, but has not been seen to run there: "
            "decode_kernel=cuda takes it, packed-kv selftest compares and times it)",
        ),
    ],
)  # fmt: skip
def test_one_line_names_the_kernel_and_why(
    option: str, head_dim: int, query_len: int, capability: tuple[int, int], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(choice.logger, "info_once", lambda text, found, **_: lines.append(text % found), raising=False)
    limits, layer = Limits(query_len, 8), Pairs(None, head_dim, 4)
    served = choice.find_kernel(torch.device("cuda"), option, limits, layer, "GQA group 4")
    assert lines == [f"decode kernel: {line}"]
    assert served.kernel == line.split()[0]


@pytest.mark.parametrize(
    ("layer", "capability", "reason"),
    [
        (Pairs(FORMATS["tq4"], 80, 4), (9, 0), "head size 80 (only 64, 128 and 256)"),
        (Pairs(FORMATS["tq4"], 128, 4), (8, 9), "compute capability 8.9 (only 9.0, 10.0 and 12.0)"),
        (Pairs(FORMATS["tq4"], 128, 16), (10, 3), "16 query heads per KV head times 3 query tokens (at most 2 tokens)"),
        (
            Latents(FORMATS["tq4"], 512, 64, 16), (12, 0),
            "latents on compute capability 12.0 (only 9.0, for its wgmma)",
        ),
    ],
)  # fmt: skip
def test_cuda_is_refused_where_it_does_not_serve(
    layer: Pairs | Latents, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    with pytest.raises(Refused) as error:
        choice.find_kernel(torch.device("cuda"), "cuda", Limits(3, 8), layer, "heads")
    begins = "--kv-cache-dtype tq4 cannot serve packed_kv.decode_kernel: cuda, and the CUDA kernel does not support"
    assert str(error.value) == f"{begins} {reason}; leave decode_kernel out"
