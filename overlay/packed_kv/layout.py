"""Where the codes and scales of a token lie in a page. Imports no torch.

vLLM sees a page as an opaque `[KV heads, block_size, slot_bytes]` of bytes, head-major, so the tokens of one head
are one run of bytes. That run is cut into micro-blocks of `MICRO_BLOCK` = 16 tokens:

    page of a block:   | head 0 ........................ | head 1 ... |
    head's run:        | tokens 0-15 | tokens 16-31 | ...             block_size / 16 micro-blocks
    micro-block:       | K codes | V codes | K scales | V scales |    16 * slot_bytes bytes

Codes are stored in the order in which tensor-core fragments (`mma.m16n8k16`) want them: a warp's 32 lanes each load
whole 32-bit words, and what a lane loads is what that lane feeds to the tensor core, with no exchange through shared
memory. A lane holds 16 codes of every 32-channel group. With the bits of a token's index in the micro-block called
n3..n0 and those of a channel's index in its group d4..d0:

                 lane = g * 4 + t              code e of the lane, 0..15 (bits high to low)
    K            g = n2 n1 n0,  t = d2 d1      n3 d4 d3 d0
    V            g = d2 d1 d0,  t = n2 n1      d4 d3 n3 n0

so codes e and e + 1 (e even) are a fragment's fp16 pair: neighbours along the dimension that the product sums over.
A lane's 16 codes of a group, as `sign` (top bit of the code) and `magnitude` (the rest), lie in words so that few
instructions turn them into fp16 pairs (docs/kernels.md). With e = e3 e2 e1 e0 and m = 4 e2 + 2 e0 + e1:

    4 bits   2 words; word e >> 3, k = e & 7:  magnitude at bits 4k .. 4k+2;  sign at bit 8(k & 3) + 7 (k < 4)
             or 8(k & 3) + 3 (k >= 4): four magnitudes are four bytes by one `prmt`, signs their top bits by a shift
    3 bits   1 word:  magnitude at bits 4m + 2 e3 and the next
             signs of two groups share 1 word:  group parity p, bit 4m + 3 - 2p - e3
             signs of an odd last group are a half word:  bit 4(m & 3) + 3 - 2 e2 - e3
             so a code is a nibble by a shift and a mask, and 4 nibbles are an fp16 pair by one `prmt`
    2 bits   1 word:  sign at bit 16 e0 + 15 - e1 - 2 e2 - 8 e3,  magnitude 4 bits below it: a shift to the left
             and a mask make them sign and exponent of a pair

A lane's words are: the code words of all groups in order, then the sign words. They are stored in chunks of 4, then
2, then 1 words (the widest loads there are), each chunk as [32 lanes][words of the chunk]; last the half words,
[32 lanes] of 16 bits. All little-endian.

Scales lie in the order in which the lanes need them: a lane's K codes belong to 2 tokens (n3), so the scales of a
row g are together; its V codes belong to 4 tokens (n3, n0), so those of a row t are, a 32-bit word a group:

    K scales     [g = n2 n1 n0][group][n3]
    V scales     [t = n2 n1][group][n3][n0]

Beside the pages, the ring of a request's recent tokens (`codecs/ring.py`): a byte a channel, and a token of a head in
one run of bytes, as rings begin and end anywhere. Padded to a multiple of 8 bytes:

    ring slot:         | K codes | V codes | K scales | V scales | padding |

Codes are code + 128; the byte of channel d4..d0 of a group is, again so that a lane's bytes are neighbours in the
order in which it feeds them to the tensor core, number  d2 d1 d4 d3 d0  for K and  d2 d1 d0 d4 d3  for V.
"""

from __future__ import annotations

from dataclasses import dataclass

from .formats import GROUP_SIZE, Format, stored_dim

MICRO_BLOCK = 16
"""Tokens of one micro-block."""
LANES = 32
CODES_PER_LANE = MICRO_BLOCK * GROUP_SIZE // LANES
"""Codes of one group that one lane holds."""

CODE_WORDS = {4: 2, 3: 1, 2: 1}
"""bits -> 32-bit words of a lane and group, without the sign words of 3-bit groups."""

_E = range(CODES_PER_LANE)
_NIBBLE = tuple(e & 4 | (e & 1) << 1 | e >> 1 & 1 for e in _E)
SIGN_SHIFT = {
    4: tuple(8 * (e & 3) + (7 if e & 7 < 4 else 3) for e in _E),
    2: tuple(16 * (e & 1) + 15 - (e >> 1 & 3) - 8 * (e >> 3) for e in _E),
}
"""bits -> bit position of code e's sign in its code word (3-bit groups have sign words)."""
MAGNITUDE_SHIFT = {
    4: tuple(4 * (e & 7) for e in _E),
    3: tuple(4 * _NIBBLE[e] + 2 * (e >> 3) for e in _E),
    2: tuple(shift - 4 for shift in SIGN_SHIFT[2]),
}
"""bits -> bit position of code e's magnitude in its word."""
SIGN_WORD_SHIFT = tuple(tuple(4 * _NIBBLE[e] + 3 - 2 * parity - (e >> 3) for e in _E) for parity in (0, 1))
"""group parity -> bit position of code e's sign in the sign word that two 3-bit groups share."""
SIGN_HALF_SHIFT = tuple(4 * (_NIBBLE[e] & 3) + 3 - 2 * (e >> 2 & 1) - (e >> 3) for e in _E)
"""Bit position of code e's sign in the half word of an odd last 3-bit group."""


@dataclass(frozen=True)
class VectorLayout:
    """Words of one role (K or V) in a micro-block, from the bits of each of its groups."""

    group_bits: tuple[int, ...]

    @property
    def code_words(self) -> int:
        """Code words of a lane."""
        return sum(CODE_WORDS[bits] for bits in self.group_bits)

    @property
    def sign_words(self) -> int:
        """Sign words of a lane."""
        return self.group_bits.count(3) // 2

    @property
    def half_words(self) -> int:
        """16-bit sign words of a lane: 0 or 1."""
        return self.group_bits.count(3) % 2

    @property
    def chunks(self) -> tuple[int, ...]:
        """Widths of the chunks that a lane's words are stored in: 4s, then 2, then 1."""
        words = self.code_words + self.sign_words
        return (4,) * (words // 4) + (2,) * (words % 4 // 2) + (1,) * (words % 2)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of 16 tokens."""
        return LANES * (4 * (self.code_words + self.sign_words) + 2 * self.half_words)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of 16 tokens."""
        return MICRO_BLOCK * len(self.group_bits)


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets in a micro-block of a format at a head_dim."""

    vector: VectorLayout
    micro_block_bytes: int
    key_codes: int
    value_codes: int
    key_scales: int
    value_scales: int


def page_layout(fmt: Format, head_dim: int) -> PageLayout:
    """Layout of `fmt` at `head_dim`. Raises ValueError if head_dim is not a multiple of 16."""
    vector = VectorLayout(fmt.group_bits(head_dim))
    key_scales = 2 * vector.code_bytes
    return PageLayout(
        vector=vector,
        micro_block_bytes=key_scales + 2 * vector.scale_bytes,
        key_codes=0,
        value_codes=vector.code_bytes,
        key_scales=key_scales,
        value_scales=key_scales + vector.scale_bytes,
    )


def ring_slot_bytes(head_dim: int) -> int:
    """Bytes of K and V of one token and head in the ring."""
    channels = stored_dim(head_dim)
    return -(-2 * (channels + channels // GROUP_SIZE) // 8) * 8


RECENT_TOKENS = 64
"""Of the recent window, unless another number is asked for; docs/quality.md has the figures by window."""
RING_BLOCK_SIZES = (16, 8, 4, 2, 1)
SHORT = 4
"""Ring blocks shorter than this make long tables."""
EXCESS = 9 / 8
"""Long ring blocks may take so many times the memory of short ones: a ring has one more than its tokens need."""


def choose_ring_block(
    page_bytes: int, slot_bytes: int, block_size: int, tokens: int, *, is_cut: bool
) -> tuple[int, int]:
    """Tokens of a ring block, and how many lie in one block of the pool.

    Args:
        page_bytes: of a packed page, more than which a block may not take; its `block_size` tokens are a multiple of a
            ring's, as vLLM's scheduler works in their least common multiple.
        slot_bytes: of one token of all KV heads in the ring.
        tokens: that a ring holds.
        is_cut: whether a block may hold several ring blocks.
    """
    fit = page_bytes // slot_bytes
    sizes = [size for size in RING_BLOCK_SIZES if size <= max(1, fit)]
    sizes = [size for size in sizes if size >= SHORT] or sizes
    counts = {size: _largest_divisor(block_size // size, fit // size if is_cut else 1) for size in sizes}
    costs = {size: (-(-tokens // size) + 1) / counts[size] for size in sizes}
    size = max(size for size in sizes if costs[size] <= EXCESS * min(costs.values()))
    return size, counts[size]


def _largest_divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, max(1, min(number, limit)) + 1) if number % n == 0)
