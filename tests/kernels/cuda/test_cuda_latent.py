"""The CUDA kernel over latent pages against attention over what the codec reads, in float64; emulated on the CPU."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_code import dump, resources
from packed_kv.codecs.latent import LatentCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import latent_launch as launch
from packed_kv.kernels.cuda import latent_ring_launch, runs_on
from packed_kv.kernels.cuda.kernel import block_of
from packed_kv.layout import latent_layout
from schedules import reference_latent_schedule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUND = 2e-3
"""Relative RMS error: fp16 rounding of queries, latents and weights."""
if DEVICE.type == "cpu":
    runs = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
else:
    unfit = not runs_on(torch.cuda.get_device_capability())
    runs = pytest.mark.skipif(unfit, reason="needs a GPU of compute capability 9.0")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="the emulator takes seconds, and others cover the code")


def gpu_only(**options: Any) -> Any:
    return pytest.param(options, marks=on_gpu)


class Case:
    """A batch on pages of poison, and what its outputs must be.

    Args:
        name: of the format.
        heads: query heads.
        seq_lens, query_lens: of each request.
        block_size: tokens of a page.
        partitions: of the schedule, if there is one row block.
        dtype, output: of queries and outputs.
        size: of latents; sharpness: of the softmax. rope_bits: of RoPE channels.
        leaves_parts: whether there is no output, but parts.
    """

    def __init__(
        self, name: str, heads: int, seq_lens: tuple[int, ...], query_lens: tuple[int, ...] = (), block_size: int = 64,
        partitions: int = 4, dtype: torch.dtype = torch.bfloat16, output: torch.dtype = torch.float32,
        size: float = 1.0, sharpness: float = 1.0, has_constant: bool = False, poison: int = 0xFF,
        rope_bits: int = 16, leaves_parts: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(heads + len(seq_lens))

        def gaussian(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        query_lens = query_lens or (1,) * len(seq_lens)
        self.codec = LatentCodec(FORMATS[name], 512, 64, DEVICE, rope_bits=rope_bits)
        self.heads, self.longest, tokens = heads, max(query_lens), sum(query_lens)
        blocks_each = [-(-n // block_size) for n in seq_lens]
        cache = torch.full((sum(blocks_each) + 2, block_size, self.codec.slot_bytes), poison, dtype=torch.uint8)
        self.cache = cache.to(DEVICE)
        order = torch.randperm(len(cache), generator=generator).to(torch.int32)
        table = torch.full((len(seq_lens), max(blocks_each)), -1, dtype=torch.int32)
        start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        self.query = (gaussian(tokens, heads, 512) * sharpness).to(dtype)
        # As vLLM has them: the last channels of longer vectors.
        self.rope_query = (gaussian(tokens, heads, 192) * sharpness).to(dtype)[..., 128:]
        self.scale = 576**-0.5
        self.constant = gaussian(512) if has_constant else None
        self.expected = torch.zeros(tokens, heads, 512, dtype=torch.float64, device=DEVICE)
        self.expected_lse = torch.zeros(tokens, heads, dtype=torch.float64, device=DEVICE)
        used = 0
        for i, (seq_len, count) in enumerate(zip(seq_lens, query_lens, strict=True)):
            table[i, : blocks_each[i]] = order[used : used + blocks_each[i]]
            used += blocks_each[i]
            ids = torch.arange(seq_len)
            slots = (table[i, ids // block_size].long() * block_size + ids % block_size).to(DEVICE)
            self.codec.write(self.cache, slots, gaussian(seq_len, 512) * size, gaussian(seq_len, 64))
            pieces = torch.arange(-(-seq_len // 16))
            pages = table[i, pieces * 16 // block_size].long() * (block_size // 16) + pieces % (block_size // 16)
            latent, rope = (x[:seq_len].double() for x in self.codec.read(self.cache, pages.to(DEVICE)))
            rows = slice(int(start[i]), int(start[i]) + count)
            scores = self.query[rows].double() @ latent.T + self.rope_query[rows].double() @ rope.T
            limit = torch.arange(seq_len - count, seq_len, device=DEVICE)[:, None, None]
            scores = (scores * self.scale).masked_fill(ids.to(DEVICE) > limit, -torch.inf)
            self.expected_lse[rows] = scores.logsumexp(-1)
            self.expected[rows] = scores.softmax(-1) @ latent
        if self.constant is not None:
            self.expected += self.constant.double()
        self.table, self.start = table.to(DEVICE), start.to(DEVICE)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
        self.shape = launch.latent_grid(heads * self.longest, partitions)
        self.output: torch.Tensor | None = None
        if not leaves_parts:
            self.output = torch.full(self.expected.shape, float("nan"), dtype=output, device=DEVICE)
        self.lse = torch.full(self.expected_lse.shape, float("nan"), device=DEVICE)
        rows = self.shape.partial_rows(len(seq_lens) if leaves_parts else 0)
        self.partial_output = torch.full((rows, 512), float("nan"), device=DEVICE)
        self.partial_stats = torch.full((rows, 2), float("nan"), device=DEVICE)

    def step(self) -> launch.Step:
        schedule = reference_latent_schedule(self.seq_lens.tolist(), self.shape.partitions)
        self.schedule = tuple(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in schedule)
        parts = launch.Parts(self.shape, self.schedule, self.partial_output, self.partial_stats)
        return launch.make_step(
            self.heads, self.longest, self.scale, self.table, self.start, self.seq_lens, parts, self.lse
        )  # fmt: skip

    def run(self) -> None:
        step = self.step()
        output = None if self.output is None else self.output.dtype
        if DEVICE.type == "cuda":
            decode = launch.CudaLatentDecode(
                self.codec.layout, self.cache, self.heads, self.query.dtype, output, self.constant,
                has_lse=True,
            )  # fmt: skip
            decode(step, self.query, self.rope_query, self.output)
            return
        import emulated

        variant = launch.LatentVariant(
            self.heads, self.shape.rows, self.cache.shape[1], self.query.dtype, output,
            self.constant is not None, True,
        )  # fmt: skip
        emulated.run_latent(
            launch.constants(self.codec.layout, variant),
            launch.call_arguments(self.output, self.query, self.rope_query), step,
            launch.layer_arguments(self.cache, self.constant), self.heads,
        )  # fmt: skip

    def merge_parts(self) -> None:
        """Make output and lse from parts, as `latent_ring.cu` does."""
        begins, spans = (x.tolist() for x in self.schedule)
        slots = self.partial_output.view(-1, self.shape.row_blocks * self.shape.rows, 512).double()
        stats = self.partial_stats.view(*slots.shape[:2], 2).double()
        written = torch.zeros(slots.shape[:2], dtype=torch.bool, device=DEVICE)
        self.output = torch.zeros(self.expected.shape, dtype=torch.float64, device=DEVICE)
        for request, (first, count) in enumerate(spans):
            own = slice(int(self.start[request]), int(self.start[request + 1]))
            rows = (own.stop - own.start) * self.heads
            places = [2 * (first + part) for part in range(count)]
            if count == 1:
                places = [2 * self.shape.partitions + request]
            elif count and begins[first][0] != request:
                places[0] += 1
            if not rows:
                continue
            written[places, :rows] = True
            sums, maxima, totals = slots[places, :rows], *stats[places, :rows].unbind(-1)
            weights = (maxima - maxima.amax(0)).exp2()
            total = (weights * totals).sum(0)
            mean = (weights[..., None] * sums).sum(0) * launch.LATENT_DIVISOR / total[:, None]
            self.output[own] = mean.view(-1, self.heads, 512)
            self.lse[own] = ((maxima.amax(0) + total.log2()) * math.log(2)).view(-1, self.heads)
        assert torch.equal(~slots.isnan().any(-1), written) and torch.equal(~stats.isnan().any(-1), written)

    def errors(self) -> tuple[float, float]:
        """Of the outputs, the relative RMS error; of the log-sum-exps, the largest absolute one."""
        assert self.output is not None
        error = (self.output.double() - self.expected).norm() / self.expected.norm()
        of_lse = torch.where(
            self.lse == self.expected_lse, 0, self.lse.double() - self.expected_lse
        )  # some are infinite
        return float(error), float(of_lse.abs().max())


CASES = [
    {"name": "tq4", "heads": 16, "seq_lens": (1, 37, 300)},
    {"name": "turboquant25", "heads": 4, "seq_lens": (200, 70, 0, 5), "query_lens": (3, 0, 1, 2), "block_size": 16},
    {"name": "tq3", "heads": 40, "seq_lens": (500, 90), "query_lens": (2, 1), "sharpness": 3.0, "has_constant": True},
    {"name": "tq4", "heads": 20, "seq_lens": (37, 200), "rope_bits": 8, "sharpness": 3.0, "block_size": 32},
    {"name": "tq4", "heads": 36, "seq_lens": (600,), "partitions": 8},  # two shares of parts are merged
    {"name": "tq4", "heads": 32, "seq_lens": (130, 1, 65, 190), "partitions": 1},  # runs of odd numbers of tiles
    gpu_only(name="turboquant35", heads=64, seq_lens=(4096, 64, 65, 1000, 1)),
    gpu_only(name="tq4", heads=128, seq_lens=(3000, 4097, 17), partitions=132),
    gpu_only(name="turboquant35", heads=128, seq_lens=(3000, 4097, 17), partitions=132, rope_bits=8),
    gpu_only(name="tq4", heads=16, seq_lens=(3000, 4097, 17), partitions=132, rope_bits=8, block_size=16),
    gpu_only(name="turboquant35", heads=32, seq_lens=(30000,), partitions=132),
    gpu_only(name="tq4", heads=64, seq_lens=(500, 900, 64, 63), query_lens=(2, 1, 2, 1), partitions=132),
    gpu_only(name="turboquant25", heads=20, seq_lens=(9000, 100, 0, 64), partitions=132, block_size=48),
    gpu_only(name="tq3", heads=16, seq_lens=(30000, 700), query_lens=(8, 3), partitions=132),
    gpu_only(name="turboquant35", heads=1, seq_lens=(100, 5000), query_lens=(100, 3), partitions=132),
    gpu_only(name="tq4", heads=48, seq_lens=(2000, 900), size=20.0, sharpness=5.0, dtype=torch.float16),
]


CASES_OF_PARTS = [
    {"name": "tq4", "heads": 16, "seq_lens": (300, 1, 37, 150), "partitions": 3},  # two whole ones in a partition
    {"name": "tq3", "heads": 40, "seq_lens": (500, 90), "query_lens": (2, 1), "sharpness": 3.0},
    gpu_only(name="tq4", heads=20, seq_lens=(9000, 100, 64, 1, 5000), partitions=132),
    gpu_only(name="tq4", heads=20, seq_lens=tuple(range(1, 400, 7)), partitions=132),
]


@runs
@pytest.mark.parametrize("options", CASES, ids=str)
def test_decode(options: dict[str, Any]) -> None:
    case = Case(**options)
    case.run()
    error, of_lse = case.errors()
    assert error < BOUND and of_lse < 2e-3, (error, of_lse)


@runs
@pytest.mark.parametrize("options", CASES_OF_PARTS, ids=str)
def test_parts_that_are_left(options: dict[str, Any]) -> None:
    """Each in a place of its own, and nothing else written."""
    case = Case(**options, leaves_parts=True)
    case.run()
    assert case.lse.isnan().all()
    case.merge_parts()
    error, of_lse = case.errors()
    assert error < BOUND and of_lse < 2e-3, (error, of_lse)


@runs
def test_rows_that_see_no_token() -> None:
    """As with a recent window: requests without tokens in pages, and queries of which only the last sees some."""
    case = Case("tq4", heads=4, seq_lens=(4, 70, 3), query_lens=(4, 1, 3), has_constant=False)
    case.seq_lens -= torch.tensor([3, 0, 3], dtype=torch.int32, device=DEVICE)
    case.run()
    sees_none = torch.tensor([True, True, True, False, False, True, True, True], device=DEVICE)
    assert (case.lse == -torch.inf).all(1).tolist() == sees_none.tolist()
    assert not case.output[sees_none].any()
    assert case.output.isfinite().all()


@pytest.mark.parametrize(
    ("name", "rows", "rope_bits"),
    [
        ("tq4", 64, 16),
        ("turboquant35", 48, 8),
        ("turboquant25", 16, 16),
        ("tq4", 24, 16),
        ("tq4", 32, 16),
        ("tq4", 64, 8),
    ],
)
def test_resources(name: str, rows: int, rope_bits: int, tmp_path: Path) -> None:
    """NVRTC, which needs no GPU, compiles the kernel with few words spilled, and products run several at a time: where
    registers do not suffice, the compiler waits for each of the 40 and more by itself."""
    from packed_kv.kernels.cuda.nvrtc import compiled_kernel
    from packed_kv.kernels.cuda.source import LATENT

    variant = launch.LatentVariant(rows, rows, 64, torch.bfloat16, torch.bfloat16, has_constant=True, has_lse=False)
    file = tmp_path / "latent.cubin"
    file.write_bytes(
        compiled_kernel(launch.constants(latent_layout(FORMATS[name], 512, 64, rope_bits), variant), LATENT)
    )
    registers, stack, _ = resources(file)["latent_decode"]
    assert registers <= 168 and stack <= 64
    # Up to 32 rows: for each of nine blocks, as the next takes its registers; above 16, halves of sums in two loops.
    waits = {16: 12, 24: 14, 32: 14}.get(rows, 10)
    assert dump("--dump-sass", file).count("WARPGROUP.DEPBAR") <= waits


@pytest.mark.parametrize("shares", latent_ring_launch.CHANNEL_SHARES)
def test_resources_of_the_ring(shares: int, tmp_path: Path) -> None:
    """Where there are many blocks, two fit on an SM; and the code stays short: most loops are not unrolled."""
    from packed_kv.kernels.cuda.nvrtc import compiled_kernel
    from packed_kv.kernels.cuda.source import LATENT_RING

    variant = latent_ring_launch.LatentRingVariant(20, shares, 8, torch.bfloat16, torch.bfloat16, has_constant=True)
    constants = latent_ring_launch.constants(variant)
    file = tmp_path / "latent_ring.cubin"
    file.write_bytes(compiled_kernel(constants, LATENT_RING))
    registers, _, _ = resources(file)["attend_latent_ring"]
    threads, shared_bytes = block_of(file.read_bytes(), "attend_latent_ring")
    assert registers <= (128 if shares < 4 else 168) and threads == 256 and 2 * shared_bytes <= 227 << 10
    assert len(re.findall(r"^\s+/\*[0-9a-f]{4}\*/", dump("--dump-sass", file), re.M)) < 1250


def test_shape() -> None:
    assert launch.latent_grid(16, 132) == (16, 1, 132)
    assert launch.latent_grid(20, 132) == (24, 1, 132)
    assert launch.latent_grid(25, 132) == (32, 1, 132)
    assert launch.latent_grid(66, 132) == (48, 2, 66)
    assert launch.latent_grid(128, 132) == (64, 2, 66)


def test_shares_of_a_merge() -> None:
    found = [launch.merge_shares(132, requests) for requests in (1, 4, 8, 16, 64, 256)]
    assert found == [8, 8, 4, 2, 1, 1]


def test_shares_of_the_ring() -> None:
    found = [
        latent_ring_launch.channel_shares(heads * requests, 132) for heads, requests in ((64, 64), (20, 64), (16, 64))
    ]
    assert found == [1, 2, 2]
    assert [latent_ring_launch.channel_shares(20 * requests, 132) for requests in (1, 8, 16, 256)] == [8, 8, 8, 1]
