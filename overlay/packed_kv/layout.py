"""Layout of a page: where a token's codes and scales are. Imports no torch.

vLLM sees a page as an opaque `[KV heads, block_size, slot_bytes]` of bytes, head-major, so the tokens of one head
are one run of bytes. That run is cut into micro-blocks of `MICRO_BLOCK` = 16 tokens:

    page of a block:   | head 0 ........................ | head 1 ... |
    head's run:        | tokens 0-15 | tokens 16-31 | ...             block_size / 16 micro-blocks
    micro-block:       | K codes | V codes | K scales | V scales |    16 * slot_bytes bytes

Codes are stored in the order in which tensor-core fragments (`mma.m16n8k16`) want them: a warp's 32 lanes each load
whole 32-bit words, and a lane feeds the words that it loads to the tensor core, with no exchange through shared memory.
A lane holds 16 codes of every 32-channel group. With the bits of a token's index in the micro-block called n3..n0 and
those of a channel's index in its group d4..d0:

                 lane = g * 4 + t              code e of the lane, 0..15 (bits high to low)
    K            g = n2 n1 n0,  t = d2 d1      n3 d4 d3 d0
    V            g = d2 d1 d0,  t = n2 n1      d4 d3 n3 n0

so codes e and e + 1 (e even) are a fragment's fp16 pair: neighbours along the dimension that the product sums over.
A lane's 16 codes of a group, as `sign` (top bit of the code) and `magnitude` (the rest), lie in words so that few
instructions turn them into fp16 pairs (docs/kernels.md). With e = e3 e2 e1 e0 and m = 4 e2 + 2 e0 + e1:

    5 bits   2 words; word e >> 3:  magnitude at bits 4m .. 4m+3 (m of e & 7); signs as with 3 bits, so four magnitudes
             are the upper halves of four bytes
    4 bits   2 words; word e >> 3, k = e & 7:  magnitude at bits 4k .. 4k+2;  sign at bit 8(k & 3) + 7 (k < 4)
             or 8(k & 3) + 3 (k >= 4): four magnitudes are four bytes by one `prmt`, signs their top bits by a shift
    3 bits   1 word:  magnitude at bits 4m + 2 e3 and the next
             signs of two groups, of 5 or 3 bits, share 1 word:  group parity p, bit 4m + 3 - 2p - e3
             signs of an odd last group are a half word:  bit 4(m & 3) + 3 - 2 e2 - e3
             so a code is a nibble by a shift and a mask, and 4 nibbles are an fp16 pair by one `prmt`
    2 bits   1 word:  sign at bit 16 e0 + 15 - e1 - 2 e2 - 8 e3,  magnitude 4 bits below it: a shift to the left
             and a mask make them sign and exponent of a pair

A lane's words are: the code words of all groups in order, then the sign words. They are stored in chunks of 4, then
2, then 1 words (the widest loads there are), each chunk as [32 lanes][words of the chunk]; last the half words,
[32 lanes] of 16 bits. All little-endian.

Scales lie in the order in which the lanes need them: a lane's K codes belong to 2 tokens (n3), so the scales of a row g
are together; its V codes belong to 4 tokens (n3, n0), so the scales of a row t are together, a 32-bit word per group:

    K scales     [g = n2 n1 n0][group][n3]
    V scales     [t = n2 n1][group][n3][n0]

A page of latent attention (MLA) has one vector per token, the latent, which is K and V at once, and the key's RoPE
channels beside it, as fp16. Its tokens are the run of bytes of a single head, and both lie in K's order; a lane holds
16 RoPE channels of a group as 8 words, code e in half e & 1 of word e >> 1, in chunks of 4:

    micro-block:       | latent codes | latent scales | RoPE channels |   16 * latent_bytes bytes

Or RoPE channels have 8 bits, as in the ring: 4 words a group, code e in byte e & 3 of word e >> 2, and scales in K's
order:

    micro-block:       | latent codes | latent scales | RoPE codes | RoPE scales |

Layers of sparse attention read single tokens, so their pages have latent rows, each token's bytes in one run. Two
neighbouring groups stand where a micro-block has two tokens: a row of 2 n groups has the form of one row g of a
micro-block of n groups, lanes t = d2 d1, with bit 0 of a group's number in the place of n3 (and so bit 1 as the parity
of sign words). At 4 bits the words of a row are the same as a token's in a micro-block; at 3 and 2 bits a word has two
groups of one token instead of one group of two tokens. Chunks lie as [4 lanes][words of the chunk], scales in order:

    latent row:        | latent codes | latent scales | RoPE channels [| RoPE scales] | padding to 16 bytes |

Padding is neither written nor read. Groups of 2 bits come in pairs, of 3 bits in fours.

Beside the pages there is the ring of a request's recent tokens (`codecs/ring.py`). It has a byte per channel, and a
token of a head in one run of bytes, because rings begin and end anywhere. A slot is padded to a multiple of 8 bytes:

    ring slot:         | K codes | V codes | K scales | V scales | padding |
    of latents:        | latent codes | RoPE codes | latent scales | RoPE scales | padding |

Codes are code + 128; the byte of channel d4..d0 of a group is, again so that a lane's bytes are neighbours in the
order in which it feeds them to the tensor core, number  d2 d1 d4 d3 d0  for K and  d2 d1 d0 d4 d3  for V. A latent and
its RoPE channels are one vector there, in K's order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .formats import (
    BYTE_CODE,
    CODES,
    CODES_PER_LANE,
    GROUP_SIZE,
    NIBBLES,
    ROPE_BITS,
    Format,
    code_of,
    runs,
    stored_dim,
)

MICRO_BLOCK = 16
"""Tokens of one micro-block."""
LANES = 32
PAIR = ("key", "value")
"""Orders of the vectors of a page: K, then V."""
ROPE = "RoPE"
"""Name of the plane of RoPE channels in a page of latent attention."""
ROPE_SCALES = "RoPE scales"
"""Name of the plane of the RoPE channels' scales, where RoPE has 8 bits."""

SIGN_WORD_SHIFT = tuple(4 * NIBBLES[e] + 3 - (e >> 3) for e in range(CODES_PER_LANE))
"""Bit position of code e's sign in a sign word, for the first of the two groups that share it."""
SIGN_PARITY_SHIFT = -2
"""Distance of the second group's bit positions from the first group's."""
SIGN_HALF_SHIFT = tuple(4 * (NIBBLES[e] & 3) + 3 - 2 * (e >> 2 & 1) - (e >> 3) for e in range(CODES_PER_LANE))
"""Bit position of code e's sign in the half word of an odd last group with sign words."""


@dataclass(frozen=True)
class VectorLayout:
    """Words of a lane for one vector of 16 tokens, from the bits of each of the vector's groups.

    `is_cut`: each group is a section; else each run of groups of equal bits is a section.
    """

    group_bits: tuple[int, ...]
    is_cut: bool = False

    @property
    def sections(self) -> list[tuple[int, int]]:
        """(bits, number of groups) of the sections, whose channels are rotated together, in order."""
        return [(bits, 1) for bits in self.group_bits] if self.is_cut else runs(self.group_bits)

    @property
    def code_words(self) -> int:
        """Code words of a lane."""
        return sum(code_of(bits).code_words for bits in self.group_bits)

    @property
    def signed_groups(self) -> int:
        """Groups whose signs lie in sign words."""
        return sum(code_of(bits).has_sign_words for bits in self.group_bits)

    @property
    def sign_words(self) -> int:
        """Sign words of a lane."""
        return self.signed_groups // 2

    @property
    def half_words(self) -> int:
        """16-bit sign words of a lane: 0 or 1."""
        return self.signed_groups % 2

    @property
    def chunks(self) -> tuple[int, ...]:
        """Widths of the chunks that hold a lane's words: 4s, then 2, then 1."""
        words = self.code_words + self.sign_words
        return (4,) * (words // 4) + (2,) * (words % 4 // 2) + (1,) * (words % 2)


class Plane(NamedTuple):
    """A run of bytes of a micro-block that holds one kind of content of one of its vectors.

    `content`: "words" (code words, then sign words), "half words", "scales", `ROPE` (words) or `ROPE_SCALES`;
    `vector`: index of the page's vector;
    `order`: in which order of the drawing, "key" or "value"; `width`: bits of an element; `elements`: of a
    lane (of words and half words) or of a token (of scales); `offset`: in bytes from the start of the micro-block.
    """

    content: str
    vector: int
    order: str
    width: int
    elements: int
    offset: int

    @property
    def bytes(self) -> int:
        per = MICRO_BLOCK if self.content in ("scales", ROPE_SCALES) else LANES
        return per * self.elements * self.width // 8


@dataclass(frozen=True)
class PageLayout:
    """The planes of a micro-block. `vectors`: how K and V of a pair, or a latent, are packed; `rope`: how RoPE channels
    beside a latent are packed, None: there are none."""

    vectors: tuple[VectorLayout, ...]
    planes: tuple[Plane, ...]
    rope: VectorLayout | None = None

    @property
    def orders(self) -> tuple[str, ...]:
        """The order, "key" or "value", of each vector of the page."""
        return tuple(plane.order for plane in self.planes if plane.content == "words")

    @property
    def rope_dim(self) -> int:
        """RoPE channels beside a latent vector."""
        return 0 if self.rope is None else GROUP_SIZE * len(self.rope.group_bits)

    @property
    def micro_block_bytes(self) -> int:
        return sum(plane.bytes for plane in self.planes)

    def plane(self, vector: int, content: str) -> Plane:
        """The plane with this content ("words", "half words" or "scales") of the vector of this index."""
        return next(plane for plane in self.planes if (plane.vector, plane.content) == (vector, content))


def page_layout(
    fmt: Format, head_dim: int, orders: tuple[str, ...] = PAIR, key_bits: tuple[int, ...] | None = None
) -> PageLayout:
    """Layout of the pages of `fmt` at `head_dim`, with one vector per token in each order, "key" and "value".

    key_bits: of each group of K, from a calibration file; None: the format's.

    Raises ValueError if head_dim is not a multiple of 16, and as `key_vector`.
    """
    vectors = [VectorLayout(fmt.group_bits(head_dim))] * len(orders)
    if key_bits is not None:
        vectors[orders.index("key")] = key_vector(fmt, head_dim, key_bits)
    return pages_of(tuple(vectors), orders)


def key_vector(fmt: Format, head_dim: int, key_bits: tuple[int, ...]) -> VectorLayout:
    """Layout of vectors of K whose groups have these bits, descending.

    Raises ValueError if a lane would have other words than in the format, so that pages would have another size.
    """
    today, vector = VectorLayout(fmt.group_bits(head_dim)), VectorLayout(key_bits, is_cut=True)
    unknown = set(key_bits) - set(CODES)
    if (
        unknown
        or list(key_bits) != sorted(key_bits, reverse=True)
        or (len(key_bits), vector.chunks, vector.half_words) != (len(today.group_bits), today.chunks, today.half_words)
    ):
        raise ValueError(
            f"{fmt.name} cannot store heads of {head_dim} channels with K's groups of {key_bits} bits: they need "
            f"{len(today.group_bits)} groups of {min(CODES)} to {max(CODES)} bits, descending, and as many bytes as "
            f"{today.group_bits}"
        )
    return vector


def pages_of(vectors: tuple[VectorLayout, ...], orders: tuple[str, ...] = PAIR) -> PageLayout:
    """Layout of pages that have these vectors per token, each in the order "key" or "value"."""
    planes: list[Plane] = []
    for contents in (("words", "half words"), ("scales",)):
        for i, (vector, order) in enumerate(zip(vectors, orders, strict=True)):
            sizes = {
                "words": (32, vector.code_words + vector.sign_words),
                "half words": (16, vector.half_words),
                "scales": (8, len(vector.group_bits)),
            }
            for content in contents:
                end = planes[-1].offset + planes[-1].bytes if planes else 0
                planes.append(Plane(content, i, order, *sizes[content], end))
    return PageLayout(vectors, tuple(planes))


def latent_layout(fmt: Format, rank: int, rope_dim: int, rope_bits: int = ROPE_BITS[0]) -> PageLayout:
    """Layout of the pages of `fmt` for latent vectors of `rank` channels with `rope_dim` channels of RoPE, which have
    `rope_bits` bits, one of `ROPE_BITS`.

    Raises ValueError if a number of channels is no positive multiple of 32, and for other bits.
    """
    for what, channels in (("the rank of latent vectors", rank), ("RoPE channels", rope_dim)):
        if channels <= 0 or channels % GROUP_SIZE:
            raise ValueError(f"{what} must be a positive multiple of {GROUP_SIZE}, got {channels}")
    if rope_bits not in ROPE_BITS:
        raise ValueError(f"RoPE channels have {' or '.join(map(str, ROPE_BITS))} bits, got {rope_bits}")
    page, rope = page_layout(fmt, rank, ("key",)), VectorLayout((rope_bits,) * (rope_dim // GROUP_SIZE))
    planes = [*page.planes, Plane(ROPE, 0, "key", 32, rope.code_words, page.micro_block_bytes)]
    if rope_bits == BYTE_CODE.bits:
        end = planes[-1].offset + planes[-1].bytes
        planes.append(Plane(ROPE_SCALES, 0, "key", 8, len(rope.group_bits), end))
    return PageLayout(page.vectors, tuple(planes), rope)


ROW_ALIGNMENT = 16
"""Bytes; latent rows begin at multiples of this number."""
ROW_TOKENS = MICRO_BLOCK // 2
"""Tokens whose rows fill a micro-block with half as many groups."""
ROW_LANES = LANES // ROW_TOKENS
"""Lanes that hold a token's words."""


@dataclass(frozen=True)
class RowLayout:
    """Layout of latent rows. `page`: layout of the micro-block with half as many groups; latent rows have the form of
    its rows g."""

    page: PageLayout

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return -(-self.page.micro_block_bytes // (ROW_TOKENS * ROW_ALIGNMENT)) * ROW_ALIGNMENT

    def offset(self, content: str) -> int:
        """Bytes of a row before the content of this name; see `Plane`."""
        return self.page.plane(0, content).offset // ROW_TOKENS


def row_layout(fmt: Format, rank: int, rope_dim: int, rope_bits: int = ROPE_BITS[0]) -> RowLayout:
    """Layout of the rows of `fmt` for latent vectors of `rank` channels with `rope_dim` channels of RoPE.

    Raises ValueError for sizes that `latent_layout` refuses, and where groups of a width do not fill words.
    """
    page = latent_layout(fmt, rank, rope_dim, rope_bits)
    assert page.rope is not None
    halves = []
    for what, group_bits in (("latents", page.vectors[0].group_bits), ("RoPE", page.rope.group_bits)):
        half = VectorLayout(group_bits[::2])
        if half.group_bits != group_bits[1::2] or half.half_words:
            raise ValueError(f"rows need whole words: groups of {what} in pairs, of 3 bits in fours, got {group_bits}")
        halves.append(half)
    vector, rope = halves
    planes: list[Plane] = []
    for plane in page.planes:
        elements = plane.elements // 2 if plane.content in ("scales", ROPE_SCALES) else {
            "words": vector.code_words + vector.sign_words, "half words": 0, ROPE: rope.code_words
        }[plane.content]  # fmt: skip
        end = planes[-1].offset + planes[-1].bytes if planes else 0
        planes.append(plane._replace(elements=elements, offset=end))
    return RowLayout(PageLayout((vector,), tuple(planes), rope))


def latent_slot_bytes(fmt: Format, rank: int, rope_dim: int, rope_bits: int = ROPE_BITS[0], *, rows: bool) -> int:
    """Bytes of a token in pages of latents: in micro-blocks, or in `rows`, which are padded."""
    alignment = ROW_ALIGNMENT if rows else 1
    return -(-fmt.latent_bytes(rank, rope_dim, rope_bits) // alignment) * alignment


class RingLayout(NamedTuple):
    """Byte offsets of each vector's codes and scales in a ring slot, and the slot's bytes."""

    codes: tuple[int, ...]
    scales: tuple[int, ...]
    slot_bytes: int


def ring_layout(head_dim: int, vectors: int = len(PAIR)) -> RingLayout:
    """Layout of the slot of one token and head, for heads of `head_dim` channels."""
    channels = stored_dim(head_dim)
    groups = channels // GROUP_SIZE
    codes = tuple(i * channels for i in range(vectors))
    scales = tuple(vectors * channels + i * groups for i in range(vectors))
    return RingLayout(codes, scales, -(-vectors * (channels + groups) // 8) * 8)


def ring_slot_bytes(head_dim: int, vectors: int = len(PAIR)) -> int:
    """Bytes of one token and head in the ring: K and V or, with one vector, a latent and its RoPE channels."""
    return ring_layout(head_dim, vectors).slot_bytes


RECENT_TOKENS = 64
"""Tokens of the recent window by default; docs/lab/quality.md has the figures by window."""
MEAN_BLOCK = 512
"""Positions that share a mean of K (`codecs/rope.py`); a multiple of 32. Another number is another format."""
RING_BLOCK_SIZES = (16, 8, 4, 2, 1)
MIN_RING_BLOCK = 4
"""Tokens of a ring block. Shorter ring blocks make long block tables; they are used only where a page holds no longer
block."""
MAX_RING_OVERHEAD = 9 / 8
"""Memory that a longer ring block may cost, relative to the cheapest one: a ring has one block more than its tokens
need."""


def choose_ring_block(
    page_bytes: int, slot_bytes: int, block_size: int, tokens: int, *, is_cut: bool
) -> tuple[int, int]:
    """Return the tokens of a ring block, and how many ring blocks lie in one block of the pool.

    Args:
        page_bytes: bytes of a packed page, the limit of a block of ring blocks.
        slot_bytes: bytes of one token of all KV heads in the ring.
        block_size: tokens of a packed page; a multiple of the ring block's, as vLLM's scheduler works in the least
            common multiple of both.
        tokens: tokens that a ring holds.
        is_cut: whether a block of the pool may hold several ring blocks.
    """
    fit = page_bytes // slot_bytes
    sizes = [size for size in RING_BLOCK_SIZES if size <= max(1, fit)]
    sizes = [size for size in sizes if size >= MIN_RING_BLOCK] or sizes
    counts = {size: _largest_divisor(block_size // size, fit // size if is_cut else 1) for size in sizes}
    costs = {size: (-(-tokens // size) + 1) / counts[size] for size in sizes}
    size = max(size for size in sizes if costs[size] <= MAX_RING_OVERHEAD * min(costs.values()))
    return size, counts[size]


def _largest_divisor(number: int, limit: int) -> int:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return max(n for n in (1, *small, *(number // n for n in small)) if n <= max(1, limit))
