"""Sparse attention over latents of a layer: decodes, drafts, new prompts and prompts that continue, in one batch.

On a GPU the kernels of CUDA run, whose attention is vLLM's FlashMLA; else PyTorch's.
"""

from __future__ import annotations

import pytest
import torch
from packed_kv.attention.layouts import SparseLayout
from packed_kv.attention.sparse.layer import SparseKernels
from packed_kv.attention.step import StepCache
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.kernels.cuda import runs_on
from packed_kv.layout import ROW_TOKENS
from packed_kv.reference.sparse_latents import count_picks
from sparse_batches import (
    BLOCK_SIZE,
    DECODES,
    DEVICE,
    ON_CUDA,
    PICKS,
    SCALE,
    Batch,
    codec_of,
    cuda_kernels,
    errors_of,
    relative_rms,
    sinks_of,
)

READS_ROWS = [False, True] if ON_CUDA and runs_on(torch.cuda.get_device_capability()) else [False]
"""Decodes gathered, and read by the CUDA kernel where the card has it."""


def kernels_of(
    codec: LatentRowCodec, heads: int, constant: torch.Tensor | None, most_rows: int, *, reads_rows: bool,
    sinks: torch.Tensor | None = None,
) -> SparseKernels:  # fmt: skip
    if not ON_CUDA:
        layout, unused = SparseLayout(codec, heads, SCALE, constant, PICKS, sinks), None
        return SparseKernels(layout, unused, unused)
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    if not is_workspace_manager_initialized():
        init_workspace_manager(torch.device(DEVICE))
    return cuda_kernels(codec, heads, constant, most_rows, reads_rows=reads_rows, sinks=sinks)


@pytest.mark.parametrize("reads_rows", READS_ROWS)
@pytest.mark.parametrize("most_rows", [120, 400], ids=["in parts", "at once"])
@pytest.mark.parametrize(
    ("name", "heads", "has_sinks"),
    [("tq4", 16, False), ("turboquant25", 5, True), ("tq3", 3, False), ("tq4", 32, True)],
)
def test_a_batch(name: str, heads: int, has_sinks: bool, most_rows: int, reads_rows: bool) -> None:
    """The constant, V's gain for stored latents alone, and prompts whose contexts do not fit the workspace together."""
    codec, sinks = codec_of(name), sinks_of(heads) if has_sinks else None
    batch, constant = Batch(codec, heads, most_rows), codec.output_constant()
    assert len(batch.metadata.prompts) == (2 if most_rows == 120 else 1)
    assert sum(part.stored_rows for part in batch.metadata.prompts) == 100 + 64
    attention = kernels_of(codec, heads, constant, most_rows, reads_rows=reads_rows, sinks=sinks)
    assert max(errors_of(batch, attention, sinks)) < (1e-2 if ON_CUDA else 1e-5)


@pytest.mark.parametrize("reads_rows", READS_ROWS)
def test_decodes_alone_look_at_no_new_latents(reads_rows: bool) -> None:
    codec = codec_of("tq4")
    batch = Batch(codec, 16, 400)
    decodes = batch.metadata.num_decode_tokens
    attention = kernels_of(codec, 16, None, 400, reads_rows=reads_rows)
    queries = tuple(x[:decodes] for x in batch.queries)
    found = attention.attend(batch.metadata, batch.cache, queries, batch.picks[:decodes], None)
    expected = batch.expected(None)[:decodes]
    assert relative_rms(found[[0, 2, 3]], expected[[0, 2, 3]]) < (1e-2 if ON_CUDA else 1e-5)
    with pytest.raises(AssertionError, match="prompts without their latents"):
        attention.attend(batch.metadata, batch.cache, batch.queries, batch.picks, None)


@pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("reads_rows", READS_ROWS)
def test_store_and_decodes_in_a_graph(reads_rows: bool) -> None:
    """Replays with other slots, padded ones among them, other picks and other pages give what eager launches give."""
    from packed_kv.attention.protocols import NewTokens
    from packed_kv.attention.triton_store import TritonLatentStore

    codec, sinks = codec_of("tq4"), sinks_of(16)
    batch = Batch(codec, 16, 400)
    attention = kernels_of(codec, 16, None, 400, reads_rows=reads_rows, sinks=sinks)
    store, tokens = TritonLatentStore(codec), batch.metadata.num_decode_tokens
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=DEVICE)
    picks = batch.picks[:tokens].clone()
    queries = tuple(x[:tokens].contiguous() for x in batch.queries)
    latent, rope = (x[:tokens].contiguous() for x in batch.new)

    def step() -> torch.Tensor:
        batch.metadata.steps = StepCache()  # as of a new step
        store.write(store.prepare(NewTokens(slots)), batch.cache, latent, rope)
        return attention.attend(batch.metadata, batch.cache, queries, picks, None)

    before = batch.cache.clone()
    step()
    torch.cuda.synchronize()
    assert torch.equal(batch.cache, before), "padded slots stored something"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    free = int(batch.table[-1, -1])  # a block that no request has
    slots.copy_(torch.tensor([free * BLOCK_SIZE + 5, -1, free * BLOCK_SIZE + 63, -1]))
    batch.metadata.block_table[0, 0] = free
    picks[0] = torch.where(torch.arange(PICKS, device=DEVICE) < 70, torch.tensor(63, device=DEVICE), -1)
    picks[0, :2] = torch.tensor([5, 100])
    batch.metadata.seq_lens[1] -= 20  # fewer picks are looked at
    sinks += 1  # as where weights are loaded again
    for x in (*queries, latent):
        x.mul_(-0.7)
    graph.replay()
    found = output[[0, 2, 3]].clone()
    codec.write(before, slots, latent, rope)
    assert torch.equal(batch.cache, before)
    eager = step()[[0, 2, 3]]
    assert torch.equal(found, eager) and found.isfinite().all()


def test_rows_of_a_warp() -> None:
    """A tile of the gather kernel is whole warps of 8 tokens; else the tests above would not cross one."""
    assert ROW_TOKENS == 8 and sum(count for _, count in DECODES) * PICKS > 4 * ROW_TOKENS


def test_counts_of_picks() -> None:
    """As many as a query token sees; none of padding, which vLLM maps to the first request."""
    query_start, seq_lens = torch.tensor([0, 1, 4, 4]), torch.tensor([150, 70, 0])
    counts = count_picks(torch.tensor([0, 1, 1, 1, 0, 0]), query_start, seq_lens, 69)
    assert counts.tolist() == [69, 68, 69, 69, 0, 0]
