"""The fused route on CUDA: tokens stored by one kernel, decode attention over packed pages by three.

No host sync, and no allocation once vLLM's profiling run has sized the workspace.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from ..codecs.pages import PagedCodec
from ..codecs.ring import Ring
from ..kernels.decode import COLUMNS, MAX_REGISTERS, decode, split_count
from ..kernels.merge import merge, rotate_query, rotation_matrix
from ..kernels.store import store_tokens
from .active_blocks import AttentionOptions
from .routes import longest_fused


class FusedDecode:
    """Decode attention of one layer.

    Args:
        codec: of the layer, on a CUDA device.
        query_heads, kv_heads: of this rank.
        options: see `AttentionOptions`.
    """

    def __init__(self, codec: PagedCodec, query_heads: int, kv_heads: int, options: AttentionOptions) -> None:
        self.codec, self.query_heads, self.kv_heads, self.options = codec, query_heads, kv_heads, options
        self.group = query_heads // kv_heads
        self.programs = kv_heads * -(-self.group // COLUMNS)
        """Of a query token and split."""
        self.bias_rows = codec.query_bias_rows(whole=bool(options.logits_soft_cap) or options.sinks is not None)
        self.to_rotated = rotation_matrix(codec.key, kv_heads)
        self.from_rotated = rotation_matrix(codec.value, kv_heads, inverse=True)
        properties = torch.cuda.get_device_properties(codec.key.device)
        self.multiprocessors = properties.multi_processor_count
        self.max_registers = MAX_REGISTERS if properties.major == 9 else None

    def store(
        self,
        cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor | None = None,
        **ring: Any,
    ) -> None:
        """Write new tokens; see `store_tokens`."""
        store_tokens(self.codec, cache, slots, key, value, positions, **ring)

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        max_query_len: int,
        output: torch.Tensor,
        ring: Ring | None = None,
    ) -> None:
        """Attention of requests with few query tokens, over all of their cached tokens.

        Args:
            query: fp16 or bf16 [tokens, query heads, head_dim].
            cache: uint8 [blocks, KV heads, block_size, slot_bytes].
            block_table: int32 [requests, blocks].
            query_start: int32 [requests + 1].
            seq_lens: int32 [requests].
            max_query_len: known on the host.
            output: [tokens, query heads, head_dim], filled.
            ring: of these requests, their new tokens included; None: there is none.
        """
        tokens, _, head_dim = query.shape
        splits = split_count(len(seq_lens) * self.programs, self.multiprocessors)
        rotated, partial, stats, *bias = self.reserve(tokens, splits)
        query_bias = bias[0] if bias else None
        rotate_query(query, self.to_rotated, rotated, self.options.scale, self.bias_rows, query_bias)
        decode(
            self.codec.layout, rotated, cache, block_table, query_start, seq_lens, partial, stats,
            query_bias=query_bias, max_query_len=max_query_len, sliding_window=self.options.sliding_window,
            logits_soft_cap=self.options.logits_soft_cap, max_registers=self.max_registers, ring=ring,
        )  # fmt: skip
        lacking = None if self.options.sinks is None or self.options.logits_soft_cap else query_bias
        result = output.view(tokens, self.kv_heads, self.group, head_dim)
        merge(partial, stats, self.from_rotated, result, self.options.sinks, lacking)

    def reserve_largest(self, max_requests: int, max_query_len: int) -> None:
        """Size the workspace for any batch of up to `max_requests` requests of up to `max_query_len` query tokens."""
        counts = range(1, max_requests + 1)
        rows = max(n * split_count(n * self.programs, self.multiprocessors) for n in counts)
        self.reserve(rows * min(max_query_len, longest_fused(self.group)), 1)

    def reserve(self, tokens: int, splits: int) -> list[torch.Tensor]:
        """Workspace for rotated queries, partial outputs, their maxima and sums; for queries' biases if there are."""
        stored_dim = self.codec.key.stored_dim
        bias = [] if self.bias_rows is None else [((tokens, self.query_heads, 2), torch.float32)]
        return current_workspace_manager().get_simultaneous(
            ((tokens, self.kv_heads, self.group, stored_dim), torch.float16),
            ((tokens, self.query_heads, splits, stored_dim), torch.float32),
            ((tokens, self.query_heads, splits, 2), torch.float32),
            *bias,
        )
