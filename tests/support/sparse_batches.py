"""A batch of sparse attention over latents: decodes, drafts, new prompts and prompts that continue.

Truth is one softmax over all picks of a token, in which a chunk's own latents are as the model has them.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from packed_kv.attention.factory import sparse_on_cuda
from packed_kv.attention.layouts import SparseLayout
from packed_kv.attention.sparse.layer import SparseKernels
from packed_kv.attention.sparse.metadata import prompt_parts
from packed_kv.attention.step import StepCache
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.formats import FORMATS

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
            block_table=table.to(DEVICE), req_id_per_token=of_request.to(DEVICE), steps=StepCache(),
            query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, max_query_len=60,
        )  # fmt: skip
        self.metadata.prompts = prompt_parts(self.metadata, common, most_rows)
        self.starts, self.seq_lens, self.table = starts.tolist(), seq_lens.tolist(), table
        self.picks = self.picks.to(DEVICE)

    def expected(self, constant: torch.Tensor | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [tokens, heads, 512]; rows without picks are the constant. With `sinks`, fp32 [heads], each token has
        one more key, of this score, and as its value that of 0, as latents are stored: less the constant."""
        codec, found = self.codec, []
        mean = codec.stored_mean()
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
                scores, values = query @ whole[picked].T * SCALE, value[picked]
                if sinks is not None:
                    if mean is not None:
                        scores += query[:, :512] @ mean[:, None] * SCALE
                    scores = torch.cat((scores, sinks[:, None]), dim=1)
                    zero = torch.zeros(512, device=DEVICE)
                    values = torch.cat((values, (zero if constant is None else -constant)[None]))
                found.append(scores.softmax(-1) @ values)
        output = torch.stack(found)
        return output if constant is None else output + constant


def cuda_kernels(
    codec: LatentRowCodec, heads: int, constant: torch.Tensor | None, most_rows: int, *, reads_rows: bool,
    sinks: torch.Tensor | None = None,
) -> SparseKernels:  # fmt: skip
    """Kernels of a layer for `Batch`; with `reads_rows` the CUDA kernel serves decodes."""
    from packed_kv.attention.sparse.hopper import HopperSparse

    layer = SparseLayout(codec, heads, SCALE, constant, PICKS, sinks)
    return sparse_on_cuda(layer, HopperSparse(layer, 8) if reads_rows else None, max(most_rows, 4 * PICKS), 144)


def errors_of(
    batch: Batch, kernels: SparseKernels, sinks: torch.Tensor | None, dtype: torch.dtype = DTYPE
) -> list[float]:
    """Relative RMS errors of a whole batch with queries of this dtype: of tokens with picks, and of prompts."""
    queries = tuple(x.to(dtype) for x in batch.queries)
    found = kernels.attend(batch.metadata, batch.cache, queries, batch.picks, batch.new)
    expected, there = batch.expected(batch.codec.output_constant(), sinks), (batch.picks >= 0).any(1)
    prompts = slice(batch.metadata.num_decode_tokens, None)
    errors = [relative_rms(found[rows], expected[rows]) for rows in (there, prompts)]
    print(f"relative RMS errors {errors}")
    return errors


def sinks_of(heads: int) -> torch.Tensor:
    """Scores of sinks, fp32 [heads], of which some take next to nothing and some nearly everything; the first one is of
    a head that has none."""
    sinks = torch.linspace(0, 9, heads, device=DEVICE)
    sinks[0] = float("-inf")
    return sinks


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).square().mean() / expected.square().mean()).sqrt().item()
