"""The CUDA kernel over picked latent rows against attention over what the codec reads; emulated on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import latent_launch as launch
from packed_kv.kernels.cuda import latent_pick_launch as pick_launch
from packed_kv.reference.sparse_latents import attend_picks
from schedules import reference_latent_schedule
from test_cuda_latent import BOUND, DEVICE, gpu_only, runs

SCALE = 576**-0.5


class Case:
    """Query tokens and their picks, on pages of poison in which no row is written that is not picked.

    Args:
        name: of the format.
        heads: query heads.
        counts: of picks that each query token has; `most` are looked at of each.
        holes: share of these that are none, anywhere.
        gap: bytes between blocks, as where other pages lie there.
        partitions: of the schedule, if there is one row block.
    """

    def __init__(
        self, name: str, heads: int, counts: tuple[int, ...], holes: float = 0, block_size: int = 64, gap: int = 0,
        rope_bits: int = 16, partitions: int = 4, dtype: torch.dtype = torch.bfloat16, has_constant: bool = False,
        output: torch.dtype = torch.float32, sharpness: float = 2.0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(heads + sum(counts))

        def gaussian(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        tokens, most = len(counts), max(*counts, 1)
        self.codec = LatentRowCodec(FORMATS[name], 512, 64, rope_bits=rope_bits)
        requests, context, size = 2, 2 * most + 50, self.codec.slot_bytes
        columns = -(-context // block_size)
        memory = torch.full((requests * columns + 1, block_size * size + gap), 0xFF, dtype=torch.uint8)
        cache = memory[:, : block_size * size].unflatten(1, (block_size, size))
        self.table = torch.randperm(requests * columns, generator=generator).int().view(requests, columns) + 1
        self.requests = torch.arange(tokens, dtype=torch.int32) % requests
        self.picks = torch.full((tokens, most), -1, dtype=torch.int32)
        for token, count in enumerate(counts):
            self.picks[token, :count] = torch.randperm(context, generator=generator)[:count].int()
            self.picks[token, :count][torch.rand(count, generator=generator) < holes] = -1
        slots = torch.full_like(self.picks, -1).long()
        for token, picked in enumerate(self.picks.long()):
            there = picked >= 0
            blocks = self.table[self.requests[token], picked[there] // block_size]
            slots[token, there] = blocks * block_size + picked[there] % block_size
        known = slots[slots >= 0].unique()
        self.codec.write(cache, known, gaussian(len(known), 512), gaussian(len(known), 64))
        self.query = (gaussian(tokens, heads, 512) * sharpness).to(dtype)
        self.rope_query = (gaussian(tokens, heads, 192) * sharpness).to(dtype)[..., 128:]
        rows = torch.cat(self.codec.read_slots(cache, known), dim=-1)
        numbers = torch.where(slots >= 0, torch.searchsorted(known, slots), -1)
        self.expected, self.expected_lse = attend_picks(rows, numbers, self.query, self.rope_query, SCALE)
        self.constant = gaussian(512) if has_constant else None
        if self.constant is not None:
            self.expected += self.constant
        self.heads, self.counts = heads, torch.tensor(counts, dtype=torch.int32)
        self.numbers = torch.arange(tokens + 1, dtype=torch.int32)
        self.shape = launch.latent_grid(heads, partitions)
        for name, x in vars(self).items():
            if isinstance(x, torch.Tensor):
                setattr(self, name, x.to(DEVICE))
        # A slice of the memory's copy: blocks keep their stride.
        self.cache = memory.to(DEVICE)[:, : block_size * size].unflatten(1, (block_size, size))
        if DEVICE.type == "cuda":
            self.codec = LatentRowCodec(FORMATS[self.codec.fmt.name], 512, 64, DEVICE, rope_bits=rope_bits)
        self.output = torch.full(self.expected.shape, float("nan"), dtype=output, device=DEVICE)
        self.lse = torch.full(self.expected_lse.shape, float("nan"), device=DEVICE)

    def run(self) -> None:
        schedule = reference_latent_schedule(self.counts.tolist(), self.shape.partitions)
        self.schedule = tuple(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in schedule)
        rows = self.shape.partial_rows()
        self.partial = tuple(torch.full((rows, n), float("nan"), device=DEVICE) for n in (512, 2))
        parts = launch.Parts(self.shape, self.schedule, *self.partial)
        tensors = self.table, self.requests, self.numbers, self.counts
        step = pick_launch.make_pick_step(self.heads, SCALE, *tensors, parts, self.lse)
        query, output = self.query.dtype, self.output.dtype
        if DEVICE.type == "cuda":
            decode = pick_launch.CudaPickDecode(
                self.codec.rows, self.cache, self.heads, query, output, self.constant, has_lse=True
            )
            decode(step, self.query, self.rope_query, self.output, self.picks)
            return
        import emulated

        has_constant, block_size = self.constant is not None, self.cache.shape[1]
        variant = launch.LatentVariant(
            self.heads, self.shape.rows, block_size, query, output, has_constant, has_lse=True
        )
        layer = launch.layer_arguments(self.cache, self.constant)
        emulated.run_latent(
            launch.constants(self.codec.rows, variant),
            launch.call_arguments(self.output, self.query, self.rope_query), step.step,
            pick_launch.pick_arguments(step, self.picks) + layer, self.heads,
        )  # fmt: skip

    def check(self) -> None:
        error = float((self.output.double() - self.expected).norm() / self.expected.norm())
        of_lse = torch.where(self.lse == self.expected_lse, 0, self.lse - self.expected_lse)  # some are infinite
        assert error < BOUND and float(of_lse.abs().max()) < 2e-3, (error, of_lse.abs().max())


EDGES = (0, 1, 63, 64, 65)
CASES = [
    {"name": "tq4", "heads": 16, "counts": EDGES, "gap": 2112},
    {"name": "tq4", "heads": 40, "counts": EDGES, "gap": 2112, "partitions": 2, "has_constant": True},
    {"name": "tq4", "heads": 20, "counts": (130, 200, 7), "holes": 0.3, "rope_bits": 8, "block_size": 16},
    {"name": "tq3", "heads": 8, "counts": (150, 20), "rope_bits": 8},
    {"name": "turboquant35", "heads": 16, "counts": (70, 64)},
    {"name": "turboquant25", "heads": 32, "counts": (70, 129), "partitions": 1, "holes": 0.1},
    {"name": "turboquant35", "heads": 64, "counts": (150, 64), "rope_bits": 8, "holes": 0.3},
    {"name": "turboquant25", "heads": 48, "counts": (70,)},
    {"name": "tq3", "heads": 64, "counts": (70, 190), "partitions": 1},
    {"name": "tq4", "heads": 16, "counts": (2047, 2048)},
    gpu_only(name="tq4", heads=128, counts=(2047, 2048, *EDGES), partitions=132),
    gpu_only(name="tq4", heads=64, counts=(2048,) * 64, partitions=132, gap=8448),
    gpu_only(name="tq4", heads=8, counts=(2048,) * 64, partitions=132, gap=8448),
    gpu_only(name="tq3", heads=128, counts=(2048, 1000, 300), rope_bits=8, holes=0.5, partitions=132),
    gpu_only(name="turboquant35", heads=24, counts=(2048, 1000, 300), holes=0.5, partitions=132, block_size=128),
]  # fmt: skip


@runs
@pytest.mark.parametrize("options", CASES, ids=str)
def test_decode(options: dict[str, Any]) -> None:
    case = Case(**options)
    case.run()
    case.check()


@runs
@pytest.mark.parametrize("heads", [16, 64])
def test_order_of_picks_does_not_matter(heads: int) -> None:
    """But for rounding; the second time there are picks past the block table, which are none."""
    case = Case("tq4", heads, (130,), holes=0.1)
    case.run()
    first, order = case.output.clone(), torch.randperm(130, device=DEVICE)
    case.picks = torch.where(case.picks < 0, 1 << 30, case.picks)[:, order].contiguous()
    case.run()
    case.check()
    assert (case.output - first).norm() < BOUND * first.norm() and not torch.equal(case.output, first)


@runs
@pytest.mark.parametrize("heads", [16, 64])
def test_tokens_without_picks(heads: int) -> None:
    """Where all that are looked at are none, the output is the constant."""
    case = Case("tq4", heads, (70, 5), has_constant=True)
    case.picks[:] = -1
    case.run()
    assert case.constant is not None
    assert torch.equal(case.output, case.constant.expand_as(case.output)) and (case.lse == -torch.inf).all()


@pytest.mark.parametrize(("blocks", "is_served"), [(1 << 16, False), ((1 << 16) - 1, True)])
def test_rows_have_numbers_up_to_64_gib(blocks: int, *, is_served: bool) -> None:
    cache = torch.empty(blocks, 64, 1 << 14, dtype=torch.uint8, device="meta")
    with contextlib.nullcontext() if is_served else pytest.raises(AssertionError, match="65,536 blocks span"):
        pick_launch.check_span(cache)
