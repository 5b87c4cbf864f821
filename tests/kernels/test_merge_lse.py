"""The log-sum-exps of the decode kernels, and attention over shares of the keys combined by them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import test_cuda_decode as cuda_tests
import torch
from packed_kv.kernels.cuda.grids import Grid
from packed_kv.kernels.triton import combine
from packed_kv.kernels.triton.combine import WeighByLseLaunch
from test_decode import DEVICE, run, transforms

MOST = 3e-3
"""Largest absolute error: scores are of order 1, and fp16 rounds queries and matrices to 2^-11."""


@pytest.mark.parametrize(
    "options",
    [
        {"seq_lens": (0, 37)},
        {"seq_lens": (0, 37), "kernel": "cuda", "splits": Grid(1, 5, False)},
        {"seq_lens": (0, 37, 1700), "kernel": "cuda", "splits": Grid(2, 3, True)},
        {"seq_lens": (0, 37, 1700), "kernel": "cuda", "head_dim": 256, "group": 6, "splits": Grid(4, 2, True)},
        {"seq_lens": (40,), "query_lens": (2,), "splits": 2, "soft_cap": 5.0, "transformed": True},
        {"seq_lens": (40,), "splits": 1, "sinks": torch.bfloat16, "transformed": True},
        {"seq_lens": (40,), "transformed": True},
    ],
    ids=str,
)
def test_lse(options: dict[str, Any]) -> None:
    options = {"head_dim": 64, "kv_heads": 1, "group": 2} | options
    if options.get("kernel") == "cuda":
        if cuda_tests.runs.args[0]:
            pytest.skip(cuda_tests.runs.kwargs["reason"])
        options["kernel"] = cuda_tests.KERNEL
    if options.pop("transformed", False):
        options |= transforms(64, 1)
    torch.testing.assert_close(*run("turboquant25", returns_lse=True, **options), rtol=0, atol=MOST)


@pytest.mark.parametrize("elements", [combine.SHARE_ELEMENTS, 256])
def test_shares_of_the_keys(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks hold of a request together gives attention over all of it; where no rank has a key, 0 and -inf. A
    program has all heads, or two of them."""
    monkeypatch.setattr(combine, "SHARE_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    heads, tokens, head_dim, ends = 3, 5, 80, (0, 3, 11, 12)
    scores = 5 * torch.randn(heads, tokens, 12, generator=generator).to(DEVICE)
    values = torch.randn(heads, 12, head_dim, generator=generator).to(DEVICE)
    scores[:, 1, :3] = scores[:, 2, 3:] = scores[:, 4] = float("-inf")
    shares = [slice(start, end) for start, end in pairwise(ends)]
    outputs = [
        torch.einsum("htk,hkd->thd", scores[..., keys].softmax(-1).nan_to_num(0.0), values[:, keys]).contiguous()
        for keys in shares
    ]
    rank_lse = torch.stack([scores[..., keys].logsumexp(-1).T for keys in shares])
    outputs[0][1] = float("nan")  # that rank has no key of it
    total_lse = [
        WeighByLseLaunch(output, len(outputs), rank).weigh(output, rank_lse) for rank, output in enumerate(outputs)
    ]
    expected = torch.einsum("htk,hkd->thd", scores.softmax(-1).nan_to_num(0.0), values)
    torch.testing.assert_close(sum(outputs), expected, rtol=1e-5, atol=1e-5)
    for lse in total_lse:
        torch.testing.assert_close(lse, scores.logsumexp(-1).T, rtol=1e-5, atol=1e-5)
