"""Resources of a GPU: the table, and the card at hand."""

from __future__ import annotations

import pytest
import torch
from packed_kv.gpu_generations import GENERATIONS, generation_of


@pytest.mark.parametrize(
    ("capability", "found"),
    [((7, 5), (8, 0)), ((8, 0), (8, 0)), ((8, 6), (8, 6)), ((9, 0), (9, 0)), ((10, 3), (10, 0)), ((12, 1), (12, 0))],
)
def test_a_card_is_of_the_last_generation_before_it(capability: tuple[int, int], found: tuple[int, int]) -> None:
    assert generation_of(capability).capability == found


@pytest.mark.parametrize(
    ("capability", "registers", "shared_bytes", "warps", "blocks"),
    [
        ((9, 0), 128, 0, 1, 16), ((9, 0), 168, 0, 1, 12), ((9, 0), 165, 0, 1, 12), ((9, 0), 255, 0, 1, 8),
        ((9, 0), 128, 0, 4, 4), ((8, 0), 64, 0, 1, 32), ((8, 6), 64, 0, 1, 16), ((8, 9), 64, 0, 1, 24),
        ((12, 0), 128, 12 << 10, 1, 7), ((9, 0), 128, 12 << 10, 1, 16), ((8, 9), 24, 0, 4, 12),
    ],
)  # fmt: skip
def test_blocks_that_an_sm_holds(
    capability: tuple[int, int], registers: int, shared_bytes: int, warps: int, blocks: int
) -> None:
    assert generation_of(capability).resident_blocks(registers, shared_bytes, warps) == blocks


def test_cuda_kernels_of_generations() -> None:
    """Columns that are compiled, whether latents are, and whether "auto" takes them."""
    found = {x.capability: (x.cuda_columns, x.has_wgmma, x.is_seen) for x in GENERATIONS if x.cuda_columns}
    assert found == {(9, 0): (64, True, True), (10, 0): (32, False, False), (12, 0): (32, False, False)}
    assert all(x.cuda_columns for x in GENERATIONS if x.has_wgmma or x.is_seen)


def test_the_largest_block_fits_an_sm() -> None:
    for generation in GENERATIONS:
        assert generation.resident_blocks(32, generation.block_shared_bytes) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_card_at_hand() -> None:
    card = torch.cuda.get_device_properties(0)
    generation = generation_of((card.major, card.minor))
    assert card.shared_memory_per_multiprocessor == generation.shared_bytes
    assert card.shared_memory_per_block_optin == generation.block_shared_bytes
    assert card.max_threads_per_multi_processor == 32 * generation.warps
    assert card.regs_per_multiprocessor == 64 << 10
