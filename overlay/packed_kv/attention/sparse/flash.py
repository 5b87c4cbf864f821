"""Sparse attention over latent rows on CUDA by vLLM's FlashMLA: for prompts, and for decodes where `hopper.py` does not
serve the layer.

`kernels/triton` gathers rows to bf16; attention of decodes reads these twice. `flash_mla_sparse_fwd` takes bf16 rows of
512 + 64 channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd
from vllm.v1.worker.workspace import current_workspace_manager

from ...codecs.latent_rows import LatentRowCodec
from ...codecs.ring import Ring
from ...kernels.served import ANY, TRITON
from ...kernels.triton.latent_rows import GatherRowsLaunch
from ...kernels.triton.launch import Launches
from ...kernels.triton.sparse_picks import MergePicksLaunch, PickSinksLaunch, SplitPicksLaunch
from ..latent.in_pytorch import PrefixChunk, RecentContext
from ..layouts import SparseLayout
from ..protocols import DecodeKernel, LayerKernel, PrefillKernel
from .metadata import Latents, PromptPart, Queries, SparseBatch, SparseDecodes

HEADS = 64, 128
"""Query heads that FlashMLA's kernel takes; fewer are padded."""
SLICE_TOKENS = 1024
"""Most query tokens of a launch."""
PaddedResult = tuple[torch.Tensor, torch.Tensor]
"""[tokens, padded heads, rank] and the natural lse [tokens, padded heads]."""
Specs = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def padded_heads(heads: int) -> int:
    """Return the padded number of heads that the kernel computes. Raises ValueError for more heads than it supports."""
    if heads > HEADS[-1]:
        raise ValueError(f"{heads} query heads on a rank, and FlashMLA takes up to {HEADS[-1]}; use more ranks")
    return next(count for count in HEADS if count >= heads)


class PickedRows(NamedTuple):
    """Numbers of the rows that tokens read, int32 [tokens, picks]; negative: no pick. `counts`: int32 [tokens], all
    picks of a token are before this index; or None."""

    rows: torch.Tensor
    counts: torch.Tensor | None = None


class SparseMemory(NamedTuple):
    """Workspace of a step, which each layer overwrites.

    `partial`: partial results of the decode kernel. `rows`: bf16 [rows, 576], gathered; `own`: bf16 [tokens, 576], of
    the batch's prompts. `query`: bf16 [slice, padded heads, 576]. `stored`, `over_own`: bf16 [slice, padded heads,
    512], attention over each kind. `stored_picks`, `own_picks`: int32 [slice, picks], and their counts, int32 [slice].
    `output`: bf16 [tokens, heads, 512]. `lse`: fp32 [tokens, heads], of the output; without sinks, room for one token.
    """

    partial: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    own: torch.Tensor
    query: torch.Tensor
    stored: torch.Tensor
    over_own: torch.Tensor
    stored_picks: torch.Tensor
    own_picks: torch.Tensor
    stored_counts: torch.Tensor
    own_counts: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor

    def slices(self, first: int, last: int, picks: int) -> Iterator[slice]:
        """Cut the query tokens `first` to `last` - 1 into slices whose picks fit the workspace; each token has `picks`
        picks."""
        most = max(1, min(len(self.query), len(self.rows) // picks))
        return (slice(start, min(start + most, last)) for start in range(first, last, most))


def workspace_of(
    layer: SparseLayout, most_rows: int, most_tokens: int, partial: Specs = ()
) -> Callable[[], SparseMemory]:
    """Return a function that takes the workspace of a layer's steps; its first call, at engine start, sizes it.

    Args:
        layer: its layout.
        most_rows: at least the tokens of the longest request.
        most_tokens: of a batch.
        partial: shapes and dtypes of the decode kernel's partial results.
    """
    codec, picks, heads = layer.codec, layer.picks, padded_heads(layer.heads)
    width, tokens = codec.rank + codec.rope_dim, min(SLICE_TOKENS, most_tokens)
    bf16, int32 = torch.bfloat16, torch.int32
    specs = (
        ((max(most_rows, picks), width), bf16), ((most_tokens, width), bf16),
        ((tokens, heads, width), bf16), *[((tokens, heads, codec.rank), bf16)] * 2,
        *[((tokens, picks), int32)] * 2, *[((tokens,), int32)] * 2, ((most_tokens, layer.heads, codec.rank), bf16),
        ((1 if layer.sinks is None else most_tokens, layer.heads), torch.float32),
    )  # fmt: skip

    def take() -> SparseMemory:
        taken = current_workspace_manager().get_simultaneous(*specs, *partial)
        return SparseMemory(tuple(taken[len(specs) :]), *taken[: len(specs)])

    return take


class RowGather(LayerKernel):
    """Reads latent rows of one layer: picked tokens, and prefixes of prompts that read all tokens."""

    def __init__(self, codec: LatentRowCodec) -> None:
        self.codec = codec
        self.bound: Launches = Launches()

    def gather_tokens(
        self, cache: torch.Tensor, block_table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor,
        rows: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill `rows` [tokens, rank + rope_dim]: `positions` int32 [tokens] (negative: no token); `requests` int32
        [tokens / n] has the request of each n neighbouring positions."""
        count, a_request = len(positions), len(positions) // len(requests)
        assert len(rows) == count and rows.is_contiguous(), (rows.shape, count)
        launch = self.bound.get(
            ("gather", a_request),
            (cache.data_ptr(), cache.stride()),
            lambda: GatherRowsLaunch(self.codec.rows, cache, a_request),
        )
        grid, arguments = GatherRowsLaunch.step(count, block_table, requests)
        launch(grid, (rows, positions), arguments)

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, chunk: PrefixChunk, rows: torch.Tensor,
        recent: RecentContext | None = None,
    ) -> None:  # fmt: skip
        """See `ReferenceLatentPrefix.gather`. There is no ring."""
        assert recent is None
        numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        ends = chunk.cu_seq_lens[1:]
        requests = torch.searchsorted(ends, numbers, right=True, out_int32=True)
        positions = numbers - (chunk.cu_seq_lens[:-1] - chunk.starts)[requests.long()]
        self.gather_tokens(cache, block_table, requests, positions, rows)


def attend_rows(
    layer: SparseLayout, memory: SparseMemory, rows: torch.Tensor, picks: PickedRows, queries: Queries,
    output: torch.Tensor,
) -> PaddedResult:  # fmt: skip
    """Return attention over picked rows. `output`: bf16 [tokens or more, padded heads, rank], memory for it."""
    query, rank = memory.query[: len(picks.rows)], layer.codec.rank
    query[:, : layer.heads, :rank] = queries[0]
    query[:, : layer.heads, rank:] = queries[1]
    numbers = picks.rows.unsqueeze(1)
    found, _, lse = flash_mla_sparse_fwd(
        query, rows.unsqueeze(1), numbers, layer.scale, topk_length=picks.counts, out=output[: len(query)]
    )
    return found, lse


class FlashDecodes(DecodeKernel[SparseDecodes, None]):
    """Attends to decodes of one layer, from gathered rows."""

    language, longest = TRITON, ANY

    def __init__(self, layer: SparseLayout, rows: RowGather) -> None:
        self.layer, self.kind, self.rows, self.bound = layer, layer.kind, rows, rows.bound

    def attend(
        self, step: SparseDecodes, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert output is not None
        layer, memory, (q_latent, q_rope, picks) = self.layer, step.memory, queries
        for part in memory.slices(0, len(output), picks.shape[1]):
            picked = picks[part]
            rows = memory.rows[: picked.numel()]
            self.rows.gather_tokens(cache, step.block_table, step.requests[part], picked.flatten(), rows)
            numbers = torch.arange(picked.numel(), dtype=torch.int32, device=picked.device).view_as(picked)
            own = PickedRows(torch.where(picked >= 0, numbers, -1))
            found, lse = attend_rows(layer, memory, rows, own, (q_latent[part], q_rope[part]), memory.stored)
            found = found[:, : layer.heads]
            output[part] = found if layer.constant is None else found + layer.constant
            if step.lse is not None:
                step.lse[part] = lse[:, : layer.heads]


class FlashPrompts(PrefillKernel[SparseBatch]):
    """Attends to prompts of one layer: over their stored tokens, over their own latents, and merges both."""

    def __init__(self, layer: SparseLayout, rows: RowGather) -> None:
        self.layer, self.rows = layer, rows
        codec, transform = layer.codec, layer.codec.latent.transform
        self.inverse_gain, self.mean = 1 / codec.value_gain(), codec.stored_mean()
        unit = torch.eye(codec.rank, device=codec.device)
        self.basis = codec.latent.rotate(unit if transform.scale is None else unit * transform.scale)
        self.bound: Launches = Launches()

    def attend(self, batch: SparseBatch, first: int, ring: Ring | None = None) -> None:
        metadata, memory = batch.metadata, batch.memory
        own_rows = self.raw(memory, batch.new_of_prompts())
        for prompt in metadata.prompts:
            rows = memory.rows[: prompt.stored_rows]
            if prompt.stored_rows:
                of_requests = prompt.requests, prompt.positions
                self.rows.gather_tokens(batch.cache, metadata.block_table, *of_requests, rows)
            for part in memory.slices(prompt.first, prompt.last, 1):
                inside = slice(part.start - prompt.first, part.stop - prompt.first)
                picks = self.split(memory, batch.picks[part], prompt, inside)
                queries, stored = batch.queries_of(part), None
                if prompt.stored_rows:
                    stored = attend_rows(self.layer, memory, rows, picks[0], queries, memory.stored)
                own = attend_rows(self.layer, memory, own_rows, picks[1], queries, memory.over_own)
                lse = None if batch.lse is None else batch.lse[part]
                self.merge(batch.output[part], stored, own, picks, lse)

    def raw(self, memory: SparseMemory, new: Latents) -> torch.Tensor:
        """Return rows of the model's own latents, in the basis of stored latents."""
        rank, rows = self.layer.codec.rank, memory.own[: len(new[0])]
        latent = new[0].float() @ self.basis
        rows[:, :rank] = latent if self.mean is None else latent - self.mean
        rows[:, rank:] = new[1]
        return rows

    def split(
        self, memory: SparseMemory, picks: torch.Tensor, prompt: PromptPart, inside: slice
    ) -> tuple[PickedRows, PickedRows]:
        """Return the picks of the tokens `inside` the prompt as rows, stored ones and own ones."""
        tokens, most = len(picks), self.layer.picks
        assert picks.shape[1] == most and picks.is_contiguous(), (picks.shape, picks.stride())
        launch = self.bound.get("split", None, lambda: SplitPicksLaunch(most))
        targets = memory.stored_picks, memory.stored_counts, memory.own_picks, memory.own_counts
        grid, arguments = SplitPicksLaunch.step(tokens, *targets)
        offsets = prompt.first_own[inside], prompt.stored_offset[inside], prompt.own_offset[inside]
        launch(grid, (picks, *offsets), arguments)
        stored, stored_counts, own, own_counts = (x[:tokens] for x in targets)
        return PickedRows(stored, stored_counts), PickedRows(own, own_counts)

    def merge(
        self, output: torch.Tensor, stored: PaddedResult | None, own: PaddedResult,
        picks: tuple[PickedRows, PickedRows], lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Fill `output` [tokens, heads, rank] and, unless None, `lse` fp32 [tokens, heads] from both; `picks` are those
        of `split`."""
        layer, has_stored, has_lse = self.layer, stored is not None, lse is not None
        heads = layer.heads, padded_heads(layer.heads)
        launch = self.bound.get(
            ("merge", has_stored),
            None,
            lambda: MergePicksLaunch(self.inverse_gain, layer.constant, *heads, has_stored=has_stored, has_lse=has_lse),
        )
        other = own if stored is None else stored
        lse_and_picks = (other[1], picks[0].rows), (own[1], picks[1].rows)
        grid, arguments = MergePicksLaunch.step(len(output), layer.heads, *lse_and_picks)
        launch(grid, (output, other[0], own[0], own[1] if lse is None else lse), arguments)


class TritonSinks(LayerKernel):
    """Shares weights with the sinks of one layer's heads."""

    def __init__(self, layer: SparseLayout) -> None:
        self.layer, self.mean = layer, layer.codec.stored_mean()
        self.bound: Launches = Launches()

    def share(self, output: torch.Tensor, lse: torch.Tensor, query: torch.Tensor) -> None:
        """Rescale `output` [tokens, heads, rank] in place, by its lse fp32 [tokens, heads]. `query`: the first tensor
        of `Queries`."""
        layer, sinks = self.layer, self.layer.sinks
        assert sinks is not None
        binding_key: tuple[Any, ...] = (sinks.data_ptr(), query.stride(), query.dtype)
        launch = self.bound.get("sinks", binding_key, lambda: PickSinksLaunch(sinks, self.mean, layer.scale, query))
        grid, arguments = PickSinksLaunch.step(len(output), layer.heads)
        launch(grid, (output, query, lse), arguments)
