"""Sparse attention of one layer over latent rows, and its step from top to bottom.

Each query token reads the tokens that vLLM's indexer picked for it. Decodes read rows of pages, their own included: on
Hopper by a kernel that reads packed rows (`hopper.py`). Prompts read what was before the batch from pages and their own
tokens as the model has them; see `reference/sparse_latents.py`. Their rows are gathered into a workspace, in the basis
in which latents are stored, and attention over them is FlashMLA's (`flash.py`), or PyTorch's (`in_pytorch.py`). So are
rows of decodes where no kernel reads packed ones. Where heads have sinks, the results of the batch are rescaled by
their lse at the end, decodes and prompts alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ...codecs.latent_rows import LatentRowCodec
from ..protocols import DecodeBatch, DecodeKernel, LayerKernel, PrefillKernel
from ..step import StepKey
from ..store import LatentStore
from .metadata import Latents, SparseLatentMetadata

if TYPE_CHECKING:
    from ..latent.in_pytorch import ReferenceLatentPrefix
    from .rows import RowGather

Queries = tuple[torch.Tensor, torch.Tensor]
"""[tokens, heads, rank], which meet stored latents, and [tokens, heads, rope_dim]."""


class SparseKind(NamedTuple):
    """Key of the layers that share a step."""

    heads: int
    scale: float
    picks: int
    has_sinks: bool


@dataclass(frozen=True)
class SparseLayout:
    """Shape of a layer of latents whose tokens are picked, and options of its attention.

    `codec`: of the layer; on a CUDA device for 512 + 64 channels. `heads`: query heads of this rank. `scale`: of
    scores. `constant`: fp32 [rank], added to outputs, or None. `picks`: of a query token, `index_topk`. `sinks`: float
    [heads], contiguous, the score of one more key of each head, which has no value; or None.
    """

    codec: LatentRowCodec
    heads: int
    scale: float
    constant: torch.Tensor | None
    picks: int
    sinks: torch.Tensor | None = None

    @property
    def kind(self) -> SparseKind:
        return SparseKind(self.heads, self.scale, self.picks, self.sinks is not None)


class Results(NamedTuple):
    """Memory for the results of a batch, which each layer overwrites: `output` [tokens or more, heads, rank] and their
    natural lse, fp32 [tokens or more, heads], not looked at where there are no sinks. `SparseMemory` has these, too."""

    output: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class SparseBatch:
    """What a layer attends to: a batch's decodes, or decodes and prompts.

    `cache`: uint8 [blocks, block_size, slot_bytes]. `queries`: of the tokens that are attended to, decodes first.
    `picks`: int32 [tokens, picks], positions in requests; negative: none. `new`: latents of these tokens; looked at
    where there are prompts. `memory`: the step's, `Results` or `SparseMemory`. `output` [tokens, heads, rank] and,
    unless None, `lse` fp32 [tokens, heads] are to be filled.
    """

    metadata: SparseLatentMetadata
    cache: torch.Tensor
    queries: Queries
    picks: torch.Tensor
    new: Latents
    memory: Any
    output: torch.Tensor
    lse: torch.Tensor | None


class Sinks(LayerKernel, Protocol):
    """Shares weights with the sinks of a layer's heads."""

    def share(self, output: torch.Tensor, lse: torch.Tensor, query: torch.Tensor) -> None:
        """Rescale `output` [tokens, heads, rank] in place, by its lse fp32 [tokens, heads]. `query`: the first of
        `Queries`."""


@dataclass(eq=False)
class SparseKernels:
    """Kernels of a layer's attention.

    `store`: all writes. `decode`, `prefill`: of decodes, and of prompts that read picks. `prefix`: gathers prefixes of
    prompts that read all tokens. `take`: returns the memory of a step, given the first of its queries. `sinks`: None:
    there are none.
    """

    store: LatentStore
    decode: DecodeKernel[Any, None]
    prefill: PrefillKernel[SparseBatch]
    prefix: ReferenceLatentPrefix | RowGather
    take: Callable[[torch.Tensor], Any]
    sinks: Sinks | None

    def attend(
        self, metadata: SparseLatentMetadata, cache: torch.Tensor, queries: Queries, picks: torch.Tensor,
        new: Latents | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend to a batch's decodes, or to decodes and prompts.

        Args:
            metadata, cache, queries, picks: see `SparseBatch`.
            new: of all tokens of the batch; looked at where there are prompts.

        Returns:
            [tokens, heads, rank] of the queries' dtype, in memory that the next layer overwrites.
        """
        tokens, decodes, kind = len(picks), metadata.num_decode_tokens, self.decode.kind
        memory = metadata.steps.get(StepKey("memory", kind), lambda: self.take(queries[0]))
        output, lse = memory.output[:tokens], None if self.sinks is None else memory.lse[:tokens]
        if decodes:
            step = metadata.steps.get(StepKey("decode", kind), lambda: self._prepare_decodes(metadata, memory))
            of_decodes = queries[0][:decodes], queries[1][:decodes], picks[:decodes]
            self.decode.attend(step, cache, of_decodes, output=output[:decodes])
        if tokens > decodes:
            assert new is not None and metadata.prompts, "prompts without their latents"
            batch = SparseBatch(metadata, cache, queries, picks, new, memory, output, lse)
            self.prefill.attend(batch, metadata.num_decodes)
        if self.sinks is not None and lse is not None:
            self.sinks.share(output, lse, queries[0])
        return output

    def _prepare_decodes(self, metadata: SparseLatentMetadata, memory: Any) -> Any:
        tokens = metadata.num_decode_tokens
        assert metadata.seq_lens is not None
        return self.decode.prepare(
            DecodeBatch(
                block_table=metadata.block_table,
                query_start=metadata.query_start_loc,
                seq_lens=metadata.seq_lens,
                tokens=tokens,
                max_query_len=metadata.max_query_len,
                lse=None if self.sinks is None else memory.lse[:tokens],
                requests=metadata.req_id_per_token[:tokens],
                memory=memory,
            )
        )
