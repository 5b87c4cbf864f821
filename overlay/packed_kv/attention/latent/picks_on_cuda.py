"""Sparse attention over latent rows on CUDA.

Prompts: `kernels/triton` gathers rows to bf16, and vLLM's FlashMLA attends. `flash_mla_sparse_fwd` takes bf16 rows of
512 + 64 channels. Decodes: `hopper_picks.py`, where it serves the layer, else the same, which reads picks twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd
from vllm.v1.worker.workspace import current_workspace_manager

from ...kernels.ahead import Ahead
from ...kernels.triton.latent_rows import GatherRowsLaunch
from ...kernels.triton.launch import Launches
from ...kernels.triton.sparse_picks import MergePicksLaunch, PickSinksLaunch, SplitPicksLaunch
from ..protocols import NewTokens
from ..store import LatentStore
from ..triton_store import TritonLatentStore
from .hopper_picks import HopperPicks
from .picks import Attended, Latents, PickedRows, PickKernels, PickLayout, Queries
from .sparse_metadata import PromptPart, SparseLatentMetadata

HEADS = 64, 128
"""Query heads that FlashMLA's kernel takes; fewer are padded."""
SLICE_TOKENS = 1024
"""Most query tokens of a launch."""


def padded_heads(heads: int) -> int:
    """Heads that the kernel computes for so many. Raises ValueError for more than it can."""
    if heads > HEADS[-1]:
        raise ValueError(f"{heads} query heads on a rank, and FlashMLA takes up to {HEADS[-1]}; use more ranks")
    return next(count for count in HEADS if count >= heads)


class PickMemory(NamedTuple):
    """vLLM's workspace, which each layer overwrites.

    `rows`: bf16 [rows, 576], gathered; `own`: bf16 [tokens, 576], of the batch's prompts. `query`: bf16 [slice, padded
    heads, 576]. `stored`, `over_own`: bf16 [slice, padded heads, 512], attention over each kind. `stored_picks`,
    `own_picks`: int32 [slice, picks], and their counts, int32 [slice]. `output`: bf16 [tokens, heads, 512]. `lse`: fp32
    [tokens, heads], of the output; of one token where there are no sinks.
    """

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


class CudaPicks(PickKernels):
    """The kernels of one layer.

    Args:
        layer: its layout.
        most_rows: of the workspace, at least the tokens of the longest request.
        most_tokens: of a batch.
        row_kernel: the kernel that reads packed rows of decodes; None: theirs are gathered.
    """

    def __init__(
        self, layer: PickLayout, most_rows: int, most_tokens: int, row_kernel: HopperPicks | None = None
    ) -> None:
        codec, heads, picks, self.row_kernel = layer.codec, layer.heads, layer.picks, row_kernel
        self.codec, self.heads, self.scale, self.constant, self.picks = codec, heads, layer.scale, layer.constant, picks
        self.sinks = layer.sinks
        self.padded_heads = padded_heads(heads)
        self.inverse_gain = 1 / codec.value_gain()
        transform = codec.latent.transform
        unit = torch.eye(codec.rank, device=codec.device)
        self.basis = codec.latent.rotate(unit if transform.scale is None else unit * transform.scale)
        self.mean = codec.stored_mean()
        self.bound: Launches = Launches()
        width, tokens = codec.rank + codec.rope_dim, min(SLICE_TOKENS, most_tokens)
        bf16, int32 = torch.bfloat16, torch.int32
        self.specs = (
            ((max(most_rows, picks), width), bf16), ((most_tokens, width), bf16),
            ((tokens, self.padded_heads, width), bf16), *[((tokens, self.padded_heads, codec.rank), bf16)] * 2,
            *[((tokens, picks), int32)] * 2, *[((tokens,), int32)] * 2, ((most_tokens, heads, codec.rank), bf16),
            ((1 if layer.sinks is None else most_tokens, heads), torch.float32),
        )  # fmt: skip

    def memory(self) -> PickMemory:
        """The workspace, sized when this is first called, in the engine's start."""
        return PickMemory(*self._take()[: len(self.specs)])

    def _take(self) -> list[torch.Tensor]:
        """Memory of `PickMemory`, and behind it that of partial results of `HopperPicks`, if it serves the layer."""
        partial = () if self.row_kernel is None else self.row_kernel.specs
        return current_workspace_manager().get_simultaneous(*self.specs, *partial)

    def decode(
        self, metadata: SparseLatentMetadata, cache: torch.Tensor, queries: Queries, picks: torch.Tensor,
        output: torch.Tensor, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        if self.row_kernel is None:
            super().decode(metadata, cache, queries, picks, output, lse)
        else:
            self.row_kernel.attend(
                metadata, cache, queries, picks, output, lse, lambda: tuple(self._take()[len(self.specs) :])
            )

    def most_tokens(self, picks: int) -> int:
        rows, query = self.specs[0][0][0], self.specs[2][0][0]
        return max(1, min(query, rows // picks))

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        count = len(positions)
        rows, a_request = self.memory().rows[:count] if into is None else into, count // len(requests)
        assert len(rows) == count and rows.is_contiguous(), (rows.shape, count)
        launch = self.bound.get(
            ("gather", a_request),
            (cache.data_ptr(), cache.stride()),
            lambda: GatherRowsLaunch(self.codec.rows, cache, a_request),
        )
        grid, arguments = GatherRowsLaunch.step(count, block_table, requests)
        launch(grid, (rows, positions), arguments)
        return rows

    def raw(self, new: Latents) -> torch.Tensor:
        rank, rows = self.codec.rank, self.memory().own[: len(new[0])]
        latent = new[0].float() @ self.basis
        rows[:, :rank] = latent if self.mean is None else latent - self.mean
        rows[:, rank:] = new[1]
        return rows

    def split(self, picks: torch.Tensor, part: PromptPart, inside: slice) -> tuple[PickedRows, PickedRows]:
        assert picks.shape[1] == self.picks and picks.is_contiguous(), (picks.shape, picks.stride())
        tokens, memory = len(picks), self.memory()
        launch = self.bound.get("split", None, lambda: SplitPicksLaunch(self.picks))
        targets = memory.stored_picks, memory.stored_counts, memory.own_picks, memory.own_counts
        grid, arguments = SplitPicksLaunch.step(tokens, *targets)
        offsets = part.first_own[inside], part.stored_offset[inside], part.own_offset[inside]
        launch(grid, (picks, *offsets), arguments)
        return (
            PickedRows(memory.stored_picks[:tokens], memory.stored_counts[:tokens]),
            PickedRows(memory.own_picks[:tokens], memory.own_counts[:tokens]),
        )

    def attend(self, rows: torch.Tensor, picks: PickedRows, queries: Queries, *, is_own: bool) -> Attended:
        memory, tokens, rank = self.memory(), len(picks.rows), self.codec.rank
        query = memory.query[:tokens]
        query[:, : self.heads, :rank] = queries[0]
        query[:, : self.heads, rank:] = queries[1]
        output = (memory.over_own if is_own else memory.stored)[:tokens]
        found, _, lse = flash_mla_sparse_fwd(
            query, rows.unsqueeze(1), picks.rows.unsqueeze(1), self.scale, topk_length=picks.counts, out=output
        )
        return found, lse

    def merge(
        self, output: torch.Tensor, stored: Attended | None, own: Attended, picks: tuple[PickedRows, PickedRows],
        lse: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        has_stored, has_lse = stored is not None, lse is not None
        heads = self.heads, self.padded_heads
        launch = self.bound.get(
            ("merge", has_stored),
            None,
            lambda: MergePicksLaunch(self.inverse_gain, self.constant, *heads, has_stored=has_stored, has_lse=has_lse),
        )
        other = own if stored is None else stored
        lse_and_picks = (other[1], picks[0].rows), (own[1], picks[1].rows)
        grid, arguments = MergePicksLaunch.step(len(output), self.heads, *lse_and_picks)
        launch(grid, (output, other[0], own[0], own[1] if lse is None else lse), arguments)

    def take_output(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        return self.memory().output[:tokens]

    def take_lse(self, tokens: int) -> torch.Tensor | None:
        return None if self.sinks is None else self.memory().lse[:tokens]

    def share_with_sinks(self, output: torch.Tensor, lse: torch.Tensor, queries: Queries) -> None:
        sinks, query = self.sinks, queries[0]
        assert sinks is not None
        held_for = (sinks.data_ptr(), query.stride(), query.dtype)
        launch = self.bound.get("sinks", held_for, lambda: PickSinksLaunch(sinks, self.mean, self.scale, query))
        grid, arguments = PickSinksLaunch.step(len(output), self.heads)
        launch(grid, (output, query, lse), arguments)

    def warm_up(self, store: LatentStore, cache: torch.Tensor) -> None:
        """Size the workspace and note every launch of the layer's steps. `cache`: one block of pages, of zeros."""
        memory, device = self.memory(), self.codec.device
        one = torch.zeros(1, dtype=torch.int32, device=device)
        table, picks = one[:, None], torch.zeros(1, self.picks, dtype=torch.int32, device=device)
        latents = torch.zeros(1, self.codec.rank, dtype=torch.bfloat16, device=device)
        of_rope = torch.zeros(1, self.codec.rope_dim, dtype=torch.bfloat16, device=device)
        part = PromptPart(0, 1, 1, one, one, one, one, one)
        decodes = SparseLatentMetadata(
            num_reqs=1, max_query_len=1, max_seq_len=1, num_actual_tokens=1, query_start_loc=torch.cat((one, one)),
            slot_mapping=one.long(), block_table=table, req_id_per_token=one, seq_lens=one, num_decodes=1,
            num_decode_tokens=1,
        )  # fmt: skip
        queries = memory.query[:1, : self.heads].split([self.codec.rank, self.codec.rope_dim], dim=-1)
        lse, of_output = torch.zeros(1, self.padded_heads, device=device), self.take_lse(1)
        with Ahead():
            kernel = store.kernel
            assert isinstance(kernel, TritonLatentStore)
            kernel.write(kernel.prepare(NewTokens(one.long())), cache, latents, of_rope)
            if self.row_kernel is None:
                self.gather(cache, table, one, picks.flatten())
            else:  # first, as it takes longest
                self.decode(decodes, cache, queries, picks, memory.output[:1], of_output)
            self.gather(cache, table, one, one)
            rows = self.split(picks, part, slice(0, 1))
            for stored in (None, (memory.stored[:1], lse)):
                self.merge(memory.output[:1], stored, (memory.over_own[:1], lse), rows, of_output)
            if of_output is not None:
                self.share_with_sinks(memory.output[:1], of_output, queries)
        for bound in (kernel.bound, self.bound, *(() if self.row_kernel is None else (self.row_kernel.bound,))):
            bound.clear()  # pages of our own go
