"""Sparse attention of a layer over latent rows: each query token reads the tokens that vLLM's indexer picked for it.

Decodes read rows of pages, their own included: on Hopper by a kernel that reads packed rows (`hopper_picks.py`).
Prompts read what was before the batch from pages and their own tokens as the model has them; see
`reference/sparse_latents.py`. Their rows are gathered into a workspace, in the basis in which latents are stored, and
attention over them is another kernel's (`picks_on_cuda.py`), or PyTorch's. So are rows of decodes where no kernel reads
packed ones. Where heads have sinks, the results of the batch are rescaled by their lse at the end, decodes and prompts
alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ...codecs.latent_rows import LatentRowCodec
from ...reference.sparse_latents import attend_picks, gather_tokens, merge, share_with_sinks, split_picks
from .sparse_metadata import PromptPart, SparseLatentMetadata

Queries = tuple[torch.Tensor, torch.Tensor]
"""[tokens, heads, rank], which meet stored latents, and [tokens, heads, rope_dim]."""
Latents = tuple[torch.Tensor, torch.Tensor]
"""Latents and RoPE channels as the model has them, [tokens, rank] and [tokens, rope_dim]."""
Attended = tuple[torch.Tensor, torch.Tensor]
"""[tokens, heads or more, rank] and the natural lse [tokens, heads or more]."""


@dataclass(frozen=True)
class PickLayout:
    """Shape of a layer of latents whose tokens are picked, and options of its attention.

    `codec`: on a CUDA device, for 512 + 64 channels. `heads`: query heads of this rank. `scale`: of scores.
    `constant`: fp32 [rank], added to outputs, or None. `picks`: of a query token, `index_topk`. `sinks`: float [heads],
    contiguous, the score of one more key of each head, which has no value; or None.
    """

    codec: LatentRowCodec
    heads: int
    scale: float
    constant: torch.Tensor | None
    picks: int
    sinks: torch.Tensor | None = None


class PickedRows(NamedTuple):
    """Numbers of rows that tokens read, int32 [tokens, picks]; negative: none. `counts`: int32 [tokens], a bound behind
    which there is none, or None."""

    rows: torch.Tensor
    counts: torch.Tensor | None = None


class PickKernels(Protocol):
    """Kernels of a layer for `PickAttention`. Results lie in a workspace: rows until the next `gather` or `raw`,
    others until the next slice of tokens."""

    constant: torch.Tensor | None
    """fp32 [rank], added to results, or None."""
    sinks: torch.Tensor | None
    """See `PickLayout`."""

    def most_tokens(self, picks: int) -> int:
        """Most query tokens of a slice, whose picks of so many are gathered each for itself."""

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Rows of tokens, [tokens, rank + rope_dim]: `requests` int32 [tokens / n] are those of n neighbours each in
        `positions`, int32 [tokens]; negative: none. `into`: memory for them, or None: the workspace."""

    def raw(self, new: Latents) -> torch.Tensor:
        """Rows of latents as the model has them, in the basis of stored ones."""

    def split(self, picks: torch.Tensor, part: PromptPart, inside: slice) -> tuple[PickedRows, PickedRows]:
        """Rows of picks, stored and own; of the tokens `inside` the part."""

    def attend(self, rows: torch.Tensor, picks: PickedRows, queries: Queries, *, is_own: bool) -> Attended:
        """Attention over picked rows. `is_own`: it is to stand beside that over stored ones."""

    def merge(
        self, output: torch.Tensor, stored: Attended | None, own: Attended, picks: tuple[PickedRows, PickedRows],
        lse: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Fill `output` [tokens, heads, rank] and, unless None, `lse` fp32 [tokens, heads] from both; `picks` are those
        of `split`."""

    def take_output(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for the results of a batch, [tokens, heads, rank]; `like`: its queries."""

    def take_lse(self, tokens: int) -> torch.Tensor | None:
        """Memory for their natural lse, fp32 [tokens, heads]; None where there are no sinks."""

    def share_with_sinks(self, output: torch.Tensor, lse: torch.Tensor, queries: Queries) -> None:
        """Rescale the results of a batch in place, by its lse and the layer's sinks."""

    def decode(
        self, metadata: SparseLatentMetadata, cache: torch.Tensor, queries: Queries, picks: torch.Tensor,
        output: torch.Tensor, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Fill `output` [tokens, heads, rank] and, unless None, `lse` fp32 [tokens, heads] of a batch's decodes, its
        first query tokens: here from gathered rows. Other arguments are those of `PickAttention.attend`."""
        for part in slices(self, 0, len(output), picks.shape[1]):
            picked = picks[part]
            rows = self.gather(cache, metadata.block_table, metadata.req_id_per_token[part], picked.flatten())
            numbers = torch.arange(picked.numel(), dtype=torch.int32, device=picked.device).view_as(picked)
            of_own = PickedRows(torch.where(picked >= 0, numbers, -1))
            found, found_lse = self.attend(rows, of_own, (queries[0][part], queries[1][part]), is_own=False)
            found = found[:, : output.shape[1]]
            output[part] = found if self.constant is None else found + self.constant
            if lse is not None:
                lse[part] = found_lse[:, : output.shape[1]]


def slices(kernels: PickKernels, first: int, last: int, picks: int) -> Iterator[slice]:
    """Slices of the query tokens `first` to `last` - 1 whose picks, so many each, the workspace holds together."""
    most = kernels.most_tokens(picks)
    return (slice(start, min(start + most, last)) for start in range(first, last, most))


class PickAttention:
    """Sparse attention of one layer."""

    def __init__(self, kernels: PickKernels) -> None:
        self.kernels = kernels

    def attend(
        self,
        metadata: SparseLatentMetadata,
        cache: torch.Tensor,
        queries: Queries,
        picks: torch.Tensor,
        new: Latents | None,
    ) -> torch.Tensor:
        """Attend to a batch's decodes, or to decodes and prompts.

        Args:
            cache: uint8 [blocks, block_size, slot_bytes].
            queries: of the tokens that are attended to, decodes first.
            picks: int32 [tokens, picks], positions in requests; negative: none.
            new: of all tokens of the batch; looked at where there are prompts.

        Returns:
            [tokens, heads, rank] of the queries' dtype.
        """
        tokens, decodes = len(picks), metadata.num_decode_tokens
        output, lse = self.kernels.take_output(tokens, queries[0]), self.kernels.take_lse(tokens)
        if decodes:
            of_decodes = None if lse is None else lse[:decodes]
            self.kernels.decode(metadata, cache, queries, picks, output[:decodes], of_decodes)
        if tokens > decodes:
            assert new is not None and metadata.prompts, "prompts without their latents"
            own = self.kernels.raw((new[0][decodes:tokens], new[1][decodes:tokens]))
            for prompt in metadata.prompts:
                self._attend_to_prompt(metadata, cache, prompt, own, queries, picks, output, lse)
        if lse is not None:
            self.kernels.share_with_sinks(output, lse, queries)
        return output

    def _attend_to_prompt(
        self, metadata: SparseLatentMetadata, cache: torch.Tensor, prompt: PromptPart, own: torch.Tensor,
        queries: Queries, picks: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        stored = None
        if prompt.stored_rows:
            stored = self.kernels.gather(cache, metadata.block_table, prompt.requests, prompt.positions)
        for part in slices(self.kernels, prompt.first, prompt.last, 1):
            inside = slice(part.start - prompt.first, part.stop - prompt.first)
            rows = self.kernels.split(picks[part], prompt, inside)
            of_part = queries[0][part], queries[1][part]
            over_stored = None
            if stored is not None:
                over_stored = self.kernels.attend(stored, rows[0], of_part, is_own=False)
            over_own = self.kernels.attend(own, rows[1], of_part, is_own=True)
            self.kernels.merge(output[part], over_stored, over_own, rows, None if lse is None else lse[part])


class ReferencePicks(PickKernels):
    """In PyTorch, in fp32. `scale`: of scores; `constant`, `sinks`: see `PickLayout`."""

    def __init__(
        self, codec: LatentRowCodec, scale: float, constant: torch.Tensor | None, sinks: torch.Tensor | None = None
    ) -> None:
        self.codec, self.scale, self.constant, self.sinks = codec, scale, constant, sinks
        self.mean = codec.stored_mean()

    def most_tokens(self, picks: int) -> int:
        return max(1, (1 << 16) // picks)

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        of_each = requests.long().repeat_interleave(len(positions) // len(requests))
        rows = gather_tokens(self.codec, cache, block_table, of_each, positions)
        return rows if into is None else into.copy_(rows)

    def raw(self, new: Latents) -> torch.Tensor:
        return torch.cat((self.codec.latent.prepare(new[0]), new[1].float()), dim=-1)

    def split(self, picks: torch.Tensor, part: PromptPart, inside: slice) -> tuple[PickedRows, PickedRows]:
        stored, own = split_picks(picks, part.first_own[inside], part.stored_offset[inside], part.own_offset[inside])
        return PickedRows(stored), PickedRows(own)

    def attend(self, rows: torch.Tensor, picks: PickedRows, queries: Queries, *, is_own: bool) -> Attended:
        return attend_picks(rows, picks.rows, *queries, self.scale)

    def merge(
        self, output: torch.Tensor, stored: Attended | None, own: Attended, picks: tuple[PickedRows, PickedRows],
        lse: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        output.copy_(merge(stored, own, self.codec.value_gain(), self.constant))
        if lse is not None:
            lse.copy_(own[1] if stored is None else torch.logaddexp(stored[1], own[1]))

    def take_output(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(tokens, *like.shape[1:])

    def take_lse(self, tokens: int) -> torch.Tensor | None:
        return None if self.sinks is None else self.sinks.new_empty(tokens, len(self.sinks), dtype=torch.float32)

    def share_with_sinks(self, output: torch.Tensor, lse: torch.Tensor, queries: Queries) -> None:
        assert self.sinks is not None
        lacking = None if self.mean is None else queries[0].float() @ self.mean * self.scale
        output.copy_(share_with_sinks(output, lse, self.sinks.detach(), lacking))
