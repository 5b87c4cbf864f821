"""Time of decode attention over latents (MLA), a layer: packed pages beside bf16 with vLLM's kernels.

    python benchmarks/latent_kernels.py [--dtypes NAME ...] [--heads N ...] [--shapes NxCONTEXT ...] [--queries N]
        [--spread S] [--rope-bits {16,8}] [--recent N] [--baselines {fa3,flashmla} ...] [--csv FILE]

Latents have 512 channels and 64 of RoPE, at 16 or 8 bits. With --recent N the last N tokens of a request are read from
its ring, by a second launch. Caches of several layers are used in turn, so that the L2 does not
serve them; a CUDA graph holds one round, and its replays are timed with events. `bandwidth` is the cache's bytes over
the time, as a share of what a copy of 4 GB moves on the same card. With --spread S requests have 1 - S to 1 + S times
the context, in any order. --queries: query tokens of a request (drafts). The scheduler, which runs once a step, is
timed separately, at the end. --baselines need vLLM's libraries, which are found beside the installed package vllm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import latent_launch as cuda
from packed_kv.kernels.cuda import latent_ring_launch as cuda_ring
from packed_kv.kernels.cuda.latent_schedule import LatentScheduler
from packed_kv.kernels.triton import latent_ring
from pair_kernels import copy_bandwidth, interleaved
from rows import append, commit_here, machine

SHAPES = ((64, 4096), (32, 8192), (8, 32768), (128, 2048), (1, 32768))
BLOCK_SIZE, RING_BLOCK, RANK, ROPE, SCALE = 64, 8, 512, 64, 192**-0.5
BF16_BYTES = 2 * (RANK + ROPE)
ROUND_BYTES = 400_000_000
LIBRARIES = {"fa3": "vllm_flash_attn/_vllm_fa3_C.abi3.so", "flashmla": "_flashmla_C.abi3.so"}


class Batch:
    """Requests, their queries, and where the pages of several layers lie."""

    def __init__(self, requests: int, context: int, heads: int, queries: int, spread: float, token_bytes: int) -> None:
        steps = [1 - spread + spread * (2 * i + 1) / requests for i in torch.randperm(requests).tolist()]
        self.lengths = [max(int(step * context) // BLOCK_SIZE, 1) * BLOCK_SIZE for step in steps]
        self.tokens, self.heads, self.queries = sum(self.lengths), heads, queries
        blocks = self.tokens // BLOCK_SIZE
        self.blocks, self.layers = blocks, max(3, min(40, ROUND_BYTES // (self.tokens * token_bytes)))
        parts = torch.randperm(blocks).split([n // BLOCK_SIZE for n in self.lengths])
        self.table = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True).to("cuda", torch.int32)
        self.query = torch.randn(requests * queries, heads, RANK + ROPE, device="cuda").bfloat16()
        self.start = torch.arange(0, requests * queries + 1, queries, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")

    def pages(self, source: torch.Tensor) -> list[torch.Tensor]:
        """Each layer's pages: those of `source` in any order."""
        picks = (torch.randint(0, len(source), (self.blocks,), device="cuda") for _ in range(self.layers))
        return [source[pick] for pick in picks]


def packed_pages(codec: LatentCodec, pages: int = 64) -> torch.Tensor:
    """Pages of random latents, uint8 [pages, BLOCK_SIZE, slot bytes]."""
    cache = torch.zeros(pages, BLOCK_SIZE, codec.slot_bytes, dtype=torch.uint8, device="cuda")
    tokens = pages * BLOCK_SIZE
    latent, rope = (torch.randn(tokens, n, device="cuda") for n in (RANK, ROPE))
    codec.write(cache, torch.arange(tokens, device="cuda"), latent, rope)
    return cache


def recent_lens(batch: Batch, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token of each request's ring, and how many of its tokens are read in pages."""
    first, page_lens = batch.seq_lens - window - batch.queries, torch.empty_like(batch.seq_lens)
    latent_ring.split_lens(batch.start, batch.seq_lens, first, window, page_lens)
    return first, page_lens


def recent_rounds(
    batch: Batch, codec: LatentCodec, window: int, lens: tuple[torch.Tensor, torch.Tensor], parts: cuda.Parts,
    output: torch.Tensor,
) -> list[Callable[[], None]]:  # fmt: skip
    """The launch of each layer that adds its ring, of zeros, to the parts of pages; `output` is filled."""
    requests, blocks = len(batch.lengths), -(-(window + batch.queries) // RING_BLOCK) + 1
    own = torch.arange(requests, device="cuda")[:, None] * blocks
    table = own + torch.arange(max(batch.lengths) // RING_BLOCK, device="cuda") % blocks
    gain, sm_count = 1 / codec.value_gain(), torch.cuda.get_device_properties(0).multi_processor_count
    queries = batch.query[..., :RANK], batch.query[..., RANK:]
    ring_shape = requests * blocks, 1, RING_BLOCK, codec.ring_slot_bytes
    first, page_lens = lens

    def of_layer() -> Callable[[], None]:
        ring = Ring(torch.zeros(ring_shape, dtype=torch.uint8, device="cuda"), table.int(), first, window)
        of_step = batch.start, batch.seq_lens, page_lens, parts
        step = cuda_ring.make_step(batch.heads, batch.queries, SCALE, sm_count, ring, *of_step)
        attend = cuda_ring.CudaLatentRing(ring.cache, batch.heads, batch.query.dtype, output.dtype, gain, None)
        return lambda kept=(ring, of_step): attend(step, *queries, output)

    return [of_layer() for _ in range(batch.layers)]


def packed_round(batch: Batch, codec: LatentCodec, source: torch.Tensor, window: int) -> Callable[[], None]:
    """Attention of all layers over packed pages, and with a window over the ring, too, by the CUDA kernels."""
    sm_count, requests = torch.cuda.get_device_properties(0).multi_processor_count, len(batch.lengths)
    shape = cuda.latent_grid(batch.heads * batch.queries, sm_count)
    output = torch.empty(*batch.query.shape[:2], RANK, dtype=torch.bfloat16, device="cuda")
    of_ring = recent_lens(batch, window) if window else None
    lens = of_ring[1] if of_ring else batch.seq_lens
    schedule = LatentScheduler(requests, sm_count, torch.device("cuda"))(lens, shape.partitions)
    rows = shape.partial_rows(requests if window else 0)
    parts = cuda.Parts(shape, schedule, *(torch.empty(rows, size, device="cuda") for size in (RANK, 2)))
    step = cuda.make_step(batch.heads, batch.queries, SCALE, batch.table, batch.start, lens, parts)
    caches, dtype, of_pages = batch.pages(source), output.dtype, output
    recent = recent_rounds(batch, codec, window, of_ring, parts, output) if of_ring else []
    if of_ring:
        dtype = of_pages = None
    layers = [cuda.CudaLatentDecode(codec.layout, cache, batch.heads, batch.query.dtype, dtype) for cache in caches]
    query, rope_query = batch.query[..., :RANK], batch.query[..., RANK:]

    def round_of_layers(kept: object = (batch, parts, caches, lens)) -> None:
        for number, layer in enumerate(layers):
            layer(step, query, rope_query, of_pages)
            if recent:
                recent[number]()

    return round_of_layers


def bf16_round(kind: str, batch: Batch) -> Callable[[], None]:
    """Attention of all layers over bf16 latents, by vLLM's FlashAttention 3 or FlashMLA."""
    caches = batch.pages(torch.randn(64, BLOCK_SIZE, RANK + ROPE, device="cuda").bfloat16())
    requests, queries, heads = len(batch.lengths), batch.queries, batch.heads
    longest = max(batch.lengths)
    if kind == "flashmla":
        query, made = batch.query.view(requests, queries, heads, -1), [None, None]

        def layer(cache: torch.Tensor) -> None:
            result = torch.ops._flashmla_C.dense_decode_fwd(
                query, cache[:, :, None], RANK, batch.seq_lens, batch.table, SCALE, True, *made, None
            )
            made[:] = result[2:]
    else:
        nope, rope = batch.query[..., :RANK].contiguous(), batch.query[..., RANK:].contiguous()
        ops = torch.ops._vllm_fa3_C
        schedule = ops.get_scheduler_metadata(
            requests, queries, longest, heads, 1, ROPE, RANK, torch.bfloat16, batch.seq_lens, batch.start, None, None,
            None, None, BLOCK_SIZE, 0, True, -1, -1, False, 0, None, 0,
        )  # fmt: skip

        def layer(cache: torch.Tensor) -> None:
            ops.fwd(
                rope, cache[..., None, RANK:], cache[..., None, :RANK], None, None, nope, None, batch.start, None, None,
                None, batch.seq_lens, queries, longest, batch.table, None, None, None, None, None, None, None, None,
                SCALE, True, -1, -1, 0.0, True, schedule, 0, None, 0, None, 1, 0, None,
            )  # fmt: skip

    return lambda: [layer(cache) for cache in caches] and None


def load_baselines(kinds: list[str]) -> None:
    spec = find_spec("vllm")
    if kinds and spec is None:
        sys.exit("--baselines need vLLM; install it or leave them out")
    for kind in kinds:
        assert spec is not None and spec.origin is not None
        torch.ops.load_library(str(Path(spec.origin).parent / LIBRARIES[kind]))


def time_scheduler() -> None:
    """Print the times of what serves all layers of a step: its schedule, and the lengths left to pages by a ring."""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    for requests in (1, 64, 256):
        scheduler = LatentScheduler(requests, sm_count, torch.device("cuda"))
        seq_lens = torch.randint(1, 20000, (requests,), dtype=torch.int32, device="cuda")
        start = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        lengths = start, seq_lens, seq_lens, 64, torch.empty_like(seq_lens)
        functions = {
            "schedule": partial(scheduler, seq_lens, sm_count),
            "lengths": partial(latent_ring.split_lens, *lengths),
        }
        times = {name: f"{time[1]:.1f}" for name, time in interleaved(functions, 1).items()}
        print(f"{requests} requests: schedule {times['schedule']} us a step, lengths {times['lengths']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["tq4"], choices=FORMATS, metavar="DTYPE")
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{context}" for n, context in SHAPES], metavar="NxCONTEXT")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--spread", type=float, default=0)
    parser.add_argument("--rope-bits", type=int, default=16, choices=(16, 8))
    parser.add_argument("--recent", type=int, default=0, help="tokens of the window; the default is none")
    parser.add_argument("--baselines", nargs="*", default=[], choices=LIBRARIES)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    options = parser.parse_args()
    made_with = {**machine(with_vllm=False), "commit": options.commit or commit_here()}
    load_baselines(options.baselines)
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    sources = {
        name: LatentCodec(FORMATS[name], RANK, ROPE, device="cuda", rope_bits=options.rope_bits)
        for name in options.dtypes
    }
    pages = {name: packed_pages(codec) for name, codec in sources.items()}
    for heads in options.heads:
        for requests, context in (map(int, shape.split("x")) for shape in options.shapes):
            rounds: dict[str, tuple[Callable[[], None], Batch, int]] = {}
            for name in [*options.baselines, *options.dtypes]:
                token_bytes = sources[name].slot_bytes if name in sources else BF16_BYTES
                batch = Batch(requests, context, heads, options.queries, options.spread, token_bytes)
                packed = name in sources
                made = (
                    packed_round(batch, sources[name], pages[name], options.recent)
                    if packed
                    else bf16_round(name, batch)
                )
                rounds[name] = made, batch, token_bytes
            for name, (function, batch, token_bytes) in rounds.items():
                p20, p50, p80 = interleaved({name: function}, batch.layers)[name]
                share = batch.tokens * token_bytes / (p50 * 1e-6) / bandwidth
                products = batch.tokens * heads * options.queries * 2 * (2 * RANK + ROPE) / p50 * 1e-6
                case = f"{heads:4} heads {requests:4} x {context:5}  {name:13}"
                print(f"{case} {p50:7.1f} us, {share:5.1%}, {products:4.0f} TFLOP/s", flush=True)
                row: dict[str, object] = {
                    "heads": heads, "requests": requests, "context": context, "spread": f"{options.spread:g}",
                    "queries": options.queries, "rope_bits": options.rope_bits if name in sources else 16,
                    "recent": options.recent if name in sources else 0, "cache": name, "p20_us": f"{p20:.1f}",
                    "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}", "bandwidth": f"{share:.3f}",
                }  # fmt: skip
                if options.csv:
                    append(options.csv, {**row, **made_with})
    time_scheduler()


if __name__ == "__main__":
    sys.exit(main())
