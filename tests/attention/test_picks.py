"""Sparse attention over latents of a layer: decodes, drafts, new prompts and prompts that continue, in one batch.

Truth is one softmax over all picks of a token, in which a chunk's own latents are as the model has them. On a GPU the
kernels of CUDA run, whose attention is vLLM's FlashMLA; else PyTorch's.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention.latent.picks import PickAttention, PickKernels, ReferencePicks
from packed_kv.attention.latent.sparse_metadata import prompt_parts
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.formats import FORMATS
from packed_kv.layout import ROW_TOKENS

ON_CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_CUDA else ("cpu", torch.float32)
PICKS = 128 if ON_CUDA else 24
BLOCK_SIZE, SCALE = 64, 0.06
DECODES, PROMPTS = ((150, 1), (70, 3)), ((40, 40), (160, 60), (69, 5), (30, 30))
"""Tokens of a request, and how many of them are of this batch."""


def codec_of(name: str) -> LatentRowCodec:
    random = torch.Generator().manual_seed(0)
    mean, scale = torch.randn(2, 512, generator=random)
    return LatentRowCodec(
        FORMATS[name], 512, 64, DEVICE, ChannelCalibration(mean=mean, scale=(0.3 * scale).exp()), rope_bits=16
    )  # fmt: skip


def kernels_of(codec: LatentRowCodec, heads: int, constant: torch.Tensor | None, most_rows: int) -> PickKernels:
    if not ON_CUDA:
        return ReferencePicks(codec, SCALE, constant)
    from packed_kv.attention.latent.picks_on_cuda import CudaPicks
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    if not is_workspace_manager_initialized():
        init_workspace_manager(torch.device(DEVICE))
    return CudaPicks(codec, heads, SCALE, constant, PICKS, max(most_rows, 4 * PICKS), 512)


class Batch:
    """A batch of `DECODES` and `PROMPTS` over filled pages, with picks at random; and what is true of it."""

    def __init__(self, codec: LatentRowCodec, heads: int, most_rows: int) -> None:
        self.codec, random = codec, torch.Generator().manual_seed(1)
        requests = DECODES + PROMPTS
        starts = torch.tensor([0, *(count for _, count in requests)]).cumsum(0).to(torch.int32)
        seq_lens = torch.tensor([seq_len for seq_len, _ in requests], dtype=torch.int32)
        blocks = [-(-seq_len // BLOCK_SIZE) for seq_len, _ in requests]
        order = torch.randperm(sum(blocks) + 2, generator=random).to(torch.int32)
        table = torch.full((len(requests), max(blocks)), len(order) - 1, dtype=torch.int32)
        for i, count in enumerate(blocks):
            table[i, :count] = order[sum(blocks[:i]) :][:count]
        whole = torch.full((len(order), BLOCK_SIZE * (codec.slot_bytes + 132)), 0xFF, dtype=torch.uint8)
        pages = whole.to(DEVICE)[:, : BLOCK_SIZE * codec.slot_bytes]
        self.cache = pages.unflatten(1, (BLOCK_SIZE, codec.slot_bytes))
        self.latents = [
            [torch.randn(seq_len, n, generator=random).to(DEVICE, DTYPE) for n in (512, 64)] for seq_len, _ in requests
        ]
        for i, (latent, rope) in enumerate(self.latents):
            at = torch.arange(len(latent))
            slots = table[i, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            codec.write(self.cache, slots.to(DEVICE), latent, rope)
        tokens = int(starts[-1])
        self.picks = torch.full((tokens, PICKS), -1, dtype=torch.int32)
        for (seq_len, count), first in zip(requests, starts[:-1].tolist(), strict=True):
            for token in range(count):
                seen = seq_len - count + token + 1
                chosen = torch.randperm(seen, generator=random)[:PICKS]
                self.picks[first + token, : len(chosen)] = chosen
        self.picks[1] = -1  # as of a padded token
        self.new = tuple(
            torch.cat([pair[part][-count:] for pair, (_, count) in zip(self.latents, requests, strict=True)])
            for part in (0, 1)
        )
        self.queries = tuple(torch.randn(tokens, heads, n, generator=random).to(DEVICE, DTYPE) for n in (512, 64))
        of_request = torch.arange(len(requests), dtype=torch.int32).repeat_interleave(starts.diff().long())
        common: Any = SimpleNamespace(
            seq_lens=seq_lens.to(DEVICE), seq_lens_cpu_upper_bound=seq_lens,
            query_start_loc=starts.to(DEVICE), query_start_loc_cpu=starts,
        )  # fmt: skip
        self.metadata: Any = SimpleNamespace(
            num_decodes=len(DECODES), num_decode_tokens=sum(count for _, count in DECODES),
            block_table=table.to(DEVICE), req_id_per_token=of_request.to(DEVICE),
        )  # fmt: skip
        self.metadata.prompts = prompt_parts(self.metadata, common, most_rows)
        self.starts, self.seq_lens, self.table = starts.tolist(), seq_lens.tolist(), table
        self.picks = self.picks.to(DEVICE)

    def expected(self, constant: torch.Tensor | None) -> torch.Tensor:
        """fp32 [tokens, heads, 512]; rows without picks are the constant."""
        codec, found = self.codec, []
        for i, (first, last) in enumerate(pairwise(self.starts)):
            latent, rope = self.latents[i]
            at = torch.arange(self.seq_lens[i])
            slots = self.table[i, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            key, key_rope = (x.clone() for x in codec.read_slots(self.cache, slots.to(DEVICE)))
            value = key.clone()
            if i >= len(DECODES):
                context = self.seq_lens[i] - (last - first)
                raw = codec.latent.prepare(latent[context:])
                key[context:], key_rope[context:] = raw, rope[context:].float()
                value[context:] = raw / codec.value_gain()
            whole = torch.cat((key, key_rope), dim=-1)
            for token in range(first, last):
                picked = self.picks[token][self.picks[token] >= 0].long()
                query = torch.cat([x[token].float() for x in self.queries], dim=-1)
                weights = (query @ whole[picked].T * SCALE).softmax(-1)
                found.append(weights @ value[picked])
        output = torch.stack(found)
        return output if constant is None else output + constant


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).square().mean() / expected.square().mean()).sqrt().item()


@pytest.mark.parametrize("most_rows", [120, 400], ids=["in parts", "at once"])
@pytest.mark.parametrize(("name", "heads"), [("tq4", 16), ("turboquant25", 5), ("tq3", 3)])
def test_a_batch(name: str, heads: int, most_rows: int) -> None:
    """The constant, V's gain for stored latents alone, and prompts whose contexts do not fit the workspace together."""
    codec = codec_of(name)
    batch, constant = Batch(codec, heads, most_rows), codec.output_constant()
    assert len(batch.metadata.prompts) == (2 if most_rows == 120 else 1)
    assert sum(part.stored_rows for part in batch.metadata.prompts) == 100 + 64
    attention = PickAttention(kernels_of(codec, heads, constant, most_rows), constant)
    found = attention.attend(batch.metadata, batch.cache, batch.queries, batch.picks, batch.new)
    expected = batch.expected(constant)
    there = (batch.picks >= 0).any(1)
    error = relative_rms(found[there], expected[there])
    prompts = slice(batch.metadata.num_decode_tokens, None)
    print(f"relative RMS error {error:.1e}; of prompts {relative_rms(found[prompts], expected[prompts]):.1e}")
    assert error < (1e-2 if ON_CUDA else 1e-5)
    assert relative_rms(found[prompts], expected[prompts]) < (1e-2 if ON_CUDA else 1e-5)


def test_decodes_alone_look_at_no_new_latents() -> None:
    codec = codec_of("tq4")
    batch = Batch(codec, 16, 400)
    decodes = batch.metadata.num_decode_tokens
    attention = PickAttention(kernels_of(codec, 16, None, 400), None)
    queries = tuple(x[:decodes] for x in batch.queries)
    found = attention.attend(batch.metadata, batch.cache, queries, batch.picks[:decodes], None)
    expected = batch.expected(None)[:decodes]
    assert relative_rms(found[[0, 2, 3]], expected[[0, 2, 3]]) < (1e-2 if ON_CUDA else 1e-5)
    with pytest.raises(AssertionError, match="prompts without their latents"):
        attention.attend(batch.metadata, batch.cache, batch.queries, batch.picks, None)


@pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")
def test_the_prefix_is_gathered_by_the_same_kernel() -> None:
    from packed_kv.attention.latent.in_pytorch import PrefixChunk, ReferenceLatentPrefix
    from packed_kv.attention.latent.sparse_impl import PickedPrefix

    codec = codec_of("tq4")
    batch = Batch(codec, 16, 400)
    starts, counts = torch.tensor([0, 64, 16]), torch.tensor([150, 6, 20])
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), counts)).cumsum(0).to(torch.int32)
    chunk = PrefixChunk(starts.to(DEVICE, torch.int32), ends.to(DEVICE), 150, counts)
    rows, expected = torch.empty(2, 176, 576, dtype=DTYPE, device=DEVICE)
    PickedPrefix(kernels_of(codec, 16, None, 400)).gather(batch.cache, batch.metadata.block_table[:3], chunk, rows)
    ReferenceLatentPrefix(codec).gather(batch.cache, batch.metadata.block_table[:3], chunk, expected)
    assert torch.equal(rows, expected)


@pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")
def test_store_and_decodes_in_a_graph() -> None:
    """Replays with other slots, padded ones among them, other picks and other pages give what eager launches give."""
    from packed_kv.attention.protocols import NewTokens
    from packed_kv.attention.triton_store import TritonLatentStore

    codec = codec_of("tq4")
    batch = Batch(codec, 16, 400)
    kernels, store = kernels_of(codec, 16, None, 400), TritonLatentStore(codec)
    attention, tokens = PickAttention(kernels, None), batch.metadata.num_decode_tokens
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=DEVICE)
    picks = batch.picks[:tokens].clone()
    queries = tuple(x[:tokens].contiguous() for x in batch.queries)
    latent, rope = (x[:tokens].contiguous() for x in batch.new)

    def step() -> torch.Tensor:
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
