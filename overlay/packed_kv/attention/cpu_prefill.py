"""Prefill on a CPU: vLLM's own attention op over a request's prefix, unpacked from the pages, and its chunk's raw K and
V.

As on CUDA (`prefill.py`), the chunk attends over itself before quantisation. Prefix and chunk lie in one scratch cache
of vLLM's kind, which all layers share. So one causal call serves a request, and no parts have to be combined.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..codecs.pages import PagedCodec
from ..codecs.ring import Ring
from ..kernels.cpu.gather import CpuGather
from ..layout import MICRO_BLOCK
from ..reference.attention import AttentionOptions
from ..vllm_compat import cpu_instructions, cpu_ops
from .protocols import PrefillKernel, PrefillKind
from .step import StepKey

if TYPE_CHECKING:
    from .metadata import Batch, PackedMetadata

BLOCK = 128
"""Tokens of a block of the scratch cache."""
PIECE = 1024
"""Tokens that are unpacked at a time and then copied into the scratch cache."""


class ScratchSpan(NamedTuple):
    """Tokens of a request that the op sees: from `start`, a multiple of 16, to `end`; from `own` on they are new.

    `block`: the request's first block of the scratch cache.
    """

    request: int
    start: int
    own: int
    end: int
    block: int


@dataclass(frozen=True)
class ScratchBatch:
    """Requests that fit the scratch cache together: their spans, their rows of the batch, and arguments of the op.

    `slots`: int64, slots of new tokens in the scratch cache; empty where the layer reads another layer's cache.
    `cut_blocks`: int64, blocks that the requests do not fill.
    """

    spans: list[ScratchSpan]
    rows: slice
    slots: torch.Tensor
    cut_blocks: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    schedule: torch.Tensor


class Scratch:
    """The scratch cache: K and V of one layer in the layout of vLLM's CPU cache, and a buffer of unpacked vectors.

    Args:
        tokens: capacity, at least the tokens of the longest request.
        kv_heads, head_dim: of the layers that share it.
        dtype: of the model.
    """

    def __init__(self, tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.blocks = -(-tokens // BLOCK)
        # Filled, so that vLLM counts these pages as this process's memory when it sizes the KV cache.
        self.cache = torch.full((self.blocks, kv_heads, 2 * BLOCK, head_dim), 0, dtype=dtype)
        self.key, self.value = self.cache.chunk(2, dim=2)
        self.piece = torch.full((2, PIECE, kv_heads, head_dim), 0, dtype=dtype)
        self.slots = torch.arange(self.blocks * BLOCK)
        self.numbers = torch.arange(self.blocks, dtype=torch.int32)


_scratch: weakref.WeakValueDictionary[tuple[object, ...], Scratch] = weakref.WeakValueDictionary()
"""Scratch caches of the engines in this process, as long as a layer has them."""


class CpuPrefill(PrefillKernel["Batch"]):
    """Prefill attention of one layer.

    Args:
        codec: of the layer, on the CPU.
        query_heads, kv_heads: of this rank.
        options: see `AttentionOptions`.
        max_tokens: the most tokens of a request and of a batch.
        dtype: of the model, fp16 or bf16.
        engine: a number that the engine's layers have in common.

    Raises:
        BuildError: no compiler, or one that fails.
    """

    bound = None

    def __init__(
        self,
        codec: PagedCodec,
        query_heads: int,
        kv_heads: int,
        options: AttentionOptions,
        max_tokens: int,
        dtype: torch.dtype,
        engine: int,
    ) -> None:
        self.codec, self.query_heads, self.kv_heads, self.options = codec, query_heads, kv_heads, options
        self.head_dim, self.value_dim, self.dtype = codec.key.head_dim, codec.value.head_dim, dtype
        self.gather = CpuGather(codec)
        self.isa = cpu_instructions(dtype, BLOCK, self.head_dim)
        size = max_tokens + BLOCK, kv_heads, self.head_dim, dtype
        scratch = _scratch.get((engine, *size))
        if scratch is None:
            scratch = _scratch.setdefault((engine, *size), Scratch(*size))
        self.scratch = scratch

    def attend(self, batch: Batch, first: int, ring: Ring | None = None) -> None:
        for fitting in self._scratch_batches(batch.metadata, first, batch.key is None):
            if len(fitting.cut_blocks):
                # The op reads a block to its end, and 0 times what a former request left there may be NaN.
                self.scratch.cache.index_fill_(0, fitting.cut_blocks, 0)
            for span in fitting.spans:
                if span.start < span.own:
                    self._unpack(span, batch, first, ring)
            if batch.key is not None and batch.value is not None:
                self._put(fitting.slots, batch.key[fitting.rows], batch.value[fitting.rows])
            self._attend(fitting, batch.query[fitting.rows], batch.output[fitting.rows])

    def _scratch_batches(self, metadata: PackedMetadata, first: int, shared: bool) -> list[ScratchBatch]:
        """Return the step, made for the first layer of a kind and kept for the rest."""
        window = self.options.sliding_window

        def make() -> list[ScratchBatch]:
            batches: list[list[ScratchSpan]] = [[]]
            free = self.scratch.blocks
            for request in range(first, len(metadata.context)):
                count = metadata.query_starts[request + 1] - metadata.query_starts[request]
                end = metadata.context[request]
                start = 0 if window is None else max(0, end - count - window + 1) // MICRO_BLOCK * MICRO_BLOCK
                blocks = -(-(end - start) // BLOCK)
                if blocks > free and batches[-1]:
                    batches.append([])
                    free = self.scratch.blocks
                own = end if shared else end - count
                batches[-1].append(ScratchSpan(request, start, own, end, self.scratch.blocks - free))
                free -= blocks
            return [self._scratch_batch(spans, metadata) for spans in batches if spans]

        kind = PrefillKind((self.query_heads, self.kv_heads, self.head_dim, self.scratch.blocks), window, shared)
        return metadata.steps.get(StepKey("prefill", kind, first), make)

    def _scratch_batch(self, spans: list[ScratchSpan], metadata: PackedMetadata) -> ScratchBatch:
        starts = metadata.query_starts[spans[0].request : spans[-1].request + 2]
        query_start = torch.tensor([start - starts[0] for start in starts], dtype=torch.int32)
        seq_lens = torch.tensor([span.end - span.start for span in spans], dtype=torch.int32)
        table = torch.zeros(len(spans), -(-int(seq_lens.max()) // BLOCK), dtype=torch.int32)
        for row, span in zip(table, spans, strict=True):
            blocks = -(-(span.end - span.start) // BLOCK)
            row[:blocks] = self.scratch.numbers[span.block : span.block + blocks]
        schedule = cpu_ops().cpu_attn_get_scheduler_metadata(
            num_reqs=len(spans), num_heads=self.query_heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            seq_lens=seq_lens, dtype=self.dtype, query_start_loc=query_start, causal=True,
            sliding_window_size=self.options.sliding_window or -1, isa=self.isa, enable_kv_split=True,
        )  # fmt: skip
        slots = torch.cat([self._slots(span, span.own, span.end) for span in spans])
        cut = [span.block + tokens // BLOCK for span in spans if (tokens := span.end - span.start) % BLOCK]
        where = slice(starts[0], starts[-1]), slots, torch.tensor(cut, dtype=torch.int64)
        return ScratchBatch(spans, *where, query_start, seq_lens, table, schedule)

    def _slots(self, span: ScratchSpan, start: int, end: int) -> torch.Tensor:
        """Return where the tokens `start` .. `end` - 1 of a request lie in the scratch cache, int64."""
        at = span.block * BLOCK - span.start
        return self.scratch.slots[at + start : at + end]

    def _unpack(self, span: ScratchSpan, batch: Batch, first: int, ring: Ring | None) -> None:
        """Bring a request's prefix into the scratch cache."""
        with_ring: dict[str, Ring | int] = {}
        ring_from = span.own
        if ring is not None:
            row = span.request - first
            ring_from = max(int(ring.first[row]), span.own - ring.window + 1)
            of_request = Ring(ring.cache, ring.block_table[row : row + 1], ring.first[row : row + 1], ring.window)
            with_ring = {"ring": of_request, "ring_from": ring_from}
        table, piece = batch.metadata.block_table[span.request], self.scratch.piece
        for start in range(span.start, span.own, PIECE):
            end = min(start + PIECE, span.own)
            unpacked = piece[0, : end - start], piece[1, : end - start, :, : self.value_dim]
            self.gather(batch.cache, table, start, end, *unpacked, **(with_ring if ring_from < end else {}))  # type: ignore[arg-type]
            self._put(self._slots(span, start, end), *unpacked)

    def _put(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write tokens into the scratch cache. `slots`: int64 [tokens], a slot of each."""
        if self.value_dim != self.head_dim:
            value = torch.nn.functional.pad(value, (0, self.head_dim - self.value_dim))
        cpu_ops().cpu_attn_reshape_and_cache(key, value, self.scratch.key, self.scratch.value, slots, self.isa)

    def _attend(self, batch: ScratchBatch, query: torch.Tensor, output: torch.Tensor) -> None:
        sinks = self.options.sinks
        if sinks is not None and sinks.dtype != torch.bfloat16:
            sinks = sinks.detach().float()
        pads = self.value_dim != self.head_dim
        result = query.new_empty(query.shape) if pads else output
        cpu_ops().cpu_attention_with_kv_cache(
            query=query, key_cache=self.scratch.key, value_cache=self.scratch.value, output=result,
            query_start_loc=batch.query_start, seq_lens=batch.seq_lens, scale=self.options.scale, causal=True,
            alibi_slopes=None, sliding_window=self.options.sliding_window or -1, block_table=batch.block_table,
            softcap=self.options.logits_soft_cap or 0.0, scheduler_metadata=batch.schedule, s_aux=sinks,
        )  # fmt: skip
        if pads:
            output.copy_(result[..., : self.value_dim])


def refusal(head_dim: int) -> str | None:
    """Return what vLLM's op does not serve, for the log, or None."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    served = CPUAttentionBackend.get_supported_head_sizes()
    return None if head_dim in served else f"heads of {head_dim} channels (only {', '.join(map(str, served))})"
