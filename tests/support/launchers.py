"""Launches of one Triton kernel at a time, with arguments as its docstring names them; attention binds them once.

Tables and lengths are int32, and all tensors lie on the kernel's device. Tests and benchmarks take these.
"""

from __future__ import annotations

import torch
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.ring import Ring
from packed_kv.kernels import power_of_2
from packed_kv.kernels.triton.decode import DecodeShape, bind_decode, decode_arguments, decode_grid
from packed_kv.kernels.triton.gather import (
    bind_gather,
    bind_unrotate,
    gather_arguments,
    gather_grid,
    unrotate_arguments,
    unrotate_grid,
)
from packed_kv.kernels.triton.latent_decode import (
    bind_decode_latents,
    bind_merge_latents,
    decode_latents_arguments,
    latent_shape,
    merge_latents_arguments,
    merge_latents_grid,
    row_tiles,
)
from packed_kv.kernels.triton.latent_store import bind_store_latents, store_latents_arguments, store_latents_grid
from packed_kv.kernels.triton.means import Means
from packed_kv.kernels.triton.merge import bind_merge, merge_arguments, merge_grid, merge_tile
from packed_kv.kernels.triton.ring import bind_gather_ring, gather_ring_arguments
from packed_kv.kernels.triton.rotate import (
    QueryRotation,
    bind_rotate_query,
    rotate_query_arguments,
    rotate_query_grid,
)
from packed_kv.kernels.triton.store import bind_store, store_arguments, store_grid
from packed_kv.layout import PageLayout


def rotate_query(
    query: torch.Tensor,
    matrix: torch.Tensor,
    rotated: torch.Tensor,
    scale: float,
    means: Means | None = None,
    positions: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Rotate queries of any float dtype [tokens, query heads, head_dim] into `rotated`, times `scale` and log2 e; with
    `means`, fill `bias` [tokens, query heads, 1 + blocks] for queries at `positions` int64 [tokens]."""
    assert (bias is None) == (means is None)
    assert means is None or bias is None or bias.shape[2] == 1 + means.blocks, bias.shape
    rotation = QueryRotation(matrix, scale, means)
    launch = bind_rotate_query(query, rotated.shape[1], rotation)
    launch(rotate_query_grid(rotated, rotation), (query,), rotate_query_arguments(rotated, positions, bias))


def store_tokens(
    codec: PagedCodec,
    cache: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    ring: torch.Tensor | None = None,
    ring_slots: torch.Tensor | None = None,
    only_ring: bool = False,
) -> None:
    """Store tokens as `PagedCodec.write` does, and the first `len(ring_slots)` of them as `codecs.ring.write` does.

    only_ring: leave the pages alone.
    """
    assert len(key) >= len(slots), (key.shape, slots.shape)
    assert (ring is None) == (ring_slots is None)
    launch = bind_store(codec, cache, key, value, ring, only_ring=only_ring)
    if len(slots):
        grid = store_grid(codec, len(slots), cache.shape[1])
        launch(grid, (key, value, key), store_arguments(codec, slots, positions, ring_slots))


def decode(
    page: PageLayout,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    partial_output: torch.Tensor,
    partial_stats: torch.Tensor,
    *,
    max_query_len: int,
    query_bias: torch.Tensor | None = None,
    tiles_a_block: int = 0,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    max_registers: int | None = None,
    ring: Ring | None = None,
) -> None:
    """Attend over `cache` for requests of at most `max_query_len` query tokens: the split-KV parts, not merged.

    query: fp16 [tokens, KV heads, queries per KV head, head_dim] and query_bias, both of `rotate_query`.
    partial_output, partial_stats: fp32 [tokens, query heads, splits, head_dim] and [..., splits, 2]; filled.
    tiles_a_block, sliding_window, logits_soft_cap, max_registers: see `DecodeShape`.
    """
    _, kv_heads, group, head_dim = query.shape
    blocks = 0 if query_bias is None else query_bias.shape[2] - 1
    options = (sliding_window, logits_soft_cap, blocks, tiles_a_block, max_registers)
    shape = DecodeShape(kv_heads, group, head_dim, *options)
    launch = bind_decode(page, shape, shape.tiles(max_query_len)[0], cache, ring)
    grid = decode_grid(shape, partial_output.shape[2], seq_lens.shape[0], max_query_len)
    step = decode_arguments(
        query, block_table, query_start, seq_lens, partial_output, partial_stats, query_bias, ring
    )  # fmt: skip
    launch(grid, (), step)


def merge(
    partial_output: torch.Tensor,
    partial_stats: torch.Tensor,
    matrix: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Merge the parts of `decode` into `output` [tokens, KV heads, queries per KV head, value_dim], rotated back by
    `matrix`; fill `lse` fp32 [tokens, query heads] with the natural log-sum-exps, sinks included."""
    tokens, kv_heads, group, _ = output.shape
    tile = merge_tile(partial_output.shape[2])
    step = merge_arguments(partial_output, partial_stats, group, lse)
    launch = bind_merge(output, matrix, tile, sinks, has_lse=lse is not None)
    launch(merge_grid(tokens, kv_heads, group, tile), (output,), step)


def gather(
    page: PageLayout,
    cache: torch.Tensor,
    micro_blocks: torch.Tensor,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Dequantise micro-blocks, still rotated, into `key` and `value` fp16 [rows, KV heads, head_dim].

    rows: int32 [n + 1]; the first rows[i + 1] - rows[i] (at most 16) tokens of micro-block i go to rows[i] and on.
    """
    kv_heads = key.shape[1]
    launch = bind_gather(page, cache, kv_heads)
    launch(gather_grid(micro_blocks, kv_heads), (), gather_arguments(micro_blocks, rows, key, value))


def unrotate(
    vectors: torch.Tensor,
    matrix: torch.Tensor,
    dtype: torch.dtype,
    means: Means | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn what `gather` wrote back into the model's basis, in place, with `means` added by `positions` int32 [rows].

    Returns the memory of `vectors` as `dtype`, fp16 or bf16.
    """
    assert (means is None) == (positions is None)
    _, kv_heads, head_dim = vectors.shape
    launch = bind_unrotate(matrix, kv_heads, head_dim, means)
    launch(unrotate_grid(vectors), (), unrotate_arguments(vectors, dtype, positions))
    return vectors.view(dtype)


def gather_ring(ring: Ring, spans: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write the ring's tokens over those that `gather` read from the pages, still rotated.

    spans: int32 [n, 4]: request, row of its token 0 (maybe negative), tokens low .. end - 1.
    """
    _, kv_heads, head_dim = key.shape
    launch = bind_gather_ring(ring, head_dim)
    launch((len(spans), kv_heads, 1), (), gather_ring_arguments(ring, spans, key, value))


def store_latents(
    codec: LatentCodec,
    cache: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    ring: torch.Tensor | None = None,
    ring_slots: torch.Tensor | None = None,
    *,
    only_ring: bool = False,
) -> None:
    """Store tokens as `LatentCodec.write` does, and the first `len(ring_slots)` of them as `write_ring` does.

    only_ring: leave the pages alone.
    """
    assert len(latent) >= len(slots) and len(rope) >= len(slots), (latent.shape, rope.shape, slots.shape)
    launch = bind_store_latents(codec, cache, latent, rope, ring, only_ring=only_ring)
    if len(slots):
        launch(store_latents_grid(codec, len(slots)), (latent, rope), store_latents_arguments(codec, slots, ring_slots))


def decode_latents(
    page: PageLayout,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    *,
    max_query_len: int,
    splits: int,
    constant: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend over latents and merge the splits, for requests of at most `max_query_len` query tokens.

    q_latent, q_rope: [tokens, heads, rank] and [tokens, heads, rope_dim]; output: [tokens, heads, rank]; filled.
    constant: fp32 [rank], added to each row of `output`; lse: fp32 [tokens, heads], filled.
    """
    tokens, heads, rank = output.shape
    shape = latent_shape(heads, max_query_len, scale)
    partial = torch.empty((tokens, heads, splits, rank), dtype=torch.float32, device=output.device)
    stats = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=output.device)
    step = decode_latents_arguments(block_table, query_start, seq_lens, partial, stats)
    decode = bind_decode_latents(page, shape, cache, q_latent, q_rope)
    decode((splits, row_tiles(shape, max_query_len), len(seq_lens)), (q_latent, q_rope), step)
    merge = bind_merge_latents(output, constant, power_of_2(splits), has_lse=lse is not None)
    merge(merge_latents_grid(output), (output,), merge_latents_arguments(partial, stats, lse))
