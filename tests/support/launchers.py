"""Launches of one Triton kernel at a time, with arguments as its docstring names them; attention binds them once.

Tables and lengths are int32, and all tensors lie on the kernel's device. Tests and benchmarks take these.
"""

from __future__ import annotations

import torch
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.ring import Ring
from packed_kv.kernels import power_of_2
from packed_kv.kernels.triton.decode import DecodeLaunch, DecodeShape
from packed_kv.kernels.triton.gather import GatherLaunch, UnrotateLaunch
from packed_kv.kernels.triton.latent_decode import DecodeLatentsLaunch, MergeLatentsLaunch, latent_shape
from packed_kv.kernels.triton.latent_gather import GatherLatentsLaunch
from packed_kv.kernels.triton.latent_rows import GatherRowsLaunch
from packed_kv.kernels.triton.latent_store import StoreLatentsLaunch
from packed_kv.kernels.triton.launch import Launch, StepLaunch
from packed_kv.kernels.triton.means import Means, QueryBias
from packed_kv.kernels.triton.merge import MergeLaunch, merge_tile
from packed_kv.kernels.triton.ring import GatherRingLaunch
from packed_kv.kernels.triton.rotate import QueryRotation, RotateQueryLaunch
from packed_kv.kernels.triton.store import StoreLaunch
from packed_kv.layout import PageLayout


def run(launch: Launch, step: StepLaunch, *tensors: torch.Tensor) -> None:
    launch(step.grid, tensors, step.arguments)


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
    `means`, fill `bias` [tokens, query heads, 1 + blocks] for queries at `positions` int64 [tokens], or one column more
    for `decode` with `value_means`."""
    assert (bias is None) == (means is None)
    more = 0 if means is None or bias is None else bias.shape[2] - 1 - means.blocks
    assert more in (0, 1), more
    rotation = QueryRotation(matrix, scale, means, bool(more))
    step = RotateQueryLaunch.step(rotated, rotation, positions, bias)
    run(RotateQueryLaunch(query, rotated.shape[1], rotation), step.launch, query)


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
    launch = StoreLaunch(codec, cache, key, value, ring, only_ring=only_ring)
    if len(slots):
        run(launch, StoreLaunch.step(codec, cache.shape[1], slots, positions, ring_slots), key, value, key)


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
    ring: Ring | None = None,
    value_means: Means | None = None,
) -> None:
    """Attend over `cache` for requests of at most `max_query_len` query tokens: the split-KV parts, not merged.

    query: fp16 [tokens, KV heads, queries per KV head, head_dim] and query_bias, both of `rotate_query`.
    partial_output, partial_stats: fp32 [tokens, query heads, splits, head_dim] and [..., splits, 2]; filled.
    tiles_a_block: of `QueryBias`; sliding_window, logits_soft_cap: see `DecodeShape`.
    """
    _, kv_heads, group, head_dim = query.shape
    keeps_first = value_means is not None
    blocks = 0 if query_bias is None else query_bias.shape[2] - 1 - keeps_first
    bias = QueryBias(blocks, tiles_a_block, keeps_first)
    shape = DecodeShape(kv_heads, group, head_dim, sliding_window, logits_soft_cap, bias)
    tensors = query, block_table, query_start, seq_lens, partial_output, partial_stats, query_bias, ring
    launch = DecodeLaunch(page, shape, shape.tiles(max_query_len)[0], cache, ring)
    run(launch, DecodeLaunch.step(shape, max_query_len, *tensors))


def merge(
    partial_output: torch.Tensor,
    partial_stats: torch.Tensor,
    matrix: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    value_means: Means | None = None,
    query_bias: torch.Tensor | None = None,
) -> None:
    """Merge the parts of `decode` into `output` [tokens, KV heads, queries per KV head, value_dim], rotated back by
    `matrix`, with `value_means` added; fill `lse` fp32 [tokens, query heads] with the natural log-sum-exps, sinks
    included."""
    of_means = {}
    if value_means is not None:
        assert query_bias is not None
        of_means = dict(means=value_means, bias_columns=query_bias.shape[2])
    tile = merge_tile(partial_output.shape[2])
    launch = MergeLaunch(output, matrix, tile, sinks, has_lse=lse is not None, **of_means)
    bias = query_bias if of_means else None
    run(launch, MergeLaunch.step(partial_output, partial_stats, output.shape[2], lse, bias), output)


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
    run(GatherLaunch(page, cache, key.shape[1]), GatherLaunch.step(micro_blocks, rows, key, value))


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
    run(UnrotateLaunch(matrix, kv_heads, head_dim, means), UnrotateLaunch.step(vectors, dtype, positions))
    return vectors.view(dtype)


def gather_ring(ring: Ring, spans: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write the ring's tokens over those that `gather` read from the pages, still rotated.

    spans: int32 [n, 4]: request, row of its token 0 (maybe negative), tokens low .. end - 1.
    """
    run(GatherRingLaunch(ring, key.shape[2]), GatherRingLaunch.step(ring, spans, key, value))


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
    launch = StoreLatentsLaunch(codec, cache, latent, rope, ring, only_ring=only_ring)
    if len(slots):
        run(launch, StoreLatentsLaunch.step(codec, slots, ring_slots), latent, rope)


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
    step = DecodeLatentsLaunch.step(shape, max_query_len, block_table, query_start, seq_lens, partial, stats)
    run(DecodeLatentsLaunch(page, shape, cache, q_latent, q_rope), step, q_latent, q_rope)
    merge = MergeLatentsLaunch(output, constant, power_of_2(splits), has_lse=lse is not None)
    run(merge, MergeLatentsLaunch.step(partial, stats, lse), output)


def gather_latents(
    page: PageLayout,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    first_rows: torch.Tensor,
    longest: int,
    rows: torch.Tensor,
) -> None:
    """Dequantise some tokens of each request into `rows` [tokens, rank + rope_dim]; see `GatherLatentsLaunch.step`."""
    run(
        GatherLatentsLaunch(page, cache), GatherLatentsLaunch.step(rows, block_table, starts, first_rows, longest), rows
    )


def gather_rows(
    codec: LatentRowCodec,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Dequantise tokens into `rows` [tokens, rank + rope_dim], `tokens / len(requests)` neighbours of each request."""
    launch = GatherRowsLaunch(codec.rows, cache, len(positions) // len(requests))
    run(launch, GatherRowsLaunch.step(len(positions), block_table, requests), rows, positions)
