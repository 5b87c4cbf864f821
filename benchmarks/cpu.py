"""Time of decode attention of one layer on a CPU, beside vLLM's own op in bf16.

    python benchmarks/cpu.py [--dtypes NAME ...] [--shapes R,N,H,G,D ...] [--key-bits BITS ...] [--means]
        [--isa avx512|avx2] [--threads N] [--csv FILE]

Shapes are requests, tokens of each, KV heads, query heads a KV head, channels. Both sides take turns in one process,
each behind a sweep of 64 MB through the caches, with their arguments made before; the ratio is that of the shortest of
`--repetitions` times. With one thread it is CPU time, which other work on the machine disturbs less. `--isa avx2` takes
vLLM's op for processors without AVX-512, and a kernel compiled for them: one a process, as vLLM's builds register the
same ops. With --key-bits, of all groups of K, or --means, of K and V, each dtype is timed over pages with these, too.
No time is printed of a kernel that is not within 3e-4 of the reference.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cpu.compiler import Target, best_target, processor, target_of
from packed_kv.kernels.cpu.decode import CpuDecode
from packed_kv.reference.attention import AttentionOptions, attend
from packed_kv.vllm_compat import cpu_instructions
from rows import append, commit_here, machine

BLOCK_SIZE, DISTINCT_TOKENS, SWEEP_BYTES, BOUND = 128, 512, 1 << 26, 3e-4
SHAPES = (
    "1,4096,8,4,128", "8,2048,8,4,128", "8,8192,8,4,128", "1,32768,8,4,128", "1,512,3,3,64", "1,4096,3,3,64",
    "8,1024,3,3,64",
)  # fmt: skip
"""An 8B model's layer, then SmolLM2-135M's."""


class Shape(NamedTuple):
    requests: int
    tokens: int
    kv_heads: int
    group: int
    head_dim: int

    @property
    def blocks(self) -> int:
        """Blocks of a request."""
        return -(-self.tokens // BLOCK_SIZE)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, block table, first rows and lengths."""
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(self.requests, self.kv_heads * self.group, self.head_dim, generator=generator)
        table = torch.randperm(self.requests * self.blocks, generator=generator).to(torch.int32)
        starts = torch.arange(self.requests + 1, dtype=torch.int32)
        lengths = torch.full((self.requests,), self.tokens, dtype=torch.int32)
        return query.bfloat16(), table.view(self.requests, self.blocks), starts, lengths


class Pages(NamedTuple):
    """Pages as a calibration file has them: bits of K's groups, if not the dtype's, and whether means are left out."""

    key_bits: tuple[int, ...] = ()
    means: bool = False

    def codec(self, name: str, shape: Shape) -> PagedCodec:
        """A codec of such pages of a dtype."""
        generator, means = torch.Generator().manual_seed(2), {}
        if self.means:
            means = {"mean": torch.randn(shape.kv_heads, shape.head_dim, generator=generator)}
        key = ChannelCalibration(group_bits=self.key_bits or None, **means)
        return PagedCodec(FORMATS[name], shape.head_dim, key, ChannelCalibration(**means))


def packed_attention(name: str, shape: Shape, target: Target, pages: Pages) -> Callable[[], None]:
    """Attention over pages of a dtype, in which the first `DISTINCT_TOKENS` tokens repeat."""
    codec = pages.codec(name, shape)
    generator = torch.Generator().manual_seed(1)
    distinct = min(shape.blocks, DISTINCT_TOKENS // BLOCK_SIZE)
    some = torch.zeros(distinct, shape.kv_heads, BLOCK_SIZE, codec.slot_bytes, dtype=torch.uint8)
    tokens = distinct * BLOCK_SIZE
    key, value = torch.randn(2, tokens, shape.kv_heads, shape.head_dim, generator=generator)
    codec.write(some, torch.arange(tokens), key, value)
    query, table, starts, lengths = shape.batch()
    cache = torch.zeros(table.numel(), *some.shape[1:], dtype=torch.uint8)
    for row in table.long():
        cache[row] = some[torch.arange(shape.blocks) % distinct]
    options, output = AttentionOptions(shape.head_dim**-0.5), torch.empty_like(query)
    kernel = CpuDecode(codec, query.shape[1], shape.kv_heads, options, target=target)
    gate(kernel, cache, table, query, min(shape.tokens, 999))
    return kernel.bind(query, cache, table, starts, lengths, output)


def gate(kernel: CpuDecode, cache: torch.Tensor, table: torch.Tensor, query: torch.Tensor, tokens: int) -> None:
    """Raise ValueError if the kernel is not within `BOUND` of the reference over the first request's first tokens."""
    output = torch.empty(1, *query.shape[1:])
    first, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    kernel.bind(query[:1].float(), cache, table[:1], first, length, output)()
    wanted, _ = attend(kernel.codec, cache, table[0], tokens, query[:1].float(), kernel.options)
    error = ((output - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    if error > BOUND:
        raise ValueError(f"{kernel.codec.key.fmt.name}: the kernel's error is {error:.1e}, above {BOUND}")


def choose_op(isa: str) -> None:
    """Load vLLM's ops, of its build for AVX2 alone if that is asked for, before anything else does."""
    from vllm.platforms import current_platform

    if isa == "avx2":
        try:
            importlib.import_module("vllm._C_AVX2")
        except ImportError:  # the module's own name differs, but the ops are registered, as in vLLM
            assert hasattr(torch.ops._C, "cpu_attention_with_kv_cache")
        type(current_platform).import_kernels = classmethod(lambda cls: None)
    else:
        current_platform.import_kernels()


def vllm_attention(shape: Shape) -> Callable[[], None]:
    """The same by vLLM's op over a cache in bf16."""
    from vllm import _custom_ops as ops

    query, table, starts, lengths = shape.batch()
    isa = cpu_instructions(torch.bfloat16, BLOCK_SIZE, shape.head_dim)
    some = torch.randn(1, shape.kv_heads, 2 * BLOCK_SIZE, shape.head_dim).bfloat16()
    key, value = some.repeat(table.numel(), 1, 1, 1).chunk(2, dim=2)
    output, options = torch.empty_like(query), {"causal": True, "seq_lens": lengths}
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=shape.requests, num_heads=query.shape[1], num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        dtype=torch.bfloat16, query_start_loc=starts, sliding_window_size=-1, isa=isa, enable_kv_split=True, **options,
    )  # fmt: skip
    options |= {"query_start_loc": starts, "block_table": table, "scheduler_metadata": metadata, "s_aux": None}
    options |= {"scale": shape.head_dim**-0.5, "alibi_slopes": None, "sliding_window": -1, "softcap": 0}
    tensors = {"query": query, "key_cache": key, "value_cache": value, "output": output}
    return lambda: ops.cpu_attention_with_kv_cache(**tensors, **options)


def alternate(sides: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each side, sorted, the sides taking turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    sweep = torch.zeros(SWEEP_BYTES, dtype=torch.uint8)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(repetitions + 1):
        for side, run in sides.items():
            sweep.add_(1)
            start = clock()
            run()
            if turn:
                times[side].append(clock() - start)
    return {side: sorted(seconds) for side, seconds in times.items()}


def measure(
    shape: Shape, dtypes: list[str], target: Target, repetitions: int, others: list[Pages]
) -> list[dict[str, object]]:
    """A row for each dtype, and for each of its other pages."""
    cases = {f"{name} {pages}": (name, pages) for name in dtypes for pages in (Pages(), *others)}
    sides = {label: packed_attention(name, shape, target, pages) for label, (name, pages) in cases.items()}
    times = alternate({"auto": vllm_attention(shape)} | sides, repetitions)
    auto, rows = times.pop("auto"), []
    for label, seconds in times.items():
        name, pages = cases[label]
        row: dict[str, object] = {"dtype": name, **shape._asdict(), "threads": torch.get_num_threads()}
        row |= {"key_bits": " ".join(map(str, pages.key_bits)), "means": "yes" if pages.means else ""}
        row |= {"target": target.name, "auto_ms": f"{auto[0] * 1e3:.3f}", "packed_ms": f"{seconds[0] * 1e3:.3f}"}
        middle = len(seconds) // 2
        row |= {"ratio": f"{seconds[0] / auto[0]:.2f}", "ratio_of_medians": f"{seconds[middle] / auto[middle]:.2f}"}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=FORMATS, default=["tq4", "turboquant25"], metavar="NAME")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="R,N,H,G,D")
    parser.add_argument("--key-bits", type=int, nargs="+", default=[], help="of K's groups, beside the dtype's")
    parser.add_argument("--means", action="store_true", help="K and V less their means, beside whole ones")
    parser.add_argument("--isa", choices=("avx512", "avx2"), default="avx512")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    choose_op(arguments.isa)
    others = [Pages(key_bits=tuple(arguments.key_bits))] * bool(arguments.key_bits)
    others += [Pages(means=True)] * arguments.means
    target = target_of("avx2") if arguments.isa == "avx2" else best_target()
    for text in arguments.shapes:
        shape = Shape(*map(int, text.split(",")))
        for row in measure(shape, arguments.dtypes, target, arguments.repetitions, others):
            print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            if arguments.csv:
                append(arguments.csv, row | {"processor": processor()[0], **machine(), "commit": commit_here()})


if __name__ == "__main__":
    main()
