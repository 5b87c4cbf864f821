"""The constants that kernels of both languages take from a page's layout, derived once.

Triton's kernels get a `KernelLayout` as one constexpr argument, those in CUDA C++ as generated defines. In Triton, a
constexpr NamedTuple has its fields and no properties, and in 3.6 a field is a plain number: before calculating with two
of them, name one as a `tl.constexpr`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..formats import GROUP_SIZE, Code, code_of
from ..layout import ROPE, ROPE_SCALES, ROW_TOKENS, PageLayout, RingLayout, RowLayout, ring_layout
from .bins import Bins, make_bins
from .units import score_unit


class Group(NamedTuple):
    """Position of a lane's codes of one 32-channel group of K or V, and the factor of their values.

    `word`: index of the group's first code word among the lane's words. `sign_word`: index of the word with its signs,
    0 if the code has none; a half word is read as a sign word of parity 0 behind all words, so its index is
    `PackedVector.words`. `parity`: 0 or 1, the group's number in its sign word. `factor`: decoded codes times this and
    their scale are values: 1 / unit, and for V times `Code.value_gain`.
    """

    code: Code
    word: int
    sign_word: int
    parity: int
    factor: float


class Section(NamedTuple):
    """Groups of one width that are rotated together.

    `first_group`: index of the first; `groups`: their number; `code`: their common code; `word`: index of the first
    group's first code word; `signed_groups`: groups with sign words in earlier sections; `bins`: bins of the code's
    levels.
    """

    first_group: int
    groups: int
    code: Code
    word: int
    signed_groups: int
    bins: Bins


class PackedVector(NamedTuple):
    """K or V in a micro-block.

    `words`: 32-bit words of a lane, code words first, then `sign_words` sign words. `chunks`: widths of the words'
    chunks. `has_half`: a half word follows them. `words_at`, `half_words_at`, `scales_at`: in bytes from the start of
    the micro-block.
    """

    groups: tuple[Group, ...]
    sections: tuple[Section, ...]
    words: int
    sign_words: int
    chunks: tuple[int, ...]
    has_half: bool
    words_at: int
    half_words_at: int
    scales_at: int


class KernelLayout(NamedTuple):
    """Everything about the bytes of a page and of a ring slot that a kernel may ask.

    `head_dim`: channels that are stored, 32 a group. `key_vector`, `value_vector`: K and V; a latent is both (Triton's
    objects have a `value` or `values` of their own). `micro_block_bytes`:
    bytes of 16 tokens of one head. `score_unit`: the unit of scores, which are sums over all groups of K. `ring`: byte
    offsets in a slot of the ring buffer, where RoPE channels count as channels of the latent.
    """

    head_dim: int
    key_vector: PackedVector
    value_vector: PackedVector
    micro_block_bytes: int
    score_unit: float
    ring: RingLayout


class RopeLayout(NamedTuple):
    """RoPE channels beside the latents of a page: their number, the offset of their plane in a micro-block, its words
    per lane, and the offset of their scales (0: they are fp16)."""

    channels: int
    at: int
    words: int
    scales_at: int


def rope_layout(page: PageLayout) -> RopeLayout:
    """The RoPE part of a page of latents."""
    planes = {plane.content: plane for plane in page.planes}
    scales_at = planes[ROPE_SCALES].offset if ROPE_SCALES in planes else 0
    return RopeLayout(page.rope_dim, planes[ROPE].offset, planes[ROPE].elements, scales_at)


class LatentRowLayout(NamedTuple):
    """Latent rows. `half`: layout of a micro-block of half as many groups; in a row two neighbouring groups take the
    places of its two tokens (layout.py). `scales_at` and `rope`: in bytes from the start of a row; `row_bytes`: bytes
    of a row."""

    half: KernelLayout
    scales_at: int
    rope: RopeLayout
    row_bytes: int


def latent_row_layout(rows: RowLayout) -> LatentRowLayout:
    """Return the kernels' constants for rows of this layout."""
    half = rope_layout(rows.page)
    rope = RopeLayout(2 * half.channels, rows.offset(ROPE), half.words, half.scales_at // ROW_TOKENS)
    return LatentRowLayout(kernel_layout(rows.page), rows.offset("scales"), rope, rows.row_bytes)


@functools.cache
def kernel_layout(page: PageLayout) -> KernelLayout:
    """Return the kernels' constants for pages of this layout."""
    channels = GROUP_SIZE * len(page.vectors[0].group_bits)
    return KernelLayout(
        head_dim=channels,
        key_vector=_packed_vector(page, 0, is_key=True),
        value_vector=_packed_vector(page, len(page.vectors) - 1, is_key=False),
        micro_block_bytes=page.micro_block_bytes,
        score_unit=score_unit(page.vectors[0].group_bits),
        ring=ring_layout(channels + page.rope_dim, len(page.vectors)),
    )


def _packed_vector(page: PageLayout, index: int, *, is_key: bool) -> PackedVector:
    """The vector of this index as K or as V."""
    vector = page.vectors[index]
    groups: list[Group] = []
    sections: list[Section] = []
    word = signed = 0
    for bits, count in vector.sections:
        code = code_of(bits)
        sections.append(Section(len(groups), count, code, word, signed, make_bins(code.magnitudes)))
        factor = (1 if is_key else code.value_gain) / code.unit
        for _ in range(count):
            sign_word = vector.code_words + signed // 2 if code.has_sign_words else 0
            groups.append(Group(code, word, sign_word, signed % 2 if code.has_sign_words else 0, factor))
            word += code.code_words
            signed += code.has_sign_words
    return PackedVector(
        groups=tuple(groups),
        sections=tuple(sections),
        words=vector.code_words + vector.sign_words,
        sign_words=vector.sign_words,
        chunks=vector.chunks,
        has_half=bool(vector.half_words),
        words_at=page.plane(index, "words").offset,
        half_words_at=page.plane(index, "half words").offset,
        scales_at=page.plane(index, "scales").offset,
    )
