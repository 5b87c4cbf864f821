"""Time of decode attention over picked latents (DeepSeek V3.2, GLM-5), a layer: packed rows beside vLLM's kernels.

    python benchmarks/sparse_latents.py [--dtypes NAME ...] [--heads N ...] [--tokens N] [--picks N]
        [--rope-bits {16,8}] [--schedule]

`rows` is the CUDA kernel over packed rows. `gather` gathers them to bf16 for vLLM's `flash_mla_sparse_fwd`. `fp8` is
FlashMLA over `fp8_ds_mla`, as FLASHMLA_SPARSE has it; `fa3` FlashAttention 3 over bf16, as FLASH_ATTN_MLA_SPARSE.
FlashMLA pads heads to 64 or 128. Each layer has a cache of its own, of which every query token reads picks of its own
request in any order; a CUDA graph holds one round of the layers. Ratios are to `fp8`. `rows` is compared with the
reference and with `gather`. What fails is reported and left out. --schedule times the launch that distributes picks
over the card instead, which runs once a step, in room for few query tokens and for many, as 1,024 requests with three
drafts each have.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch
from latent_kernels import BLOCK_SIZE, RANK, ROPE
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import latent_launch as cuda
from packed_kv.kernels.cuda import latent_pick_launch as cuda_picks
from packed_kv.kernels.cuda.latent_schedule import LatentScheduler
from packed_kv.kernels.triton.latent_rows import GatherRowsLaunch
from packed_kv.reference.sparse_latents import attend_picks, gather_tokens
from pair_kernels import interleaved

LAYERS, CONTEXT, SCALE, BF16 = 4, 8192, 192**-0.5, torch.bfloat16
GOALS = {8: 0.65, 16: 0.65, 64: 0.90, 128: 1.10}
FP8_BYTES = 656
ROOMS, SCHEDULED, SCHEDULES = (64, 4096), (1, 8, 64), 20
"""Query tokens that a schedule has room for, those of a step, and launches that are timed in one graph."""
REFERENCE_TOKENS = 4
"""Query tokens that are compared with the reference."""


class Batch:
    """Query tokens, each of a request of its own, and their picks. `slots`: those of picks, in any layer's cache."""

    def __init__(self, tokens: int, picks: int, heads: int) -> None:
        self.heads, self.count = heads, picks
        blocks = CONTEXT // BLOCK_SIZE
        self.blocks = tokens * blocks
        self.table = torch.randperm(self.blocks, device="cuda").view(tokens, blocks).int()
        self.requests = torch.arange(tokens, dtype=torch.int32, device="cuda")
        self.numbers = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
        self.counts = torch.full((tokens,), picks, dtype=torch.int32, device="cuda")
        self.picks = torch.rand(tokens, CONTEXT, device="cuda").argsort(dim=1)[:, :picks].int().contiguous()
        at = torch.gather(self.table, 1, (self.picks // BLOCK_SIZE).long())
        self.slots = (at * BLOCK_SIZE + self.picks % BLOCK_SIZE).int()
        self.query = torch.randn(tokens, heads, RANK + ROPE, device="cuda").to(BF16)

    def padded_query(self) -> torch.Tensor:
        """Queries with FlashMLA's heads."""
        return torch.nn.functional.pad(self.query, (0, 0, 0, (64 if self.heads <= 64 else 128) - self.heads))

    def caches(self, source: torch.Tensor) -> list[torch.Tensor]:
        """Each layer's: blocks of `source` in any order."""
        return [source[torch.randint(0, len(source), (self.blocks,), device="cuda")] for _ in range(LAYERS)]


def row_blocks(codec: LatentRowCodec) -> torch.Tensor:
    """Blocks of random rows, uint8 [64, BLOCK_SIZE, row bytes]."""
    blocks = 64
    cache = torch.zeros(blocks, BLOCK_SIZE, codec.slot_bytes, dtype=torch.uint8, device="cuda")
    tokens = torch.arange(blocks * BLOCK_SIZE, device="cuda")
    codec.write(cache, tokens, *(torch.randn(len(tokens), n, device="cuda") for n in (RANK, ROPE)))
    return cache


def rows_round(
    batch: Batch, codec: LatentRowCodec, caches: list[torch.Tensor], output: torch.Tensor
) -> Callable[..., None]:
    """Attention of all layers by the kernel over packed rows; `output` [tokens, heads, 512] has the last one's."""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    shape = cuda.latent_grid(batch.heads, sm_count)
    schedule = LatentScheduler(len(batch.counts), sm_count, output.device)(batch.counts, shape.partitions)
    room = (torch.empty(shape.partial_rows(), size, device="cuda") for size in (RANK, 2))
    parts = cuda.Parts(shape, schedule, *room)
    tensors = batch.table, batch.requests, batch.numbers, batch.counts
    step = cuda_picks.make_pick_step(batch.heads, SCALE, *tensors, parts)
    layers = [cuda_picks.CudaPickDecode(codec.rows, cache, batch.heads, BF16, BF16) for cache in caches]
    query, rope_query = batch.query[..., :RANK], batch.query[..., RANK:]

    def run(kept: object = (parts, caches)) -> None:  # of which the launches have addresses
        for layer in layers:
            layer(step, query, rope_query, output, batch.picks)

    return run


def gather_round(
    batch: Batch, codec: LatentRowCodec, caches: list[torch.Tensor], output: torch.Tensor
) -> Callable[..., None]:
    """The same by gathered rows and FlashMLA."""
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    count = batch.picks.numel()
    rows = torch.empty(count, RANK + ROPE, dtype=BF16, device="cuda")
    numbers = torch.arange(count, dtype=torch.int32, device="cuda").view(-1, 1, batch.count)
    launches = [GatherRowsLaunch(codec.rows, cache, batch.count) for cache in caches]
    grid, arguments = GatherRowsLaunch.step(count, batch.table, batch.requests)
    query, positions = batch.padded_query(), batch.picks.flatten()
    padded = torch.empty(*query.shape[:2], RANK, dtype=BF16, device="cuda")

    def run() -> None:
        for launch in launches:
            launch(grid, (rows, positions), arguments)
            flash_mla_sparse_fwd(query, rows.unsqueeze(1), numbers, SCALE, topk_length=batch.counts, out=padded)
        output.copy_(padded[:, : batch.heads])

    return run


def fp8_round(batch: Batch) -> Callable[[], None]:
    """FlashMLA over caches of `fp8_ds_mla`."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    source = torch.empty(64, BLOCK_SIZE, FP8_BYTES, dtype=torch.uint8, device="cuda")
    shape = (64, BLOCK_SIZE)
    source[..., :RANK] = torch.randn(*shape, RANK, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    source[..., RANK : RANK + 16] = torch.ones(*shape, 4, device="cuda").view(torch.uint8)
    source[..., RANK + 16 :] = torch.randn(*shape, ROPE, device="cuda").to(BF16).view(torch.uint8)
    caches, query = [cache.unsqueeze(-2) for cache in batch.caches(source)], batch.padded_query()
    # FLASHMLA_SPARSE has all query tokens as one sequence below 32 heads, else each as one.
    along = 0 if batch.heads < 32 else 1
    query, slots = query.unsqueeze(along), batch.slots.unsqueeze(along)
    lens = torch.full((len(query),), batch.blocks * BLOCK_SIZE, dtype=torch.int32, device="cuda")
    table, metadata = torch.zeros(len(query), 1, dtype=torch.int32, device="cuda"), get_mla_metadata()[0]

    def run() -> None:
        for cache in caches:
            flash_mla_with_kvcache(
                q=query, k_cache=cache, block_table=table, head_dim_v=RANK, cache_seqlens=lens,
                tile_scheduler_metadata=metadata, is_fp8_kvcache=True, indices=slots, softmax_scale=SCALE,
            )  # fmt: skip

    return run


def fa3_round(batch: Batch) -> Callable[[], None]:
    """FlashAttention 3 over bf16 rows, with blocks of one row."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    rows = [x.flatten(0, 1) for x in batch.caches(torch.randn(64, BLOCK_SIZE, RANK + ROPE, device="cuda").to(BF16))]
    nope, rope = batch.query[..., :RANK].contiguous(), batch.query[..., RANK:].contiguous()

    def run() -> None:
        for cache in rows:
            flash_attn_varlen_func(
                q=rope, k=cache[:, None, None, RANK:], v=cache[:, None, None, :RANK], q_v=nope, max_seqlen_q=1,
                cu_seqlens_q=batch.numbers, max_seqlen_k=batch.count, seqused_k=batch.counts, block_table=batch.slots,
                softmax_scale=SCALE, causal=True, fa_version=3,
            )  # fmt: skip

    return run


def attempt(name: str, make: Callable[[], Callable[[], None]]) -> float | None:
    """Microseconds a layer, or None with the reason printed."""
    try:
        return interleaved({name: make()}, LAYERS)[name][1]
    except Exception as error:  # a baseline that is not there must not take the others along
        place = traceback.extract_tb(error.__traceback__)[-1]
        says = (str(error).splitlines() or [""])[0][:160]
        print(f"  {name} is left out: {type(error).__name__}: {says} ({place.name}, line {place.lineno})", flush=True)
        return None


def time_schedules(heads: int, picks: int) -> None:
    """Print the time of a launch that makes a step's schedule."""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    partitions = cuda.latent_grid(heads, sm_count).partitions
    for tokens in SCHEDULED:
        counts = torch.full((tokens,), picks, dtype=torch.int32, device="cuda")
        rounds: dict[str, Callable[[], None]] = {}
        for room in ROOMS:
            scheduler = LatentScheduler(room, sm_count, counts.device)
            rounds[str(room)] = partial(repeated, scheduler, counts, partitions)
        times = interleaved(rounds, SCHEDULES)
        said = ", ".join(f"room for {room} {times[room][1]:.1f}" for room in times)
        print(f"schedule of {tokens:2} query tokens, {heads} heads: {said} us", flush=True)


def repeated(scheduler: LatentScheduler, counts: torch.Tensor, partitions: int) -> None:
    for _ in range(SCHEDULES):
        scheduler(counts, partitions)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["tq4"], choices=FORMATS, metavar="DTYPE")
    parser.add_argument("--heads", nargs="+", type=int, default=list(GOALS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--picks", type=int, default=2048)
    parser.add_argument("--rope-bits", type=int, default=16, choices=(16, 8))
    parser.add_argument("--schedule", action="store_true", help="time the schedule of a step, and no attention")
    asked = parser.parse_args()
    if asked.picks > CONTEXT:
        parser.error(f"--picks {asked.picks}: at most {CONTEXT}, the tokens of a request")
    if asked.schedule:
        print(torch.cuda.get_device_name())
        for heads in asked.heads:
            time_schedules(heads, asked.picks)
        return 0
    torch.manual_seed(0)
    codecs = {
        name: LatentRowCodec(FORMATS[name], RANK, ROPE, "cuda", rope_bits=asked.rope_bits) for name in asked.dtypes
    }
    print(f"{torch.cuda.get_device_name()}: {asked.tokens} x {asked.picks} picks, RoPE of {asked.rope_bits} bits, us")
    is_right = True
    for heads in asked.heads:
        batch = Batch(asked.tokens, asked.picks, heads)
        fp8 = attempt("fp8", lambda batch=batch: fp8_round(batch))
        fa3 = attempt("fa3", lambda batch=batch: fa3_round(batch))
        for name, codec in codecs.items():
            caches = batch.caches(row_blocks(codec))
            outputs = torch.zeros(2, asked.tokens, heads, RANK, dtype=BF16, device="cuda")
            of_case = (batch, codec, caches)
            gather = attempt("gather", lambda c=of_case, o=outputs[1]: gather_round(*c, o))
            rows = attempt("rows", lambda c=of_case, o=outputs[0]: rows_round(*c, o))
            times = {"rows": rows, "gather": gather, "fp8": fp8, "fa3": fa3}
            line = ", ".join(f"{what} {time:.1f}" for what, time in times.items() if time is not None)
            if rows and fp8:
                line += f"; rows/fp8 {rows / fp8:.2f}" + (f" (goal {GOALS[heads]:.2f})" if heads in GOALS else "")
            if rows and gather:
                line += f", rows/gather {rows / gather:.2f}, rows to gather {relative(outputs[0], outputs[1]):.1e}"
            if rows and fa3:
                line += f", rows/fa3 {rows / fa3:.2f}"
            is_right = is_right and rows is not None
            if rows:
                few = slice(REFERENCE_TOKENS)
                each = batch.requests[few].repeat_interleave(batch.count)
                stored = gather_tokens(codec, caches[-1], batch.table, each, batch.picks[few].flatten())
                numbers = torch.arange(len(stored), device="cuda").view(-1, batch.count)
                expected, _ = attend_picks(
                    stored, numbers, batch.query[few, :, :RANK], batch.query[few, :, RANK:], SCALE
                )
                error = relative(outputs[0][few], expected)
                is_right = is_right and error < 1e-2
                line += f", to the reference {error:.1e}"
            print(f"{name:13} {heads:4} heads: {line}", flush=True)
    print("outputs are right" if is_right else "OUTPUTS ARE WRONG")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
