"""Sparse attention of one layer over latent rows, and its step from top to bottom.

Each query token reads the tokens that vLLM's indexer picked for it. Decodes read rows of pages, their own included: on
Hopper by a kernel that reads packed rows (`hopper.py`). Prompts read earlier tokens from pages, and their own tokens as
the model has them; see `reference/sparse_latents.py`. Rows of prompts are gathered into a workspace, in the basis in
which latents are stored; FlashMLA (`flash.py`) or PyTorch (`in_pytorch.py`) attends over them. Rows of decodes are
gathered, too, where no kernel reads packed rows. Where heads have sinks, the results of the batch are rescaled by their
lse at the end, decodes and prompts alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..layouts import SparseLayout
from ..protocols import DecodeKernel, PrefillKernel
from ..step import StepKey
from ..store import LatentStore
from .in_pytorch import attend_in_pytorch
from .metadata import Latents, Queries, SparseBatch, SparseDecodes, SparseLatentMetadata

if TYPE_CHECKING:
    from .flash import TritonSinks


@dataclass(eq=False)
class SparseKernels:
    """Kernels of a layer's attention, and its shape.

    `store`: all writes. `prefix`: gathers prefixes of prompts that read all tokens: a `ReferenceLatentPrefix` or
    `RowGather`. On a GPU: `decode`, `prefill`: kernels of decodes, and of prompts that read picks; None: all runs in
    PyTorch. `sinks`: the kernel that shares weights with the sinks, or None. `take`: returns the memory of a step.
    """

    layer: SparseLayout
    store: LatentStore
    prefix: Any
    decode: DecodeKernel[Any, None] | None = None
    prefill: PrefillKernel[SparseBatch] | None = None
    sinks: TritonSinks | None = None
    take: Callable[[], Any] | None = None

    def attend(
        self, metadata: SparseLatentMetadata, cache: torch.Tensor, queries: Queries, picks: torch.Tensor,
        new: Latents | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend to a batch's decodes, or to decodes and prompts.

        Args:
            metadata, cache, queries, picks: see `SparseBatch`.
            new: latents of all tokens of the batch; read where there are prompts.

        Returns:
            [tokens, heads, rank] of the queries' dtype, on a GPU in memory that the next layer overwrites.
        """
        tokens, kind = len(picks), self.layer.kind
        decodes = min(tokens, metadata.num_decode_tokens)
        assert tokens == decodes or (new is not None and metadata.prompts), "prompts without their latents"
        if self.decode is None:
            output, lse = torch.empty_like(queries[0]), queries[0].new_empty(queries[0].shape[:2], dtype=torch.float32)
            attend_in_pytorch(self.layer, SparseBatch(metadata, cache, queries, picks, new, None, output, lse))
            return output
        assert self.prefill is not None and self.take is not None
        memory = metadata.steps.get(StepKey("memory", kind), self.take)
        output, lse = memory.output[:tokens], memory.lse[:tokens]
        batch = SparseBatch(metadata, cache, queries, picks, new, memory, output, lse if self.sinks else None)
        if decodes:
            part = slice(decodes)
            step = metadata.steps.get(StepKey("decode", kind), lambda: self._prepare_decodes(batch, decodes))
            self.decode.attend(step, cache, (*batch.queries_of(part), picks[part]), output=output[part])
        if tokens > decodes:
            self.prefill.attend(batch, metadata.num_decodes)
        if self.sinks is not None:
            self.sinks.share(output, lse, queries[0])
        return output

    def _prepare_decodes(self, batch: SparseBatch, tokens: int) -> Any:
        metadata = batch.metadata
        assert self.decode is not None and metadata.seq_lens is not None
        return self.decode.prepare(
            SparseDecodes(
                block_table=metadata.block_table,
                query_start=metadata.query_start_loc,
                seq_lens=metadata.seq_lens,
                tokens=tokens,
                max_query_len=metadata.max_query_len,
                lse=None if batch.lse is None else batch.lse[:tokens],
                requests=metadata.req_id_per_token[:tokens],
                memory=batch.memory,
            )
        )
