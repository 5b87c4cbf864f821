"""Time of the decode kernels a layer: rotate the query, attend over packed pages, merge and rotate back.

    python benchmarks/pair_kernels.py [--dtypes NAME ...] [--kernels triton cuda] [--recent N] [--spread S]
        [--means {one,blocks,values}] [--key-bits BITS ...] [--group N ...] [--query-tokens N ...] [--kv-heads N]
        [--head-dim N] [--csv FILE]

Caches of several layers are used in turn, so that the L2 does not serve them; a CUDA graph holds one round, and its
replays are timed with events, one kernel's and then another's, several times over. `attention` is without the rotation
of the query: the decode kernel and, where one follows, the merge. `bandwidth` is the packed bytes over that, as a share
of what a copy of 4 GB moves on the same card. --kv-heads heads of --head-dim channels, and --group query heads of each:
8 of 128, and 4, as in an 8B model, if they are not given. --query-tokens is the new tokens of a request, its drafts
included. With --spread S requests have 1 - S to 1 + S times the context, in any order. With --means keys have one mean,
or one of each block of positions, whose product with the queries is made beside their rotation, or `values` have one as
well. With --key-bits the kernels are timed over pages whose groups of K have these bits, too, in turns with those of
the dtype's own widths. The kernels `bf16` and `fp8` are FlashAttention 3 of vLLM over such pages of the same batch, its
own scheduler included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from packed_kv.channel_calibration import UNCALIBRATED, ChannelCalibration
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.gpu_generations import generation_of
from packed_kv.kernels.cuda import grids
from packed_kv.kernels.cuda import launch as cuda
from packed_kv.kernels.triton import decode as decode_module
from packed_kv.kernels.triton.means import Means
from packed_kv.kernels.triton.rotate import rotation_matrix
from packed_kv.layout import MICRO_BLOCK, ring_slot_bytes
from packed_kv.model.rope import Rope
from rows import append, commit_here, machine

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from launchers import decode, merge, rotate_query

SHAPES = ((32, 8192), (128, 2048), (1, 32768), (8, 32768))
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 32, 8, 128, 16
FLASH = {"bf16": 4, "fp8": 2}
"""Kernels of FlashAttention 3, and the bytes of a channel of a slot."""
TILE_TOKENS = cuda.TILE_BLOCKS * MICRO_BLOCK


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.numel() / milliseconds * 1e3


class Heads(NamedTuple):
    """KV heads, the channels and query heads of each, and the bits of K's groups; None: the dtype's."""

    count: int = KV_HEADS
    channels: int = HEAD_DIM
    group: int = QUERY_HEADS // KV_HEADS
    key_bits: tuple[int, ...] | None = None

    def rope(self) -> Rope:
        """Return the rotation of positions of such heads."""
        return Rope(tuple(10000.0 ** (-2 * pair / self.channels) for pair in range(self.channels // 2)))


HEADS = Heads()


class Layers:
    """A batch and several layers' caches of it, of random codes and of scales as data has them.

    `means`: of keys, "one", "blocks" of positions, these and those of "values", or None. `query_tokens`: of a request.
    """

    def __init__(
        self, name: str, requests: int, context: int, recent: int, spread: float = 0, means: str | None = None,
        heads: Heads = HEADS, query_tokens: int = 1,
    ) -> None:  # fmt: skip
        self.heads, (kv_heads, head_dim, group, key_bits) = heads, heads
        keys = ChannelCalibration(group_bits=key_bits)
        if means:
            mean, first_mean = torch.randn(kv_heads, head_dim), torch.randn(kv_heads, head_dim)
            rope = None if means == "one" else heads.rope()
            keys = ChannelCalibration(mean=mean, first_mean=first_mean, rope=rope, group_bits=key_bits)
        positions = int((1 + spread) * context) if means in ("blocks", "values") else None
        values = ChannelCalibration(mean=mean, first_mean=first_mean) if means == "values" else UNCALIBRATED
        self.codec = PagedCodec(FORMATS[name], head_dim, keys, values, device="cuda", positions=positions)
        self.page = self.codec.layout
        self.means, self.value_means = (Means.of(one.transform) for one in self.codec.codecs)
        blocks, slot_bytes = requests * context // BLOCK_SIZE, self.codec.slot_bytes
        shape = (blocks, kv_heads, BLOCK_SIZE, slot_bytes)
        self.caches = [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
        for cache in self.caches:
            scales = cache.view(blocks, kv_heads, BLOCK_SIZE // 16, -1)[..., self.page.plane(0, "scales").offset :]
            scales.copy_(torch.randint(0x64, 0x74, scales.shape, dtype=torch.uint8, device="cuda"))
        steps = [1 - spread + spread * (2 * i + 1) / requests for i in torch.randperm(requests).tolist()]
        lengths = [int(step * context) // BLOCK_SIZE * BLOCK_SIZE for step in steps]
        self.tokens = sum(lengths)
        self.tables = [_deal_out(torch.randperm(blocks), lengths) for _ in self.caches]
        self.group, self.query_tokens = group, query_tokens
        self.query = torch.randn(
            requests * query_tokens, group * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16
        )
        self.outputs = [torch.empty_like(self.query) for _ in self.caches]
        self.output = self.outputs[-1]
        self.start = query_tokens * torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.longest = max(lengths)
        first_positions = self.seq_lens.long() - query_tokens
        self.positions = (first_positions[:, None] + torch.arange(query_tokens, device="cuda")).flatten()
        self.rings = [self._ring(requests, context, recent) if recent else None for _ in self.caches]

    def _ring(self, requests: int, context: int, recent: int) -> Ring:
        kv_heads, head_dim, *_ = self.heads
        block_size, stored = 8, recent + self.query_tokens - 1
        each = stored // block_size + 2
        cache = torch.randint(
            0, 256, (requests * each, kv_heads, block_size, ring_slot_bytes(head_dim)), dtype=torch.uint8, device="cuda"
        )
        cache[..., 2 * head_dim :] = 0x60
        entries = torch.arange(-(-context // block_size), device="cuda") % each
        table = torch.arange(requests, device="cuda")[:, None] * each + entries
        first = torch.full((requests,), context - stored, dtype=torch.int32, device="cuda")
        return Ring(cache, table.to(torch.int32), first, recent)

    def rounds(self, kernel: str) -> dict[str, Callable[[], None]]:
        """Attention of all layers by `kernel`, with the rotation of the query and without."""
        if kernel in FLASH:
            return self._rounds_of_flash(kernel)
        kv_heads, head_dim, *_ = self.heads
        requests, group, tokens = len(self.seq_lens), self.group, len(self.query)
        forward = rotation_matrix(self.codec.key, kv_heads)
        backward = rotation_matrix(self.codec.value, kv_heads, inverse=True)
        sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        generation = generation_of(torch.cuda.get_device_capability(0))
        shape = decode_module.DecodeShape(kv_heads, group, head_dim)
        grid = grids.Grid(1, shape.splits(requests, self.query_tokens, sm_count, generation), is_final=False)
        if kernel == "cuda":
            inputs = grids.grid_inputs(self.page, kv_heads, sm_count)
            columns = grids.column_count(group, self.query_tokens, unpackers=inputs.unpackers)
            passes = grids.pass_count(group, self.query_tokens)
            grid = grids.grid(requests * passes, inputs, columns)
        rotated = torch.empty(tokens, kv_heads, group, head_dim, dtype=torch.float16, device="cuda")
        parts, schedule = (tokens, group * kv_heads, grid.blocks), None
        if grid.is_final:
            schedulers = grids.make_schedulers(requests, inputs, {columns: passes}, torch.device("cuda"))
            schedule = schedulers[grids.block_kind(requests * passes, inputs, columns)](self.seq_lens, passes)
            parts = (grid.blocks, kv_heads, columns)
        partial, stats = (torch.empty(*parts, size, device="cuda") for size in (head_dim, 2))
        outputs = [output.view(rotated.shape) for output in self.outputs]
        matrix = cuda.pack_matrix(backward, self.value_means)
        counters = torch.zeros(grid.blocks * kv_heads, dtype=torch.int32, device="cuda")
        bias, tiles_a_block = None, None
        if self.means:
            columns = 1 + self.means.blocks + (self.value_means is not None)
            bias = torch.full((tokens, group * kv_heads, columns), float("nan"), device="cuda")
            tiles_a_block = self.means.block_tokens // TILE_TOKENS
        rotation = rotated, head_dim**-0.5, self.means, self.positions, bias
        bound, steps = [], []
        for cache, table, ring, output in zip(self.caches, self.tables, self.rings, outputs, strict=True):
            bound.append(cuda.CudaDecode(self.page, matrix, counters, cache, ring, output, tiles_a_block))
            batch = (rotated, table, self.start, self.seq_lens, partial, stats, bias, ring, None, schedule)
            steps.append((cuda.step_arguments(*batch), batch))  # which are addresses: the tensors have to stay

        def round_of_layers(rotates: bool) -> None:
            for i, (cache, table, ring) in enumerate(zip(self.caches, self.tables, self.rings, strict=True)):
                if rotates:
                    rotate_query(self.query, forward, *rotation)
                if kernel == "cuda":
                    bound[i](grid, self.query_tokens, requests, steps[i][0], outputs[i])
                else:
                    batch = (rotated, cache, table, self.start, self.seq_lens, partial, stats)
                    centred = dict(query_bias=bias, tiles_a_block=tiles_a_block or 0, value_means=self.value_means)
                    options = dict(max_query_len=self.query_tokens, ring=ring)
                    decode(self.page, *batch, **options, **centred)
                if not grid.is_final:
                    merge(partial, stats, backward, outputs[i], value_means=self.value_means, query_bias=bias)

        rotate_query(self.query, forward, *rotation)
        return {f"{kernel} all": lambda: round_of_layers(True), kernel: lambda: round_of_layers(False)}

    def _rounds_of_flash(self, kernel: str) -> dict[str, Callable[[], None]]:
        """Attention of all layers over pages of bf16 or fp8 by FlashAttention 3, as vLLM calls it."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        kv_heads, head_dim, *_ = self.heads
        shape = (2, len(self.caches[0]), BLOCK_SIZE, kv_heads, head_dim)
        dtype = torch.bfloat16 if kernel == "bf16" else torch.float8_e4m3fn
        caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype) for _ in self.caches]
        query, scales = self.query.to(dtype), {}
        if kernel == "fp8":
            scale = torch.ones(1, device="cuda").expand(len(self.seq_lens), kv_heads)
            scales = dict(q_descale=scale, k_descale=scale, v_descale=scale)

        def round_of_layers() -> None:
            for cache, table in zip(caches, self.tables, strict=True):
                flash_attn_varlen_func(
                    query, *cache, out=self.outputs[0], cu_seqlens_q=self.start, max_seqlen_q=self.query_tokens,
                    seqused_k=self.seq_lens, max_seqlen_k=self.longest, softmax_scale=head_dim**-0.5, causal=True,
                    block_table=table, fa_version=3, **scales,
                )  # fmt: skip

        return {f"{kernel} all": round_of_layers, kernel: round_of_layers}


def _deal_out(blocks: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Block table, int32 [requests, most blocks of one]."""
    parts = blocks[: sum(lengths) // BLOCK_SIZE].split([n // BLOCK_SIZE for n in lengths])
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True).to("cuda", torch.int32)


def interleaved(rounds: dict[str, Callable[[], None]], layers: int = LAYERS) -> dict[str, list[float]]:
    """Microseconds a layer of each round, p20, p50 and p80 of 7 visits of 5 replays."""
    graphs, times = {name: captured(function) for name, function in rounds.items()}, {name: [] for name in rounds}
    for name in [name for _ in range(7) for name in graphs]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
        graphs[name].replay()
        events[0].record()
        for event in events[1:]:
            graphs[name].replay()
            event.record()
        torch.cuda.synchronize()
        times[name] += [start.elapsed_time(end) * 1e3 / layers for start, end in itertools.pairwise(events)]
    return {name: statistics.quantiles(found, n=10)[1::3] for name, found in times.items()}


def captured(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="DTYPE")
    parser.add_argument("--kernels", nargs="+", default=["triton", "cuda"], choices=("triton", "cuda", *FLASH))
    parser.add_argument("--recent", type=int, default=0, help="tokens of the recent window (default: 0, none)")
    parser.add_argument("--spread", type=float, default=0, help="of the contexts (default: 0, all alike)")
    parser.add_argument("--means", choices=("one", "blocks", "values"), help="of keys, and of values (default: none)")
    parser.add_argument("--key-bits", type=int, nargs="+", help="of K's groups, beside the dtype's (default: none)")
    parser.add_argument("--group", type=int, nargs="+", default=[4], help="query heads of a KV head (default: 4)")
    parser.add_argument("--query-tokens", type=int, nargs="+", default=[1], help="of a request (default: 1)")
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS, help="heads of K and V (default: 8)")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, help="channels of a head (default: 128)")
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{context}" for n, context in SHAPES], metavar="NxCONTEXT")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    options = parser.parse_args()
    if options.spread and options.recent:
        parser.error("--spread with --recent: the recent windows here are of requests of one length; leave one out")
    made_with = {**machine(with_vllm=False), "commit": options.commit or commit_here()}
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    heads = Heads(options.kv_heads, options.head_dim)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    for name in options.dtypes:
        cases = itertools.product(shapes, options.group, options.query_tokens)
        for (requests, context), group, query_tokens in cases:
            rounds: dict[str, Callable[[], None]] = {}
            measured: dict[str, tuple[str, tuple[int, ...] | None]] = {}
            for bits in (None, tuple(options.key_bits)) if options.key_bits else (None,):
                settings = options.recent, options.spread, options.means
                layers = Layers(
                    name, requests, context, *settings, heads._replace(group=group, key_bits=bits), query_tokens
                )
                for kernel in (kernel for kernel in options.kernels if bits is None or kernel not in FLASH):
                    label = f"{kernel} K {bits}" if bits else kernel
                    measured[label] = kernel, bits
                    found = layers.rounds(kernel)
                    rounds |= {label: found[kernel], f"{label} all": found[f"{kernel} all"]}
            times = interleaved(rounds)
            slot_bytes = FORMATS[name].slot_bytes(heads.channels)
            packed = layers.tokens * heads.count * slot_bytes
            for label, (kernel, bits) in measured.items():
                (p20, p50, p80), attention = times[f"{label} all"], times[label]
                share = packed / (attention[1] * 1e-6) / bandwidth
                if kernel in FLASH:
                    share *= FLASH[kernel] * heads.channels / slot_bytes
                case = f"{name:13} {requests:4} x {context:5}, {group} x {query_tokens} columns  {label:6}"
                print(f"{case}  {p50:7.1f} us, attention and merge {attention[1]:7.1f} us, {share:5.1%}", flush=True)
                row: dict[str, object] = {
                    "dtype": name, "requests": requests, "context": context, "spread": f"{options.spread:g}",
                    "recent": options.recent, "means": options.means or "none",
                    "key_bits": " ".join(map(str, bits or ())),
                    "kv_heads": heads.count, "head_dim": heads.channels,
                    "group": group, "query_tokens": query_tokens, "kernel": kernel,
                    "p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}",
                    "attention_p50_us": f"{attention[1]:.1f}", "bandwidth": f"{share:.3f}",
                }  # fmt: skip
                if options.csv:
                    append(options.csv, {**row, **made_with})


if __name__ == "__main__":
    sys.exit(main())
