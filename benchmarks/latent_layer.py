"""Time of what packed latents add to a decode step, a layer: store of new tokens, attention over pages, the ring.

    python benchmarks/latent_layer.py [--heads N ...] [--shapes NxCONTEXT ...] [--recent N] [--shares N]
        [--late | --early-pages]

A CUDA graph holds eight layers, each with a cache, a ring, queries and new tokens of its own: gaps between kernels
count. `all` is the three launches, `attention` is without the store, `pages` and `store` are these alone, and `no
window` is attention over all tokens in pages, with the merge. --late: no kernel begins before the one before it has
ended. --early-pages: attention over pages may, too, as it did before it was launched as usual (`early_launch.py`).
--shares: blocks of the ring that share channels, instead of what the shape gets. Each case says whether the graph
leaves what the same launches leave one by one. Last come stores of so many tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from latent_kernels import BLOCK_SIZE, RANK, RING_BLOCK, ROPE, SCALE, packed_pages
from launchers import store_latents
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import early_launch
from packed_kv.kernels.cuda import latent_launch as cuda
from packed_kv.kernels.cuda import latent_ring_launch as cuda_ring
from packed_kv.kernels.cuda.latent_schedule import LatentScheduler
from packed_kv.kernels.triton import latent_ring
from packed_kv.kernels.triton.latent_store import StoreLatentsLaunch
from pair_kernels import captured, interleaved

SHAPES = ((8, 1024), (64, 8192), (8, 32768), (64, 4096))
LAYERS, STORES = 8, (8, 64, 256, 512, 8192)
ALL = ("store", "pages", "ring")
PAGE_THREADS = 384
"""Threads of a block of the kernel over pages."""


def new_tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, RANK, device="cuda").bfloat16(), torch.randn(count, ROPE, device="cuda").bfloat16()


class Case:
    """A batch of equal lengths, and what each layer has of it."""

    def __init__(self, codec: LatentCodec, heads: int, requests: int, context: int, window: int) -> None:
        self.codec, self.heads, self.requests, self.window = codec, heads, requests, window
        self.sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        source, pages, last = packed_pages(codec), context // BLOCK_SIZE, context - 1
        self.caches = [source[torch.randint(0, len(source), (requests * pages,))] for _ in range(LAYERS)]
        self.table = torch.randperm(requests * pages, device="cuda").view(requests, pages).int()
        self.slots = self.table[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
        self.start = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        blocks = -(-(window + 1) // RING_BLOCK) + 1
        own = torch.arange(requests, device="cuda")[:, None] * blocks + 1
        ring_table = (own + torch.arange(context // RING_BLOCK, device="cuda") % blocks).int()
        self.ring_slots = (ring_table[:, last // RING_BLOCK] * RING_BLOCK + last % RING_BLOCK).int()
        first, self.page_lens = self.seq_lens - window - 1, torch.empty_like(self.seq_lens)
        latent_ring.split_lens(self.start, self.seq_lens, first, window, self.page_lens)
        ring_tokens, size = (1 + requests * blocks) * RING_BLOCK, codec.ring_slot_bytes
        self.rings: list[Ring] = []
        for _ in range(LAYERS):
            ring = torch.zeros(ring_tokens // RING_BLOCK, 1, RING_BLOCK, size, dtype=torch.uint8, device="cuda")
            codec.write_ring(ring, torch.arange(ring_tokens, device="cuda"), *new_tokens(ring_tokens))
            self.rings.append(Ring(ring, ring_table, first, window))
        self.new = [new_tokens(requests) for _ in range(LAYERS)]
        self.query = torch.randn(LAYERS, requests, heads, RANK + ROPE, device="cuda").bfloat16()
        self.output = torch.zeros(LAYERS, requests, heads, RANK, dtype=torch.bfloat16, device="cuda")

    def round_of(self, launches: tuple[str, ...], *, has_window: bool = True) -> Callable[..., None]:
        """Return a function that launches `launches` of all layers. Called with True, it waits after each layer's
        attention over pages, and after each layer."""
        shape, lens = cuda.latent_grid(self.heads, self.sm_count), self.page_lens if has_window else self.seq_lens
        schedule = LatentScheduler(self.requests, self.sm_count, torch.device("cuda"))(lens, shape.partitions)
        rows = shape.partial_rows(self.requests)
        parts = cuda.Parts(shape, schedule, *(torch.empty(rows, size, device="cuda") for size in (RANK, 2)))
        step = cuda.make_step(self.heads, 1, SCALE, self.table, self.start, lens, parts)
        of_ring = (self.start, self.seq_lens, self.page_lens, parts)
        store_grid, of_store = StoreLatentsLaunch.step(self.codec, self.slots, self.ring_slots)
        layers: list[tuple[Any, ...]] = []
        dtype, gain = self.output.dtype, 1 / self.codec.value_gain()
        for cache, ring, new in zip(self.caches, self.rings, self.new, strict=True):
            layers.append(
                (
                    StoreLatentsLaunch(self.codec, cache, *new, ring.cache),
                    cuda.CudaLatentDecode(self.codec.layout, cache, self.heads, dtype, None if has_window else dtype),
                    cuda_ring.CudaLatentRing(ring.cache, self.heads, dtype, dtype, gain, None),
                    cuda_ring.make_step(self.heads, 1, SCALE, self.sm_count, ring, *of_ring),
                )
            )

        def run(one_by_one: bool = False, kept: object = parts) -> None:
            for number, (store, attend, add_ring, ring_step) in enumerate(layers):
                query, output = self.query[number], self.output[number]
                both = query[..., :RANK], query[..., RANK:]
                if "store" in launches:
                    store(store_grid, self.new[number], of_store)
                if "pages" in launches:
                    attend(step, *both, None if has_window else output)
                if one_by_one:
                    torch.cuda.synchronize()
                if "ring" in launches:
                    add_ring(ring_step, *both, output)
                if one_by_one:
                    torch.cuda.synchronize()

        return run

    def is_right(self, run: Callable[..., None]) -> bool:
        """Return True if a graph of all launches gives the results of single launches, each of 20 times."""
        run(True)
        expected, graph = self.output.clone(), captured(run)
        same = True
        for _ in range(20):
            self.output.zero_()
            graph.replay()
            same = same and torch.equal(self.output, expected)
        return same


def time_stores(codec: LatentCodec) -> None:
    """Print the times of storing so many tokens in a layer's pages."""
    rounds: dict[str, Callable[[], None]] = {}
    for count in STORES:
        cache = torch.zeros(count // BLOCK_SIZE + 1, BLOCK_SIZE, codec.slot_bytes, dtype=torch.uint8, device="cuda")
        of_call = (codec, cache, torch.arange(count, device="cuda"), *new_tokens(count))
        rounds[str(count)] = lambda of_call=of_call: [store_latents(*of_call) for _ in range(LAYERS)] and None
    found = interleaved(rounds, LAYERS)
    print("store of so many tokens: " + ", ".join(f"{name} {time[1]:.1f}" for name, time in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 20, 64])
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{context}" for n, context in SHAPES], metavar="NxCONTEXT")
    parser.add_argument("--recent", type=int, default=64, help="tokens of the window (default: %(default)s)")
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--early-pages", action="store_true")
    parser.add_argument("--shares", type=int, choices=cuda_ring.CHANNEL_SHARES)
    asked = parser.parse_args()
    launch = early_launch.launch_kernel
    if asked.late:
        early_launch.launch_kernel = lambda *arguments, is_early=False: launch(*arguments)
    if asked.early_pages:
        early_launch.launch_kernel = lambda kernel, grid, threads, *rest, is_early=False: launch(
            kernel, grid, threads, *rest, is_early=is_early or threads == PAGE_THREADS
        )
    if asked.shares:
        cuda_ring.channel_shares = lambda *_: asked.shares
    codec = LatentCodec(FORMATS["tq4"], RANK, ROPE, device="cuda")
    for heads in asked.heads:
        for requests, context in (map(int, shape.split("x")) for shape in asked.shapes):
            case = Case(codec, heads, requests, context, asked.recent)
            rounds = {
                "all": case.round_of(ALL),
                "attention": case.round_of(ALL[1:]),
                "pages": case.round_of(("pages",)),
                "store": case.round_of(("store",)),
                "no window": case.round_of(("pages",), has_window=False),
            }
            times = ", ".join(f"{name} {time[1]:.1f}" for name, time in interleaved(rounds, LAYERS).items())
            says = "same" if case.is_right(rounds["all"]) else "WRONG"
            print(f"{heads:3} heads {requests:3} x {context:5}: {times} us a layer; {says}", flush=True)
    time_stores(codec)


if __name__ == "__main__":
    sys.exit(main())
