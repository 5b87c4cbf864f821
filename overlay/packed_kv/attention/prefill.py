"""Prefill on CUDA: vLLM's FlashAttention over a chunk's raw K and V, and over its prefix, dequantised from the pages
unless the decode kernel reads it there (`passes.py`).

The chunk attends to its own K and V before quantisation: that is faster, and has less error than the quantised values
that later tokens read. The prefix is gathered into a workspace of bounded size, part by part if it is longer, and each
part's attention is added to the result by log-sum-exp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ..codecs.pages import PagedCodec
from ..codecs.ring import Ring
from ..kernels.triton.combine import CombineLaunch, SinksLaunch
from ..kernels.triton.gather import GatherLaunch, UnrotateLaunch
from ..kernels.triton.launch import Launches, StepLaunch
from ..kernels.triton.means import Means
from ..kernels.triton.ring import GatherRingLaunch
from ..kernels.triton.rotate import rotation_matrix
from ..layout import MICRO_BLOCK
from ..reference.attention import AttentionOptions
from ..reference.context_shard import UNSHARDED, ContextShard
from .passes import OverPrefixes
from .prefix import KeyPart, Span, key_part, own_part, prefix_parts
from .protocols import PrefillKernel, PrefillKind
from .step import StepKey

if TYPE_CHECKING:
    from .metadata import Batch

PREFIX_TOKENS = 32768
"""Tokens of prefixes that the workspace holds at a time: 128 MB of K and V at 8 KV heads of 128 channels."""
MAX_HEAD_DIM = {2: 256, 3: 256, 4: 512}
"""FlashAttention version -> the largest head_dim that it serves."""

NOTHING = -1.0e30
"""A finite lse that counts for nothing beside any other."""


@dataclass(frozen=True)
class FlashAttention:
    """`function`: vLLM's `flash_attn_varlen_func`, or one that takes the same arguments. `value_dim`: V's head size as
    passed to the function, and the output's. Older versions need K's; V is then padded."""

    function: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    value_dim: int


@dataclass(frozen=True)
class PartRead:
    """A part of a step's prefill, and how its keys are read.

    `key`, `value`: memory that K and V are read into, in the model's dtype [tokens, KV heads, stored_dim]."""

    part: KeyPart
    key: torch.Tensor
    value: torch.Tensor
    gather: StepLaunch
    ring: StepLaunch | None
    unrotate: tuple[StepLaunch, StepLaunch]

    @classmethod
    def of(
        cls, part: KeyPart, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, ring: Ring | None = None
    ) -> PartRead:
        """Return how a part is read. `key`, `value`: fp16 memory [tokens or more, KV heads, stored_dim]."""
        key, value = key[: part.tokens], value[: part.tokens]
        of_ring = None
        if ring is not None and part.recent is not None:
            of_ring = GatherRingLaunch.step(ring, part.recent, key, value)
        return cls(
            part,
            key.view(dtype),
            value.view(dtype),
            GatherLaunch.step(part.micro_blocks, part.rows, key, value),
            of_ring,
            (UnrotateLaunch.step(key, dtype, part.positions), UnrotateLaunch.step(value, dtype, part.positions)),
        )


@dataclass(frozen=True)
class PrefillStep:
    """A step's prefill: the part of the requests' own tokens, how it is read where the cache is shared, the parts of
    their prefixes, memory for attention over the prefixes and, where V is padded, for V and output of the own tokens.
    """

    own: KeyPart
    own_read: PartRead | None
    parts: list[PartRead]
    over_parts: torch.Tensor
    padded: list[torch.Tensor]


class FlashPrefill(PrefillKernel["Batch"]):
    """Prefill attention of one layer.

    Args:
        codec: of the layer.
        query_heads, kv_heads: of this rank.
        options: see `AttentionOptions`.
        max_tokens, max_requests: of a batch.
        flash_attention: see `find_flash_attention`.
        shard: which tokens of a prefix are in this rank's pages; if ranks split it, `query_heads` are those of all
            these ranks.
    """

    def __init__(
        self,
        codec: PagedCodec,
        query_heads: int,
        kv_heads: int,
        options: AttentionOptions,
        max_tokens: int,
        max_requests: int,
        flash_attention: FlashAttention,
        shard: ContextShard = UNSHARDED,
    ) -> None:
        self.codec, self.query_heads, self.kv_heads, self.options = codec, query_heads, kv_heads, options
        self.flash_attention, self.shard = flash_attention, shard
        self.pads = flash_attention.value_dim != codec.value.head_dim
        self.max_tokens = max_tokens
        own_tokens = max_tokens + max_requests * MICRO_BLOCK
        self.capacity = -(-max(PREFIX_TOKENS, own_tokens) // MICRO_BLOCK) * MICRO_BLOCK
        self.means = [Means.of(one.transform) for one in codec.codecs]
        self.matrices = [rotation_matrix(one, kv_heads, inverse=True) for one in codec.codecs]
        self.sizes = (query_heads, kv_heads, codec.key.head_dim, codec.value.head_dim, self.capacity)
        self.bound: Launches = Launches()

    def attend(
        self, batch: Batch, first: int, ring: Ring | None = None, over_prefixes: OverPrefixes | None = None
    ) -> None:
        """`over_prefixes`: results for the requests from `first` on whose prefixes the decode kernel has read; None: it
        has read none."""
        in_passes = frozenset[int]() if over_prefixes is None else over_prefixes.passes.requests
        step, query, output = self._step(batch, first, ring, in_passes), *self._rows(batch, first)
        if batch.key is not None and batch.value is not None:
            rows = slice(batch.metadata.query_starts[first], batch.metadata.num_actual_tokens)
            key, value = batch.key[rows], batch.value[rows]
        else:
            assert step.own_read is not None
            key, value = self._read(batch.cache, step.own_read)
        lse = self._attend_chunks(query, key, value, step, output)
        if over_prefixes is not None:
            # Its result lies where padded chunks and gathered prefixes will lie, so it is added before these are read.
            assert not self.pads
            self._add(over_prefixes, batch.metadata.query_starts[first], output, lse)
        self._attend_prefixes(query, batch.cache, step, output, lse, ring)
        self._add_sinks(output, lse)

    def attend_in_graph(self, batch: Batch, chunk_start: torch.Tensor, over_prefixes: OverPrefixes) -> None:
        """Fill `batch.output` for the chunks of a step whose batch only the device knows; rows of decodes stay, padding
        becomes 0.

        FlashAttention 3 reads V in tiles, past the end of the last chunk too, and a weight of 0 times NaN is NaN. So
        V of padding has to be finite: it is, as all layers leave 0 for padding.

        Args:
            batch: of a layer with K and V of its own.
            chunk_start: int32 [requests + 1], see `MixedTables`.
            over_prefixes: results for all chunks with a prefix.
        """
        assert batch.key is not None and batch.value is not None and not self.pads
        tokens = batch.metadata.num_actual_tokens
        query, key, value, output = (x[:tokens] for x in (batch.query, batch.key, batch.value, batch.output))
        sliding_window = self.options.sliding_window
        assert over_prefixes.passes.row_kinds is not None
        _, lse = self.flash_attention.function(
            query, key, value, cu_seqlens_q=chunk_start, cu_seqlens_k=chunk_start, max_seqlen_q=tokens,
            max_seqlen_k=tokens, softmax_scale=self.options.scale, causal=True,
            window_size=[-1 if sliding_window is None else sliding_window - 1, 0],
            softcap=self.options.logits_soft_cap or 0.0, return_softmax_lse=True, out=output, num_splits=1,
        )  # fmt: skip
        self.combine_in_graph(output, lse, over_prefixes)

    def combine_in_graph(self, output: torch.Tensor, lse: torch.Tensor, over_prefixes: OverPrefixes) -> None:
        """Add attention over prefixes, and the sinks, to chunks' attention over their own tokens; padding becomes 0.

        Args:
            output: [tokens, query heads, head_dim].
            lse: fp32 [query heads, tokens], unit stride over tokens.
            over_prefixes: see `attend_in_graph`.
        """
        part, kinds = over_prefixes.output, over_prefixes.passes.row_kinds
        self._combine(output, part.shape[2], are_all=False).combine(output, lse, part, over_prefixes.lse.T, kinds)
        self._add_sinks(output, lse, kinds)

    def attend_shard(self, batch: Batch, first: int, lse: torch.Tensor) -> None:
        """Attention of the requests from `first` on over the tokens of their prefixes that this rank has.

        Args:
            batch: with the query heads of all ranks, and their output in fp32. The rows of these requests are filled,
                with 0 where the rank has no token of a prefix.
            first: index of a request.
            lse: fp32 [tokens, query heads of all ranks], filled likewise, with `NOTHING`.
        """
        step, query, output = self._step(batch, first, None), *self._rows(batch, first)
        over_prefixes = lse.new_full((lse.shape[1], len(query)), NOTHING)
        self._attend_prefixes(query, batch.cache, step, output.zero_(), over_prefixes, None)
        lse[batch.metadata.query_starts[first] : batch.metadata.num_actual_tokens] = over_prefixes.T

    def attend_rest(self, batch: Batch, first: int, over_prefixes: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Attention of the requests from `first` on over their own chunks, combined with the given attention over their
        prefixes.

        over_prefixes: fp32 [tokens, query heads, value_dim], contiguous, and [tokens, query heads] of the batch: the
        ranks' results of `attend_shard`, combined.
        """
        assert batch.key is not None and batch.value is not None
        step, query, output = self._step(batch, first, None), *self._rows(batch, first)
        rows = slice(batch.metadata.query_starts[first], batch.metadata.num_actual_tokens)
        part, part_lse = (x[rows] for x in over_prefixes)
        lse = self._attend_chunks(query, batch.key[rows], batch.value[rows], step, output)
        self._combine(output, part.shape[2]).combine(output, lse, part, part_lse.T)

    def _attend_chunks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: PrefillStep, output: torch.Tensor
    ) -> torch.Tensor:
        """Attention of a prefill's rows over their own chunks; returns its lse, fp32 [query heads, rows]."""
        sliding_window = self.options.sliding_window
        seen = (-1 if sliding_window is None else sliding_window - 1, 0)
        if not self.pads:
            return self._flash(query, key, value, step.own, output, causal=True, window_size=seen)
        value_dim = self.codec.value.head_dim
        padded_value, padded_output = (x[: len(query)] for x in step.padded)
        padded_output = padded_output[:, : query.shape[1]]  # a rank's own heads: the memory is for all ranks'
        if value.shape[2] == value_dim:  # raw; read from pages, they have their padding
            padded_value[..., :value_dim] = value  # what lies behind them does not matter: channels of V do not mix
            value = padded_value
        lse = self._flash(query, key, value, step.own, padded_output, causal=True, window_size=seen)
        output.copy_(padded_output[..., :value_dim])
        return lse

    def _attend_prefixes(
        self, query: torch.Tensor, cache: torch.Tensor, step: PrefillStep, output: torch.Tensor, lse: torch.Tensor,
        ring: Ring | None,
    ) -> None:  # fmt: skip
        """Add the attention over prefixes to `output` and `lse`, part by part."""
        for read in step.parts:
            part = read.part
            seen = part.seen
            key, value = self._read(cache, read, ring)
            over_part = step.over_parts[: seen.stop - seen.start]
            # There is no causal mask here: to the right of its position a row sees all keys.
            part_lse = self._flash(query[seen], key, value, part, over_part, causal=False, window_size=(part.left, -1))
            self._combine(output, over_part.shape[2]).combine(output[seen], lse[:, seen], over_part, part_lse)

    def _add(self, over_prefixes: OverPrefixes, first_row: int, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Add attention over prefixes to `output` and `lse`, which begin with row `first_row` of the batch."""
        combine = self._combine(output, over_prefixes.output.shape[2])
        for run in over_prefixes.passes.runs:
            rows = slice(run.start - first_row, run.stop - first_row)
            combine.combine(output[rows], lse[:, rows], over_prefixes.output[run], over_prefixes.lse[run].T)

    def _add_sinks(self, output: torch.Tensor, lse: torch.Tensor, row_kinds: torch.Tensor | None = None) -> None:
        """Let rows share their weights with the heads' sinks, if there are any; with `row_kinds`, only chunks' rows."""
        if (sinks := self.options.sinks) is None:
            return
        binding_key = (output.stride(), output.dtype, sinks.data_ptr(), sinks.dtype)
        name = ("sinks", row_kinds is None)
        launch = self.bound.get(name, binding_key, lambda: SinksLaunch(output, sinks, are_all=row_kinds is None))
        launch.apply(output, lse, row_kinds)

    def _rows(self, batch: Batch, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and output of the requests from `first` on."""
        rows = slice(batch.metadata.query_starts[first], batch.metadata.num_actual_tokens)
        return batch.query[rows], batch.output[rows]

    def _combine(self, output: torch.Tensor, part_dim: int, *, are_all: bool = True) -> CombineLaunch:
        binding_key = (output.shape[1], output.stride(), output.dtype)
        name = ("combine", output.shape[1], part_dim, are_all)
        return self.bound.get(name, binding_key, lambda: CombineLaunch(output, part_dim, are_all=are_all))

    def reserve(self, dtype: torch.dtype) -> None:
        self.take(dtype)

    def take(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return workspace for gathered K and V, for the attention over them and, if V is padded, for a chunk's V and
        output."""
        from vllm.v1.worker.workspace import current_workspace_manager

        key, value_dim = self.codec.key, self.flash_attention.value_dim
        own = [((self.max_tokens, heads, value_dim), dtype) for heads in (self.kv_heads, self.query_heads)]
        return current_workspace_manager().get_simultaneous(
            ((self.capacity, self.kv_heads, key.stored_dim), torch.float16),
            ((self.capacity, self.kv_heads, key.stored_dim), torch.float16),
            ((self.max_tokens, self.query_heads, value_dim), dtype),
            *(own if self.pads else []),
        )

    def _step(
        self, batch: Batch, first: int, ring: Ring | None, in_passes: frozenset[int] = frozenset()
    ) -> PrefillStep:
        """Return the step of a batch's prefill, made for the first layer of a kind and kept for the others.

        in_passes: requests whose prefixes the decode kernel reads, so that they are not gathered.
        """
        metadata, shared, dtype = batch.metadata, batch.key is None, batch.query.dtype
        recent, block_size = ring.window if ring else 1, batch.cache.shape[2]

        def make() -> PrefillStep:
            starts = metadata.query_starts[first:]
            query_lens = [end - start for start, end in pairwise(starts)]
            prefixes = [
                0 if request in in_passes else self.shard.count(metadata.context[request] - count)
                for request, count in enumerate(query_lens, first)
            ]
            query_starts = [start - starts[0] for start in starts]
            blocks = metadata.block_table[first:]
            spans = prefix_parts(query_lens, prefixes, self.options.sliding_window, self.capacity, shared)
            raw = [Span(request, count, 0, count) for request, count in enumerate(query_lens)]
            own = key_part(own_part(query_lens, prefixes) if shared else raw, query_starts, blocks, block_size)
            recent_from = [prefix - recent + 1 for prefix in prefixes]
            parts = [key_part(part, query_starts, blocks, block_size, recent_from, self.shard) for part in spans]
            key, value, over_parts, *padded = self.take(dtype)
            return PrefillStep(
                own,
                PartRead.of(own, key, value, dtype) if shared else None,
                [PartRead.of(part, key, value, dtype, ring) for part in parts],
                over_parts,
                padded,
            )

        kind = PrefillKind(self.sizes, self.options.sliding_window, shared, recent, dtype, in_passes)
        rings = batch.window.metadata if ring and batch.window else None
        return metadata.steps.get(StepKey("prefill", kind, first, rings), make)

    def _read(self, cache: torch.Tensor, read: PartRead, ring: Ring | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a part in the model's basis, [tokens, KV heads, channels that FlashAttention is given]."""
        stored_dim = self.codec.key.stored_dim
        binding_key = (cache.data_ptr(), cache.stride())
        launch = self.bound.get("gather", binding_key, lambda: GatherLaunch(self.codec.layout, cache, self.kv_heads))
        grid, arguments = read.gather
        launch(grid, (), arguments)
        if ring is not None and read.ring is not None:
            binding_key = (ring.cache.data_ptr(), ring.cache.stride())
            grid, arguments = read.ring
            self.bound.get("ring", binding_key, lambda: GatherRingLaunch(ring, stored_dim))(grid, (), arguments)
        for name, (grid, arguments), matrix, means in zip(
            ("key", "value"), read.unrotate, self.matrices, self.means, strict=True
        ):
            bind = functools.partial(UnrotateLaunch, matrix, self.kv_heads, stored_dim, means)
            self.bound.get(name, read.key.dtype, bind)(grid, (), arguments)
        return read.key[..., : self.codec.key.head_dim], read.value[..., : self.flash_attention.value_dim]

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: KeyPart, output: torch.Tensor, *,
        causal: bool, window_size: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        """Attention over a part into `output`; returns its lse, fp32 [query heads, rows]."""
        _, lse = self.flash_attention.function(
            query, key, value, **part.lengths, softmax_scale=self.options.scale, causal=causal,
            window_size=list(window_size), softcap=self.options.logits_soft_cap or 0.0, return_softmax_lse=True,
            out=output,
        )  # fmt: skip
        return lse


def find_flash_attention(
    head_dim: int, value_dim: int, dtype: torch.dtype, logits_soft_cap: float | None
) -> FlashAttention | None:
    """Return vLLM's FlashAttention in the version that vLLM would choose on this card, or None if no version serves."""
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    version = get_flash_attn_version(head_size=head_dim, requires_softcap=logits_soft_cap is not None)
    if version is None or head_dim > MAX_HEAD_DIM.get(version, 0):
        return None
    two_sizes = takes_two_sizes(version, torch.cuda.get_device_capability()[0], head_dim, value_dim)
    function = functools.partial(flash_attn_varlen_func, fa_version=version)
    return FlashAttention(function, value_dim if two_sizes else head_dim)


def takes_two_sizes(version: int, generation: int, head_dim: int, value_dim: int) -> bool:
    """Return True if a version of FlashAttention has kernels for V of fewer channels than K, on GPUs of a generation
    (9: Hopper): where vLLM's `mla/prefill/flash_attn.py` passes such V, for its head sizes and sizes rounded up to
    these. Other versions get V padded; so does version 4, which vLLM does not choose for keys of 192 channels."""
    return (version, generation) == (3, 9) and 128 < head_dim <= 192 and 96 < value_dim <= 128
