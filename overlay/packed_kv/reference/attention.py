"""Decompress-active-blocks attention in PyTorch: causal attention that reads every key and value from packed pages.

Only the blocks of the requests at hand are dequantised, `KV_TILE` tokens at a time, and combined by an online
softmax. Tiles start at multiples of `KV_TILE` from the start of the request, whatever the scheduler's chunks are, so
a query sees the same tiles however its request was cut, batched, cached or preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codecs.pages import PagedCodec
from ..layout import MICRO_BLOCK
from .context_shard import UNSHARDED, ContextShard

KV_TILE = 1024
"""Tokens of a request dequantised at a time: at 8 KV heads of 128 channels, 8 MB of K and V in fp32."""
MAX_SCORES = 1 << 24
"""Scores held at a time (64 MB in fp32); further query rows follow on the same tile."""


@dataclass(frozen=True)
class AttentionOptions:
    """Options of a layer's attention: score scale, sliding window (tokens, the query's own
    included, or None), logits soft cap (or None) and attention sinks (or None).

    `sinks`: a parameter of the layer, float [query heads]: each head's score of one more key, neither scaled nor
    capped, whose value is 0. Loaded after the layer is made, so it is read at each step.
    """

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class RecentVectors:
    """K and V of a request's newest tokens, from token `first` to its last, in the ring's precision.

    `key`, `value`: fp32 [KV heads, tokens, head_dim], rotated, with their means. A query reads up to `window` tokens
    here, its own included, and earlier tokens from the pages.
    """

    first: int
    window: int
    key: torch.Tensor
    value: torch.Tensor


def attend(
    codec: PagedCodec,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_len: int,
    query: torch.Tensor,
    options: AttentionOptions,
    recent: RecentVectors | None = None,
    shard: ContextShard = UNSHARDED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one request's newest tokens over its cached tokens, the newest included, as far as they are
    in this rank's shard.

    Args:
        codec: of this layer.
        cache: uint8 [blocks, KV heads, block_size, slot_bytes].
        block_table: int [at least ceil(shard.count(seq_len) / block_size)], the request's blocks.
        seq_len: tokens of the request, on whatever rank.
        query: float [tokens, query heads, head_dim], at positions seq_len - tokens .. seq_len - 1.
        options: see `AttentionOptions`.
        recent: read instead of the pages by queries near enough; None: all read the pages.
        shard: what is in this rank's pages.

    Returns:
        float32 [tokens, query heads, value_dim], 0 for a query that sees no token of the shard; and the lse of the
        scores, sinks included, float32 [tokens, query heads], -inf for such a query.
    """
    tokens, query_heads, head_dim = query.shape
    kv_heads, block_size = cache.shape[1:3]
    group = query_heads // kv_heads
    query = query.float().view(tokens, kv_heads, group, head_dim)
    rows = codec.rotate_query(query).permute(1, 0, 2, 3) * options.scale  # [KV heads, tokens, group, head_dim]
    state = _OnlineSoftmax(rows)
    positions = torch.arange(seq_len - tokens, seq_len, device=query.device)
    sliding_window = options.sliding_window or seq_len
    stored, first_visible = shard.count(seq_len), shard.count(max(0, seq_len - tokens - sliding_window + 1))
    rows_at_once = max(1, MAX_SCORES // (query_heads * KV_TILE))

    for tile in range(first_visible // KV_TILE * KV_TILE, stored, KV_TILE):
        start, end = max(tile, first_visible // MICRO_BLOCK * MICRO_BLOCK), min(tile + KV_TILE, stored)
        token_ids = torch.arange(start, end, MICRO_BLOCK, device=query.device)
        micro_blocks = (block_table[token_ids // block_size] * block_size + token_ids % block_size) // MICRO_BLOCK
        kv_positions = shard.position(torch.arange(start, start + MICRO_BLOCK * len(token_ids), device=query.device))
        key, value = (x[:, : end - start] for x in codec.read(cache, micro_blocks, kv_positions))
        kv_positions = kv_positions[: end - start]
        # The rows that see this tile: none before its start, none more than a window past its end.
        first = max(0, shard.position(start) - (seq_len - tokens))
        last = min(tokens, shard.position(end - 1) + sliding_window - (seq_len - tokens))
        for row in range(first, last, rows_at_once):
            part = slice(row, min(row + rows_at_once, last))
            distance = positions[part, None] - kv_positions
            hidden = (distance < 0) | (distance >= sliding_window)
            if recent is not None:
                hidden |= (distance < recent.window) & (kv_positions >= recent.first)
            state.update(part, _scores(rows[:, part], key, hidden, options), value)
    if recent is not None and recent.key.shape[1]:
        key, value = recent.key.to(rows.dtype), recent.value.to(rows.dtype)
        distance = positions[:, None] - torch.arange(recent.first, seq_len, device=query.device)
        hidden = (distance < 0) | (distance >= min(sliding_window, recent.window))
        for row in range(0, tokens, rows_at_once):
            part = slice(row, min(row + rows_at_once, tokens))
            state.update(part, _scores(rows[:, part], key, hidden[part], options), value)
    if options.sinks is not None:
        state.add_sinks(options.sinks.to(rows.dtype).view(kv_heads, 1, group))
    output = codec.unrotate_output(state.result().permute(1, 0, 2, 3)).reshape(tokens, query_heads, -1)
    return output, state.lse().permute(1, 0, 2).reshape(tokens, query_heads)


def _scores(rows: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Scores [KV heads, rows, group, keys] of rows [KV heads, rows, group, head_dim]; `hidden` is bool [rows, keys]."""
    scores = torch.matmul(rows.flatten(1, 2), key.transpose(1, 2)).unflatten(1, rows.shape[1:3])
    if options.logits_soft_cap:
        scores = options.logits_soft_cap * torch.tanh(scores / options.logits_soft_cap)
    return scores.masked_fill_(hidden[:, None], float("-inf"))


class _OnlineSoftmax:
    """Running maximum, sum and weighted values of rows [KV heads, tokens, group, head_dim]."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.maximum = rows.new_full(rows.shape[:-1], float("-inf"))
        self.total = rows.new_zeros(rows.shape[:-1])
        self.output = torch.zeros_like(rows)

    def update(self, part: slice, scores: torch.Tensor, value: torch.Tensor) -> None:
        """Add the scores [KV heads, part, group, keys] of rows `part` for `value` [KV heads, keys, head_dim]."""
        old = self.maximum[:, part]
        new = torch.maximum(old, scores.amax(-1))
        # A row that sees none of this tile's keys keeps its state: its maximum stays -inf until a key is seen.
        base = torch.where(new.isinf(), 0.0, new)
        weights = torch.exp(scores - base.unsqueeze(-1))
        shrink = torch.exp(old - base)
        self.maximum[:, part] = new
        self.total[:, part] = self.total[:, part] * shrink + weights.sum(-1)
        added = torch.matmul(weights.flatten(1, 2), value).unflatten(1, weights.shape[1:3])
        self.output[:, part] = self.output[:, part] * shrink.unsqueeze(-1) + added

    def add_sinks(self, scores: torch.Tensor) -> None:
        """Add the score of a key without a value, [KV heads, tokens or 1, group]; each row has already seen a key."""
        new = torch.maximum(self.maximum, scores)
        shrink = torch.exp(self.maximum - new)
        self.maximum = new
        self.total = self.total * shrink + torch.exp(scores - new)
        self.output = self.output * shrink.unsqueeze(-1)

    def result(self) -> torch.Tensor:
        return self.output / self.total.masked_fill(self.total == 0, 1).unsqueeze(-1)

    def lse(self) -> torch.Tensor:
        return self.maximum + self.total.log()
