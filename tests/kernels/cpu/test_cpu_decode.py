"""Decode attention in C++ against the reference, within the bound of the GPU kernels.

Rounding queries and weights to 16 bits costs up to a third of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from batches import Batch, gaussian, relative_rms
from packed_kv import FORMATS
from packed_kv.kernels.cpu.compiler import TARGETS, Target, processor
from packed_kv.layout import MEAN_BLOCK
from packed_kv.model.rope import Rope
from packed_kv.reference.attention import AttentionOptions

BOUND = 3e-4
LENGTHS: list[int | tuple[int, int]] = [1, 15, 16, 17, 63, 100, 257, 600]
PLAIN = AttentionOptions(0.125)
every_dtype = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(batch: Batch, options: AttentionOptions = PLAIN, target: Target | None = None) -> None:
    output, wanted = batch.decode(options, target), batch.reference(options)
    for own, other in zip(output.split(batch.query_lens), wanted.split(batch.query_lens), strict=True):
        assert not len(own) or relative_rms(own, other) < BOUND


@every_dtype
def test_every_dtype(name: str) -> None:
    check(Batch(name, LENGTHS))


@pytest.mark.parametrize(
    ("name", "head_dim", "heads"),
    [
        ("tq4", 80, (4, 4)),
        ("tq3", 96, (10, 2)),
        ("turboquant25", 128, (7, 1)),
        ("turboquant35", 128, (8, 2)),
        ("tq3", 160, (3, 1)),
        ("turboquant25", 192, (2, 1)),
        ("turboquant35", 256, (4, 2)),
    ],
)
def test_head_sizes_and_groups(name: str, head_dim: int, heads: tuple[int, int]) -> None:
    check(Batch(name, [9, 333], head_dim, heads))


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
@pytest.mark.parametrize("name", ["turboquant35", "turboquant25"])
def test_every_build_for_this_processor(name: str, target: Target) -> None:
    if not processor()[1].issuperset(target.features):
        pytest.skip(f"this processor is not of {target.name}")
    check(Batch(name, LENGTHS), target=target)


@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_block_sizes(block_size: int) -> None:
    check(Batch("tq4", LENGTHS, block_size=block_size))


SINKS = torch.tensor([-1.0, 1.5, 3.0, 6.0, 0.0, -20.0])
OPTIONS = {
    "window 1": AttentionOptions(0.125, sliding_window=1),
    "window 37": AttentionOptions(0.125, sliding_window=37),
    "window 300": AttentionOptions(0.125, sliding_window=300),
    "window beyond": AttentionOptions(0.125, sliding_window=4096),
    "soft cap": AttentionOptions(1.0, logits_soft_cap=5.0),
    "sinks": AttentionOptions(0.125, sinks=SINKS.bfloat16()),
    "sinks, window and cap": AttentionOptions(0.5, sliding_window=50, logits_soft_cap=2.0, sinks=SINKS),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
DRAFTS: list[int | tuple[int, int]] = [(1, 1), (5, 5), (40, 4), (300, 6), (800, 1), (0, 0), (530, 11)]


@every_option
@pytest.mark.parametrize("window", [0, 64])
def test_options_with_drafts_and_a_ring(options: AttentionOptions, window: int) -> None:
    check(Batch("tq4", DRAFTS, window=window), options)


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
@pytest.mark.parametrize("window", [1, 64, 400])
def test_a_ring_of_any_window(name: str, window: int) -> None:
    check(Batch(name, [*LENGTHS, *DRAFTS], window=window))


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("rope", [True, False], ids=["rope", "one mean"])
def test_means_of_keys(rope: bool, window: int) -> None:
    frequencies = tuple(10000 ** (-i / 16) for i in range(16))
    means = {"key_mean": gaussian(2, 64, seed=7) * 3, "key_first_mean": gaussian(2, 64, seed=8) * 5}
    if rope:
        means |= {"key_rope": Rope(frequencies, False), "positions": 4 * MEAN_BLOCK}
    batch = Batch("tq4", [1, 2, 500, 513, (1300, 5)], window=window, key_offset=1.0, **means)
    check(batch, AttentionOptions(0.05))
    check(batch, AttentionOptions(0.05, sliding_window=600, logits_soft_cap=3.0))


def test_channel_orders_and_scales() -> None:
    order = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(2)])
    scale = (0.5 * gaussian(2, 64, seed=3)).exp()  # logarithms of calibrated ones spread by 0.2
    orders = {"key_channel_order": order, "value_channel_order": order.flip(0)}
    check(Batch("tq3", [7, 400], window=16, key_scale=scale, value_scale=scale.flip(0), **orders))
    outliers = order[:, :32].sort(-1).values
    channels = {"key_outlier_channels": outliers, "value_outlier_channels": outliers.flip(0)}
    check(Batch("turboquant25", [7, 400], key_scale=scale[0], **channels))


@pytest.mark.parametrize("window", [0, 64])
def test_smaller_value_heads(window: int) -> None:
    check(Batch("tq4", [(90, 3), 500], head_dim=80, value_dim=48, window=window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    batch = Batch("tq4", LENGTHS, window=16)
    output, exact = batch.decode(PLAIN, dtype=dtype), batch.reference(PLAIN, dtype)
    # At most 2 units in the last place beside what rounding the reference costs: 1.5 * eps / 2 and the kernel's error.
    assert relative_rms(output, exact) < 0.5 * torch.finfo(dtype).eps + BOUND


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_threads_and_company_change_no_bit(name: str) -> None:
    lengths: list[int | tuple[int, int]] = [700, (2500, 3), 64, 5000]
    batch = Batch(name, lengths, window=64)
    results = []
    for count in (1, 2, 3, 4, 1):
        torch.set_num_threads(count)
        results.append(batch.decode(PLAIN))
    assert all(torch.equal(result, results[0]) for result in results)
    alone = Batch(name, lengths, window=64)
    alone.table, alone.seq_lens = alone.table[3:], alone.seq_lens[3:]
    ring = alone.ring
    assert ring is not None
    alone.ring = type(ring)(ring.cache, ring.block_table[3:], ring.first[3:].contiguous(), ring.window)
    alone.query, alone.query_start = alone.query[-1:], torch.tensor([0, 1], dtype=torch.int32)
    assert torch.equal(alone.decode(PLAIN), results[0][-1:])


def test_one_outlying_value_costs_the_others_no_precision() -> None:
    """A token with a V of 1000 times the others', which the query does not look at."""
    batch = Batch("tq4", [200], heads=(1, 1))
    key, value = gaussian(200, 1, 64, seed=10), gaussian(200, 1, 64, seed=20)
    batch.query[:] = 4 * key[150]
    key[7], value[7] = -100 * key[150], 1000 * value[7]
    slots = torch.arange(200)
    batch.codec.write(batch.cache, batch.table[0, slots // 32].long() * 32 + slots % 32, key, value)
    check(batch)


@pytest.mark.parametrize("step", [30, -30, 120])
def test_scores_that_change_by_more_than_exponentials_have_room_for(step: int) -> None:
    """From tile to tile: sums are brought to the new maximum."""
    batch = Batch("tq4", [1500], heads=(1, 1))
    slots, direction = torch.arange(1500), gaussian(64, seed=3)
    key, value = gaussian(1500, 1, 64, seed=10) / 4, gaussian(1500, 1, 64, seed=20)
    height = step * (slots // 256)
    key[:, 0] += height[:, None] * 8 * direction / (direction.square().sum() * 2)
    batch.query[:] = 2 * direction
    batch.codec.write(batch.cache, batch.table[0, slots // 32].long() * 32 + slots % 32, key, value)
    check(batch)


def test_any_scale_byte_that_is_written() -> None:
    batch = Batch("tq4", [64], heads=(2, 2))
    scales = batch.codec.layout.plane(1, "scales")
    pages = batch.cache.view(len(batch.cache), 2, 2, -1)
    pages[..., scales.offset :] = torch.randint(
        0, 0xF3, pages[..., scales.offset :].shape, generator=torch.Generator().manual_seed(0)
    ).to(torch.uint8)
    check(batch)


def test_no_requests() -> None:
    assert Batch("tq4", [(0, 0)]).decode(PLAIN).numel() == 0
