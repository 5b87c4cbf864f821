"""Store kernel of latent attention: quantise and pack the latents of new tokens, and write RoPE channels as fp16 or at
8 bits; both at 8 bits into the ring.

The bytes equal those of `LatentCodec.write` and `write_ring`; `store.py` has the arithmetic and its rounding rule.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...codecs.latent import LatentCodec
from ...codecs.latent_rows import LatentRowCodec
from ...formats import INPUT_LIMIT
from .. import power_of_2
from ..checks import check_ring, check_slots, check_stored_pages
from ..kernel_layout import KernelLayout, kernel_layout, latent_row_layout, rope_layout
from .launch import Arguments, Launch, StepLaunch
from .pages import KEY
from .quantize import Transform
from .records import blocks
from .ring import inverse_step_size, ring_code, ring_scale, ring_step_size
from .store_section import StoreConstants, StoreLayer, Vectors, padded_groups, rows_of, store_section
from .words import word_index

_INPUT_LIMIT = tl.constexpr(INPUT_LIMIT)
ROPE_CHANNELS = 256
"""RoPE channels that a program writes."""
_ROPE_CHANNELS = tl.constexpr(ROPE_CHANNELS)
SPLIT_TOKENS = 256
"""Most tokens of a launch in which two programs share a vector: up to this number an SM has at most 4 of their
warps."""


class StoreLatentsLaunch(Launch):
    """Stores a layer's latents and RoPE channels in the pages of `cache` and, if given, in the `ring`, in one launch,
    with no host sync: `LatentCodec.write` or `LatentRowCodec.write`, and `write_ring`. `only_ring`: leave the pages
    alone.

    Called with latents and RoPE channels of the dtypes and strides of `latent` and `rope`; rows beyond the slots are
    padding.
    """

    def __init__(
        self,
        codec: LatentCodec,
        cache: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        ring: torch.Tensor | None = None,
        *,
        only_ring: bool = False,
    ) -> None:
        check_stored_pages(cache, codec.slot_bytes)
        assert latent.shape[1] == codec.rank and rope.shape[1] == codec.rope_dim, (latent.shape, rope.shape)
        assert latent.stride(1) == rope.stride(1) == 1, (latent.stride(), rope.stride())
        assert ring is not None or not only_ring
        if ring is not None:
            check_ring(ring, 1, codec.ring_slot_bytes, 8)
        of_ring = cache if ring is None else ring
        transform, table, latents = codec.latent.transform, codec.transform_table, codec.latent
        vectors = Vectors(latent.stride(0), 0, latents.channels, 0, latents.channels if table is None else table, 0)
        layer = StoreLayer(
            blocks(cache), vectors, vectors, latents.rotation_constants, transform.spectrum, blocks(of_ring)
        )  # fmt: skip
        layout = kernel_layout(codec.layout)
        row = latent_row_layout(codec.rows) if isinstance(codec, LatentRowCodec) else None
        store = StoreConstants(
            1,
            (0 if only_ring else cache.shape[1], 0 if ring is None else ring.shape[2]),
            Transform(codec.fmt.rotation, latents.order is not None, table is not None, False, 1, 0),
            (codec.rank, codec.rank),
            layout,
            rows_of(layout),
            row,
            parts_of(layout),
        )
        super().__init__(
            store_latents_kernel, Arguments(layer, rope.stride(0)),
            dict(STORE=store, ROPE=rope_layout(codec.layout) if row is None else row.rope),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    @staticmethod
    def step(codec: LatentCodec, slots: torch.Tensor, ring_slots: torch.Tensor | None = None) -> StepLaunch:
        """`ring_slots`: slots in the ring of the first tokens."""
        tokens, layout = len(slots), kernel_layout(codec.layout)
        if ring_slots is None:
            ring_slots = slots[:0]
        check_slots(slots, ring_slots)
        split = split_of(layout, tokens)
        groups = [power_of_2(section.groups) for section in layout.key_vector.sections]
        programs = sum(-(-tokens // (rows_of(layout) // count)) for count in groups) * split
        grid = programs + -(-tokens * codec.rope_dim // ROPE_CHANNELS), 1, 1
        return StepLaunch(grid, Arguments(slots, ring_slots, tokens, len(ring_slots), split))


def parts_of(layout: KernelLayout) -> int:
    """Parts of a program's rows, one for every 8 rows; up to this many programs can share the rows."""
    return rows_of(layout) // 8


def split_of(layout: KernelLayout, tokens: int) -> int:
    """Programs that share the same rows: the most possible where tokens are so few that warps of the card idle."""
    return parts_of(layout) if tokens <= SPLIT_TOKENS else 1


@triton.jit(
    do_not_specialize=["tokens", "ring_tokens", "split"], do_not_specialize_on_alignment=["slots_ptr", "ring_slots_ptr"]
)
def store_latents_kernel(
    latent_ptr, rope_ptr, slots_ptr, ring_slots_ptr, tokens, ring_tokens, split, layer, rope_token_stride,
    STORE: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Store new tokens.

    Grid: programs of each section of the latents in turn, then those of RoPE.

    Args:
        latent_ptr, rope_ptr: fp16, bf16 or fp32 [tokens, rank] and [tokens, RoPE channels]; the strides over tokens are
            `StoreLayer.key`'s and `rope_token_stride` (int32).
        slots_ptr: int32 or int64 [tokens], -1: not stored; tokens: int32.
        ring_slots_ptr: int32 [ring_tokens], likewise; ring_tokens: int32.
        split: int32, programs that share rows of latents, 1 or `StoreConstants.parts`; see `store_section`.
        layer: `StoreLayer`. STORE: `StoreConstants`.
        ROPE: `RopeLayout`; for pages with latent rows, the layout in a row.
    """
    LAYOUT: tl.constexpr = STORE.layout
    ROWS: tl.constexpr = STORE.rows
    ROW: tl.constexpr = STORE.latent_rows
    RANK: tl.constexpr = STORE.dims[KEY]
    BLOCK_SIZE: tl.constexpr = STORE.block_sizes[0]
    RING_BLOCK: tl.constexpr = STORE.block_sizes[1]
    ROPE_CHANNELS: tl.constexpr = _ROPE_CHANNELS
    source = (
        latent_ptr, layer.key.token_stride, layer.key.head_stride, layer.key.channels, layer.key.channels_stride,
        layer.key.table, layer.key.table_stride,
    )  # fmt: skip
    program = tl.program_id(0)
    for s in tl.static_range(len(LAYOUT.key_vector.sections)):
        programs = tl.cdiv(tokens, ROWS // padded_groups(LAYOUT.key_vector.sections[s].groups)) * split
        if (program >= 0) & (program < programs):
            store_section(
                source, slots_ptr, tokens, slots_ptr, ring_slots_ptr, ring_tokens, layer, True, (program, split), s,
                True, STORE,
            )  # fmt: skip
        program -= programs
    if program >= 0:
        index = program.to(tl.int64) * ROPE_CHANNELS + tl.arange(0, ROPE_CHANNELS)
        token, channel = index // ROPE.channels, (index % ROPE.channels).to(tl.int32)
        x = tl.load(rope_ptr + token * rope_token_stride + channel, mask=token < tokens, other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        x = tl.minimum(tl.maximum(x, -_INPUT_LIMIT), _INPUT_LIMIT).to(tl.float16)
        group, is_first = channel // 32, channel % 32 == 0
        if RING_BLOCK > 0 or ROPE.scales_at > 0:
            top = tl.max(tl.reshape(tl.abs(x.to(tl.float32)), [ROPE_CHANNELS // 32, 32]), 1)
            top = tl.reshape(tl.broadcast_to(top[:, None], [ROPE_CHANNELS // 32, 32]), [ROPE_CHANNELS])
            scale = ring_scale(top)
            value = ring_code(x.to(tl.float32), inverse_step_size(ring_step_size(scale))).to(tl.uint8)
        if BLOCK_SIZE > 0:
            slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
            stored = slot >= 0
            slot = tl.where(stored, slot, 0)
            page, inside = layer.cache.pointer + slot // BLOCK_SIZE * layer.cache.block_stride, slot % BLOCK_SIZE
            code = channel % 32 // 8 * 2 + channel % 2
            LANES: tl.constexpr = 32 if ROW is None else 4
            if ROW is None:
                n = (inside % 16).to(tl.int32)
                place, number = page + inside // 16 * LAYOUT.micro_block_bytes, group
                lane, code = n % 8 * 4 + channel // 2 % 4, n // 8 * 8 + code
                scale_at = (n % 8 * (ROPE.channels // 32) + group) * 2 + n // 8
            else:
                place, number = page + inside * ROW.row_bytes, group // 2
                lane, code, scale_at = channel // 2 % 4, group % 2 * 8 + code, group
            if ROPE.scales_at == 0:
                word = word_index(number * 8 + code // 2, lane, ROPE.words, LANES)
                target = place + ROPE.at + 4 * word + code % 2 * 2
                tl.store(target.to(tl.pointer_type(tl.float16)), x, mask=stored)
            else:
                word = word_index(number * 4 + code // 4, lane, ROPE.words, LANES)
                tl.store(place + ROPE.at + 4 * word + code % 4, value, mask=stored)
                tl.store(place + ROPE.scales_at + scale_at, scale.to(tl.uint8), mask=stored & is_first)
        if RING_BLOCK > 0:
            RING: tl.constexpr = LAYOUT.ring
            slot = tl.load(ring_slots_ptr + token, mask=token < ring_tokens, other=-1).to(tl.int64)
            stored = slot >= 0
            slot = tl.where(stored, slot, 0)
            target = layer.ring.pointer + slot // RING_BLOCK * layer.ring.block_stride
            target += slot % RING_BLOCK * RING.slot_bytes
            inner = channel // 2 % 4 * 8 + channel % 32 // 8 * 2 + channel % 2  # byte d2 d1 d4 d3 d0
            tl.store(target + RING.codes[KEY] + RANK + group * 32 + inner, value, mask=stored)
            tl.store(target + RING.scales[KEY] + RANK // 32 + group, scale.to(tl.uint8), mask=stored & is_first)
