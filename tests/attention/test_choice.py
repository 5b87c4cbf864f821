"""The start-up line of the decode kernel."""

from __future__ import annotations

import pytest
from packed_kv.attention import choice
from packed_kv.kernels.cuda import longest_query, refusal


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
    monkeypatch.setattr("packed_kv.kernels.cuda._missing", lambda: None)
    monkeypatch.setattr(choice.logger, "info_once", lambda text, found, **_: lines.append(text % found), raising=False)
    refused = refusal((9, 0), head_dim, 4, query_len)
    by_cuda = choice.takes_cuda(option, refused, "GQA group 4", query_len, longest_query(4))
    assert lines == [f"decode kernel: {line}"]
    assert by_cuda == line.startswith("CUDA")
