"""The start-up line of the decode kernel."""

from __future__ import annotations

import pytest
import torch
from packed_kv.attention import choice
from packed_kv.attention.limits import Limits
from packed_kv.kernels.served import Pairs


@pytest.mark.parametrize(
    ("option", "head_dim", "query_len", "line"),
    [
        ("auto", 128, 1, "CUDA (GQA group 4, 1 query token per request, at most 64)"),
        ("auto", 128, 5, "CUDA (GQA group 4, 5 query tokens per request, at most 64)"),
        ("auto", 80, 1, "Triton (the CUDA kernel does not support head size 80 (only 64 and 128))"),
        ("triton", 128, 1, "Triton (the CUDA kernel is disabled by decode_kernel=triton)"),
    ],
)
def test_one_line_names_the_kernel_and_why(
    option: str, head_dim: int, query_len: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(choice.logger, "info_once", lambda text, found, **_: lines.append(text % found), raising=False)
    limits, layer = Limits(query_len, 8), Pairs(None, head_dim, 4)
    served = choice.find_kernel(torch.device("cuda"), option, limits, layer, "GQA group 4")
    assert lines == [f"decode kernel: {line}"]
    assert served.kernel == line.split()[0]
