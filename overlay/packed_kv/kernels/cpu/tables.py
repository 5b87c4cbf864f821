"""Tables of a layer for `store.cpp`, `gather.cpp` and `vectors.cpp`: where codes lie, its rotation and calibration.

Positions are not derived here: indices are sent through the reference's own reshapes (`codecs/pages.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...codecs.codec import Codec
from ...codecs.latent import LatentCodec
from ...codecs.pages import PagedCodec, lanes_of, pack_codes, pack_scales
from ...codecs.ring import Ring, order_of_bytes
from ...formats import BYTE_CODE, CODES_PER_LANE, GROUP_SIZE, code_of
from ...layout import (
    LANES,
    MICRO_BLOCK,
    PAIR,
    ROPE,
    ROPE_SCALES,
    SIGN_HALF_SHIFT,
    SIGN_PARITY_SHIFT,
    SIGN_WORD_SHIFT,
    PageLayout,
    RingLayout,
    ring_layout,
)
from ..checks import check_int32, check_pages
from ..served import Latents, Pairs, cpp_lacks
from . import MOST_CHANNELS, MOST_ROPE, ROTATIONS, VECTOR_CHANNELS
from .build import SIMD, Program, load_library
from .compiler import Target
from .constants import codes_header

HEADERS = (
    *SIMD, "threads.h", "numbers.h", "tables.h", "simd_columns.h", "columns.h", "calibration.h", "quantize.h",
    "restore.h",
)  # fmt: skip

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of dtypes in `enum ElementType` of numbers.h."""
MOST_GROUPS = MOST_CHANNELS // GROUP_SIZE
MOST_SLOTS = 16
SIGN_VARIANTS = ("word 0", "word 1", "half word")
"""Signs that are not among the codes: of the first or second group of a sign word, or of a group by itself."""

Int, Float, Pointer = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
PerToken = ctypes.c_uint16 * MICRO_BLOCK


class Part(ctypes.Structure):
    """`struct Part` of tables.h."""

    _fields_ = (
        ("from_", Int),
        ("mask", Int),
        ("slots", Int),
        ("slot", ctypes.c_uint8 * GROUP_SIZE),
        ("shift", ctypes.c_uint8 * MICRO_BLOCK * GROUP_SIZE),
        ("bits", ctypes.c_uint32 * MICRO_BLOCK * MOST_SLOTS),
        ("joins_halves", Int),
        ("joins_pairs", Int),
        ("whole", ctypes.c_uint32 * MICRO_BLOCK * MOST_SLOTS),
    )


class Plane(ctypes.Structure):
    """`struct Plane` of tables.h."""

    _fields_ = (("part", ctypes.POINTER(Part)), ("is_half", Int), ("at", PerToken * MOST_SLOTS))


class Layer(ctypes.Structure):
    """`struct Layer` of tables.h. Keeps the tensors alive whose addresses it holds."""

    _fields_ = (
        ("roles", Int),
        ("channels", Int),
        ("groups", Int),
        ("sections", Int),
        ("section", Int * 2),
        ("rotation", Int),
        ("constants", Pointer),
        ("dim", Int * 2),
        ("bits", Int * MOST_GROUPS),
        ("gain", Float * MOST_GROUPS * 2),
        ("order", Pointer * 2),
        ("order_heads", Int * 2),
        ("table", Pointer * 2),
        ("table_heads", Int * 2),
        ("centres", Int * 2),
        ("scales", Int * 2),
        ("spectrum", Pointer * 2),
        ("blocks", Int * 2),
        ("block_tokens", Int * 2),
        ("micro_block_bytes", Int),
        ("scale_at", PerToken * MOST_GROUPS * 2),
        ("plane", Plane * 2 * MOST_GROUPS * 2),
        ("ring_codes", Int * 2),
        ("ring_scales", Int * 2),
        ("ring_byte", ctypes.c_uint8 * GROUP_SIZE * 2),
        ("rope", Int),
        ("rope_bits", Int),
        ("rope_at", PerToken * MOST_ROPE),
        ("rope_scale_at", PerToken * (MOST_ROPE // GROUP_SIZE)),
    )
    kept: list[torch.Tensor]


class Cache(ctypes.Structure):
    """`struct Cache` of tables.h."""

    _fields_ = (
        ("data", Pointer),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("block_size", Int),
        ("slot_bytes", Int),
    )

    @classmethod
    def of(cls, cache: torch.Tensor | None) -> Cache:
        """cache: uint8 [blocks, KV heads, block_size, bytes], the last two dimensions contiguous."""
        if cache is None:
            return cls()
        check_pages(cache, 1)
        return cls(cache.data_ptr(), *cache.stride()[:2], *cache.shape[2:])


def add_ring(call: Any, ring: Ring) -> None:
    """Set the fields of a decode's arguments that say where a ring is; over latents, there is no `ring_head_stride`."""
    cache = ring.cache
    check_int32(ring.block_table, ring.first)
    assert cache.stride(3) == 1, cache.stride()
    call.ring, call.ring_block_size, call.ring_window = cache.data_ptr(), cache.shape[2], ring.window
    call.ring_block_stride, call.ring_head_stride, call.ring_token_stride, _ = cache.stride()
    call.ring_table, call.ring_table_stride = ring.block_table.data_ptr(), ring.block_table.stride(0)
    call.ring_first = ring.first.data_ptr()


def layer_of(codec: PagedCodec) -> Layer:
    """Return the tables of a layer with this codec, on the CPU. Raises ValueError for a codec that is not served."""
    if reason := cpp_lacks(Pairs(codec.key.fmt, codec.key.head_dim, group=1)):
        raise ValueError(f"{codec.key.fmt.name}: the CPU's kernels do not serve {reason}")
    return _layer(codec.codecs, codec.layout, ring_layout(codec.key.stored_dim))


def latent_layer_of(codec: LatentCodec) -> Layer:
    """Return the tables of a layer of latents, on the CPU. Raises ValueError for a codec that is not served."""
    if reason := cpp_lacks(Latents(codec.fmt, codec.rank, codec.rope_dim, heads=1)):
        raise ValueError(f"{codec.fmt.name}: the CPU's kernels do not serve {reason}")
    layer = _layer((codec.latent,), codec.layout, ring_layout(codec.rank + codec.rope_dim, vectors=1))
    layer.gain[1][: len(codec.latent.group_bits)] = [code_of(bits).value_gain for bits in codec.latent.group_bits]
    layer.dim[1] = layer.rope = codec.rope_dim
    layer.rope_bits = codec.rope_bits
    _fill_rope(layer, codec)
    return layer


def _layer(codecs: Sequence[Codec], layout: PageLayout, ring: RingLayout) -> Layer:
    """Return the tables of vectors with these codecs: K's and V's, or that of latents."""
    key = codecs[0]
    layer = Layer(
        roles=len(codecs),
        channels=key.stored_dim,
        groups=len(key.group_bits),
        sections=len(key.sections),
        rotation=ROTATIONS.index(key.fmt.rotation),
        constants=key.rotation_constants.data_ptr(),
        micro_block_bytes=layout.micro_block_bytes,
    )
    layer.kept = [key.rotation_constants]
    layer.section[: len(key.sections)] = key.sections
    layer.bits[: len(key.group_bits)] = key.group_bits
    for role, part in enumerate(codecs):
        layer.dim[role] = part.head_dim
        layer.gain[role][: len(key.group_bits)] = [part.gain(bits) for bits in key.group_bits]
        layer.ring_codes[role], layer.ring_scales[role] = ring.codes[role], ring.scales[role]
        layer.ring_byte[role][:] = order_of_bytes(PAIR[role]).argsort().tolist()
        _fill_calibration(layer, part, role)
        _fill_pages(layer, layout, role)
    return layer


def _fill_calibration(layer: Layer, codec: Codec, role: int) -> None:
    transform = codec.transform
    if codec.order is not None:
        order = codec.order.to(torch.int32).contiguous()
        layer.kept.append(order)
        layer.order[role], layer.order_heads[role] = order.data_ptr(), order.numel() // codec.stored_dim
    if transform.changes:
        table = transform.table(codec.channels)
        layer.kept += [table, transform.spectrum]
        layer.table[role], layer.table_heads[role] = table.data_ptr(), len(table)
        layer.centres[role], layer.scales[role] = transform.centres, transform.scale is not None
        layer.spectrum[role], layer.blocks[role] = transform.spectrum.data_ptr(), transform.mean_blocks
        layer.block_tokens[role] = transform.block_tokens


def _fill_pages(layer: Layer, layout: PageLayout, role: int) -> None:
    """Fill in where the words and scales of K (0) or V (1) lie."""
    order, vector = PAIR[role], layout.vectors[role]
    bits_of = vector.group_bits
    scales_at = layout.plane(role, "scales").offset
    index = torch.arange(MICRO_BLOCK * len(bits_of)).view(MICRO_BLOCK, len(bits_of))
    byte_of = pack_scales(index, order).argsort().view(MICRO_BLOCK, len(bits_of)) + scales_at
    word = signed = 0
    addresses = _word_addresses(layout, role)
    for group, bits in enumerate(bits_of):
        code = code_of(bits)
        layer.scale_at[role][group][:] = byte_of[:, group].tolist()
        _fill_plane(layer.plane[role][group][0], _part(bits, order, "magnitude"), word, addresses)
        if code.has_sign_words:
            is_half = signed == 2 * vector.sign_words
            at = len(addresses) - 1 if is_half else vector.code_words + signed // 2
            plane = layer.plane[role][group][1]
            _fill_plane(plane, _part(bits, order, SIGN_VARIANTS[2 if is_half else signed % 2]), at, addresses)
            plane.is_half = is_half
            signed += 1
        else:
            _fill_plane(layer.plane[role][group][1], _part(bits, order, "sign"), word, addresses)
        word += code.code_words


def _fill_rope(layer: Layer, codec: LatentCodec) -> None:
    """Fill in where the codes and scales of RoPE channels lie."""
    channels, at = codec.rope_dim, codec.layout.plane(0, ROPE).offset
    index = torch.arange(MICRO_BLOCK * channels).view(1, MICRO_BLOCK, channels)
    if codec.rope_bits == BYTE_CODE.bits:
        low, high = (pack_codes(part, codec.rope_vector, "key")[0].long() for part in (index % 256, index // 256))
        place = (low + 256 * high).argsort().view(MICRO_BLOCK, channels) + at
        groups = channels // GROUP_SIZE
        numbers = torch.arange(MICRO_BLOCK * groups, dtype=torch.uint8).view(1, MICRO_BLOCK, groups)
        scales = pack_scales(numbers, "key")[0].long().argsort().view(MICRO_BLOCK, groups)
        for group in range(groups):
            layer.rope_scale_at[group][:] = (scales[:, group] + codec.layout.plane(0, ROPE_SCALES).offset).tolist()
    else:
        halves = pack_codes(index, codec.rope_vector, "key")[0].contiguous().view(torch.int16).long() & 0xFFFF
        place = 2 * halves.argsort().view(MICRO_BLOCK, channels) + at
    for channel in range(channels):
        layer.rope_at[channel][:] = place[:, channel].tolist()


def _word_addresses(layout: PageLayout, role: int) -> list[list[int]]:
    """Byte offsets in a micro-block of each word of a lane, [word][lane]; last those of the half word, if there is."""
    at, words = layout.plane(role, "words").offset, []
    for width in layout.vectors[role].chunks:
        words += [[at + 4 * (lane * width + i) for lane in range(LANES)] for i in range(width)]
        at += 4 * width * LANES
    if layout.vectors[role].half_words:
        half = layout.plane(role, "half words").offset
        words.append([half + 2 * lane for lane in range(LANES)])
    return words


@functools.cache
def _part(bits: int, order: str, what: str) -> tuple[Part, list[list[tuple[int, int]]]]:
    """A part, and of its slots the (word, lane) of each token; words count from the group's first one.

    what: "magnitude", "sign", or one of `SIGN_VARIANTS`.
    """
    code = code_of(bits)
    lane, number = _lane_and_code(order)
    if what == "magnitude":
        from_, mask, shifts = 0, (1 << (bits - 1)) - 1, code.magnitude_shift
    else:
        from_, mask = bits - 1, 1
        parity = [shift + SIGN_PARITY_SHIFT for shift in SIGN_WORD_SHIFT]
        all_shifts = dict(zip(SIGN_VARIANTS, (SIGN_WORD_SHIFT, parity, SIGN_HALF_SHIFT), strict=True))
        shifts = code.sign_shift if what == "sign" else all_shifts[what]
    words = code.code_words if what in ("magnitude", "sign") else 1
    part = Part(from_=from_, mask=mask)
    slots: dict[tuple[tuple[int, int], ...], int] = {}
    for channel in range(GROUP_SIZE):
        codes = [number[token][channel] for token in range(MICRO_BLOCK)]
        where = tuple((e * words // CODES_PER_LANE, lane[token][channel]) for token, e in enumerate(codes))
        slot = slots.setdefault(where, len(slots))
        part.slot[channel] = slot
        part.shift[channel][:] = [shifts[e] for e in codes]
        for token, e in enumerate(codes):
            part.bits[slot][token] |= mask << shifts[e]
    part.slots = len(slots)
    tokens = range(MICRO_BLOCK)
    halves, pairs = (all(at[n] == at[n ^ bit] for at in slots for n in tokens) for bit in (8, 1))
    part.joins_halves, part.joins_pairs = halves, pairs
    for slot in range(len(slots)):
        for token in tokens:
            first = token & ~(8 * halves | 1 * pairs)
            part.whole[slot][first] |= part.bits[slot][token]
    return part, [list(where) for where in slots]


def _fill_plane(
    plane: Plane, part: tuple[Part, list[list[tuple[int, int]]]], first_word: int, addresses: list[list[int]]
) -> None:
    plane.part = ctypes.pointer(part[0])
    for slot, where in enumerate(part[1]):
        plane.at[slot][:] = [addresses[first_word + word][lane] for word, lane in where]


@functools.cache
def _lane_and_code(order: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return for each token and channel of a group the lane that has its code, and which code of the lane it is."""
    index = torch.arange(MICRO_BLOCK * GROUP_SIZE).view(1, MICRO_BLOCK, GROUP_SIZE)
    place = lanes_of(index, 1, order).flatten().argsort().view(MICRO_BLOCK, GROUP_SIZE)
    return (place // CODES_PER_LANE).tolist(), (place % CODES_PER_LANE).tolist()


def load_library_of_tables(
    name: str, call: type[ctypes.Structure], target: Target | None = None, channels: int = VECTOR_CHANNELS
) -> ctypes.CDLL:
    """Return the library of the source `name`.cpp, whose calls take a `call`, for vectors of up to `channels`. Raises
    BuildError."""
    flags = ("-ffp-contract=off", f"-DVECTOR_CHANNELS={channels}")
    library = load_library(Program(f"{name}.cpp", HEADERS, flags), codes_header(), target)
    size_of = getattr(library, f"pk_{name}_bytes")
    size_of.restype = ctypes.c_long
    assert size_of() == ctypes.sizeof(Layer) + ctypes.sizeof(call), "the structures here are not those of tables.h"
    return library
