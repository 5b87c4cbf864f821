"""Where each token of a batch is in its request: vLLM's positions, or the same worked out on the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from packed_kv.attention.metadata import PackedMetadataBuilder


@pytest.fixture
def builder() -> PackedMetadataBuilder:
    made = object.__new__(PackedMetadataBuilder)
    made.rows, made.positions = torch.arange(32, dtype=torch.int32), torch.full((32,), -7)
    made.vllm_config = SimpleNamespace(speculative_config=None)
    return made


def batch(query_lens: list[int], seq_lens: list[int], padding: int = 0, **fields: torch.Tensor) -> SimpleNamespace:
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    tokens = sum(query_lens) + padding
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return SimpleNamespace(query_start_loc=starts, seq_lens=lengths, num_actual_tokens=tokens, **fields)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "expected"),
    [
        ([1], [1], [0]),
        ([4, 1, 3], [4, 17, 9], [0, 1, 2, 3, 16, 6, 7, 8]),
        ([0, 2, 0, 1], [5, 2, 9, 12], [0, 1, 11]),
        ([1, 1, 0, 0], [8, 1, 0, 0], [7, 0]),
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_positions_from_lengths(builder, query_lens, seq_lens, expected, padding):
    """Rows of padding may hold anything; those of a CUDA graph stay where they are."""
    found = builder._positions(batch(query_lens, seq_lens, padding, positions=None))
    assert found.dtype == torch.int64 and len(found) == len(expected) + padding
    assert found[: len(expected)].tolist() == expected
    assert found.data_ptr() == builder.positions.data_ptr()


def test_positions_of_vllm_are_taken(builder):
    given = torch.arange(100, 120)
    found = builder._positions(batch([2, 1], [2, 5], positions=given))
    assert found.data_ptr() == given.data_ptr() and found.tolist() == [100, 101, 102]


@pytest.mark.parametrize("fields", [{}, {"positions": torch.full((9,), 50)}], ids=["0.26", "drafts"])
def test_positions_that_drafts_leave_behind_are_not(builder, fields):
    if fields:
        builder.vllm_config.speculative_config = object()
    assert builder._positions(batch([2, 1], [2, 5], **fields)).tolist() == [0, 1, 4]
