"""Micro-blocks from memory to tensor-core fragments, in Triton.

A warp loads the words of 2 micro-blocks (32 tokens of one head) as tensors [32 lanes, 2]: lane i of the tensor is
lane i of the warp, so every step here happens in registers, and the resulting fp16 tensors have the layout of
`mma.m16n8k16`'s left operand. No layout conversion, no shared memory (tests/kernels/test_compile.py looks at the SASS).

The 16 codes of a lane and group:

    5 bits   2 code words, a magnitude is a byte: an index above a half that all share; signs above
             a word of signs
    4 bits   2 code words            a look-up (`prmt`) of 8 bytes in 2 registers, 4 codes at a time; signs above
    3 bits   a code word, half of    the same with signs among the 8 bytes, 2 codes at a time with a zero byte each
             a word of signs
    2 bits   a code word             sign and magnitude are bits of the fp16 (`lop3`)

Nothing is converted: `units.py` says why. Scales are not applied here: K's scales go to the scores and V's to the
weights, as these are fewer.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...formats import CODES
from ...layout import SIGN_PARITY_SHIFT, SIGN_WORD_SHIFT
from .. import units

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""True under Triton's interpreter, which has no inline assembly: plain Triton computes the same values there. Read at
import, when `triton.jit` decorates functions; a process cannot have both."""
_SIGN_WORD_SHIFT, _SIGN_PARITY_SHIFT = tl.constexpr(SIGN_WORD_SHIFT), tl.constexpr(SIGN_PARITY_SHIFT)


def _hex(bytes_: list[int]) -> str:
    return f"0x{units.word(bytes_):08x}"


# Assembly for the 16 codes of a lane and group. $0 .. $7: the fp16 pairs. $8, $9: constants in registers. From $10 on:
# the code words, and then the sign word, if the width has one.
# An ALU instruction takes 1.91 cycles of a scheduler on Hopper, an fp16 addition, which another pipe does, 1.04: so the
# upper half of t moves down as -0 is added to it (it is no NaN: its top bits are a 0 and a magnitude below 8, or a code
# below 8 and a 1 with a 0 behind it).
_UPPER_HALF = "mov.b32 {l, u}, t; mov.b32 t, {u, u}; add.rn.f16x2 t, t, z;"
# A byte of m, with the same byte of s above it, a sign in its top bit: half an instruction per code.
_PAIRS = "prmt.b32 ${0}, m, s, 0x5140; prmt.b32 ${1}, m, s, 0x7362;"


def _five_bits(parity: int) -> str:
    """m: 4 bytes of magnitudes; $8: the lower half, which all share. Codes 0, 1, 4 and 5 are in nibbles 0, 2, 4 and
    6."""
    halves = ""
    for half, word in enumerate(("$10", "$11")):
        left = 2 * parity + half
        for odd, source in enumerate(("m", word)):
            halves += "" if odd else f"shl.b32 m, {word}, 4;"
            halves += f"lop3.b32 m, {source}, 0xf0f0f0f0, $8, 0xea;"
            halves += f"shl.b32 s, $12, {left + 4 * (1 - odd)}; and.b32 s, s, 0x80808080;"
            halves += _PAIRS.format(4 * half + odd, 4 * half + odd + 2)
    return halves


def _four_bits() -> str:
    look_up = f"prmt.b32 m, $8, {_hex(units.four_bit_bytes()[4:])}, t;"
    halves = ""
    for half, word in enumerate(("$10", "$11")):
        halves += f"and.b32 t, {word}, 0x77777777; {look_up} and.b32 s, {word}, 0x80808080;"
        halves += _PAIRS.format(4 * half, 4 * half + 1)
        halves += f"{_UPPER_HALF} {look_up} shl.b32 s, {word}, 4; and.b32 s, s, 0x80808080;"
        halves += _PAIRS.format(4 * half + 2, 4 * half + 3)
    return halves


def _three_bits(parity: int) -> str:
    """t: 8 codes as nibbles, with another code's bit on top. Nibbles 1, 3, 5 and 7 are looked up as two pairs, once as
    they are and once moved up from 0, 2, 4 and 6; the nibbles between, $9, ask for a zero byte: the sign of $8's
    first one."""
    look_up = f"prmt.b32 ${{}}, $8, {_hex(units.three_bit_bytes()[4:])}, t;"
    halves = ""
    for half in range(2):
        left = 2 * parity + half - 1
        halves += f"shr.u32 m, $10, {2 * half}; {'shr.u32' if left < 0 else 'shl.b32'} s, $11, {abs(left)};"
        halves += "lop3.b32 m, m, s, 0x33333333, 0xe4; shl.b32 s, m, 4;"
        for first, codes in ((4 * half, "s"), (4 * half + 1, "m")):
            halves += f"lop3.b32 t, {codes}, 0x70707070, $9, 0xea; {look_up.format(first)}"
            halves += f"{_UPPER_HALF} {look_up.format(first + 2)}"
    return halves


def _two_bits() -> str:
    """A shift to the left and a mask leave sign and magnitude bit of a pair; $8 has the bits that all share."""
    mask = f"0x{units.twice(units.MASK_2):08x}"
    signs = CODES[2].sign_shift
    pairs = (f"shl.b32 t, $10, {15 - s}; lop3.b32 ${i}, t, {mask}, $8, 0xea;" for i, s in enumerate(signs[::2]))
    return "".join(pairs)


class Decoder(NamedTuple):
    """Assembly that decodes the words of a width: `assembly`, one for each parity of a group in its sign word, and its
    `constants` $8 and $9, below 2^31."""

    assembly: tuple[str, str]
    constants: tuple[int, int]


def make_decoder(bodies: tuple[str, str], constants: tuple[int, int] = (0, 0)) -> Decoder:
    """A decoder of these instructions; they may use registers t, z (two fp16 of -0), m, s, and l, u of 16 bits."""
    assert max(constants) < 1 << 31, constants
    head = "{ .reg .b32 t, z, m, s; .reg .b16 l, u; mov.b32 z, 0x80008000; "
    even, odd = (f"{head}{body} }}" for body in bodies)
    return Decoder((even, odd), constants)


DECODERS = tl.constexpr(
    {
        5: make_decoder((_five_bits(0), _five_bits(1)), (units.five_bit_low(), 0)),
        4: make_decoder((_four_bits(),) * 2, (units.word(units.four_bit_bytes()[:4]), 0)),
        3: make_decoder(
            (_three_bits(0), _three_bits(1)),
            (units.word(units.three_bit_bytes()[:4]), units.twice(units.ZERO_BYTES_3)),
        ),
        2: make_decoder((_two_bits(),) * 2, (units.twice(units.two_bit_base()), 0)),
        16: make_decoder(("".join(f"mov.b32 ${i}, ${10 + i};" for i in range(8)),) * 2),
    }
)
"""bits -> decoder of that width; 16: `NULL_CODE`."""


@triton.constexpr_function
def _assembly(bits, parity):
    return DECODERS.value[bits].assembly[parity]


@triton.constexpr_function
def _constraints(words):
    """Operand constraints of the assembly: 8 results, 2 constants and so many words."""
    return ",".join(["=r"] * 8 + ["r"] * (2 + words))


@triton.constexpr_function
def _constant(bits, number):
    return DECODERS.value[bits].constants[number]


@triton.jit
def load_words(pointer0, pointer1, count: tl.constexpr):
    """`count` (1, 2 or 4) neighbouring words of every lane, of two micro-blocks.

    pointer0, pointer1: to int32, [32, 1]. Returns a tuple of `count` int32 [32, 2].
    """
    if count == 1:
        words = (tl.join(tl.reshape(tl.load(pointer0), [32]), tl.reshape(tl.load(pointer1), [32])),)
    else:
        index = tl.arange(0, count)[None, :]
        both = tl.join(tl.load(pointer0 + index), tl.load(pointer1 + index))  # [32, count, 2]
        if count == 2:
            words = tl.split(tl.permute(both, (0, 2, 1)))
        else:
            even, odd = tl.split(tl.permute(tl.reshape(both, [32, 2, 2, 2]), (0, 3, 1, 2)))
            w0, w2 = tl.split(even)
            w1, w3 = tl.split(odd)
            words = (w0, w1, w2, w3)
    return words


@triton.jit
def as_key(codes):
    """Rearrange values in `decode_codes`' order as [32 tokens, 32 channels]."""
    return tl.reshape(tl.permute(codes, (2, 3, 0, 4, 5, 1, 6)), [32, 32])


@triton.jit
def as_value(codes):
    """Rearrange values in `decode_codes`' order as [32 channels, 32 tokens]."""
    return tl.reshape(tl.permute(codes, (3, 4, 0, 2, 5, 1, 6)), [32, 32])


@triton.jit
def opaque(x):
    """`x`, behind an operation that Triton does not look through.

    Where Triton 3.6 sees a `join` before a dot, it takes the operand for unpacked 8-bit data and asks for fragments of
    twice the width; this keeps the width of fp16. The move itself is gone in SASS.
    """
    if not IS_INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
    return x


@triton.jit
def decode_codes(words, zero, group: tl.constexpr, VECTOR: tl.constexpr):
    """Decode the 16 codes of a lane and group, times the unit of their width.

    Args:
        words: of the lane, a tuple of int32 [32, 2].
        zero: int32 [32, 2], all 0, unknown to the compiler: it keeps the assembly's constants in registers.
        group: number of the group.
        VECTOR: `PackedVector`.

    Returns:
        fp16 [g = 8, t = 4, micro-block, bit 3, bit 2, bit 1, bit 0 of the code].
    """
    return tl.reshape(decode_words(words, zero, group, VECTOR), [8, 4, 2, 2, 2, 2, 2])


@triton.jit
def decode_words(words, zero, group: tl.constexpr, VECTOR: tl.constexpr):
    """`decode_codes` for words of any two dimensions: fp16 [.., .., 16] or [.., .., 2, 2, 2, 2], by code."""
    GROUP: tl.constexpr = VECTOR.groups[group]
    CODE: tl.constexpr = GROUP.code
    WORD: tl.constexpr = GROUP.word
    CODE_WORDS: tl.constexpr = CODE.code_words
    own = ()
    for i in tl.static_range(CODE_WORDS):
        own = own + (words[WORD + i],)
    if len(CODE.sign_shift) == 0:
        own = own + (words[GROUP.sign_word],)
    if IS_INTERPRETED:
        values = _decode_portable(own, CODE, GROUP.parity)
    else:
        # Pairs of codes leave the assembly as 32-bit registers, and LLVM finds that taking them apart and putting them
        # together is nothing; of 16-bit ones, ptxas moves half once more (77 instructions a tile). All 16 codes as one
        # result (pack=16) would be as short, but wrong where Triton lays the result out otherwise: at head_dim 96.
        pairs = tl.inline_asm_elementwise(
            _assembly(CODE.bits, GROUP.parity), _constraints(len(own)), _in_registers(zero, CODE.bits) + own,
            dtype=(tl.int32,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
        values = join_pairs(pairs)
    return values


@triton.jit
def from_pairs(pairs):
    """The 16 codes of a lane and group as 8 int32 [32, 2] of two fp16 each, as `decode_codes` returns them."""
    return tl.reshape(join_pairs(pairs), [8, 4, 2, 2, 2, 2, 2])


@triton.jit
def join_pairs(pairs):
    """8 int32 of two fp16 each, by code -> fp16 [..., 2, 2, 2, 2]."""
    low = tl.join(tl.join(pairs[0], pairs[4]), tl.join(pairs[2], pairs[6]))
    high = tl.join(tl.join(pairs[1], pairs[5]), tl.join(pairs[3], pairs[7]))
    return halves(tl.join(low, high))


@triton.jit
def halves(pairs):
    """int32 of any shape, two fp16 in each -> fp16 [..., 2]."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.join(low, high).to(tl.float16, bitcast=True)


@triton.jit
def _decode_portable(words, CODE: tl.constexpr, parity: tl.constexpr):
    """Decode words as `decode_codes` does -> fp16 [32, 2, 16]."""
    codes = tl.arange(0, 16)[None, None, :]
    word = words[0][:, :, None]
    for i in tl.static_range(1, CODE.code_words):
        word = tl.where(codes * CODE.code_words // 16 >= i, words[i][:, :, None], word)
    magnitude = word >> _positions(codes, CODE.magnitude_shift) & ((1 << (CODE.bits - 1)) - 1)
    if len(CODE.sign_shift) == 0:
        sign_shift = _positions(codes, _SIGN_WORD_SHIFT) + parity * _SIGN_PARITY_SHIFT
        sign = words[CODE.code_words][:, :, None] >> sign_shift & 1
    else:
        sign = word >> _positions(codes, CODE.sign_shift) & 1
    value = tl.zeros(magnitude.shape, tl.float32)
    if len(CODE.magnitudes) == 0:
        value = magnitude.to(tl.int16).to(tl.float16, bitcast=True)
    for m in tl.static_range(len(CODE.magnitudes)):
        value = tl.where(magnitude == m, CODE.magnitudes[m] * CODE.unit, value)
    return tl.where(sign == 1, -value, value).to(tl.float16)


@triton.jit
def _positions(codes, POSITIONS: tl.constexpr):
    """Bit positions of codes, by their indices: linear in the bits of an index."""
    positions = tl.full(codes.shape, POSITIONS[0], tl.int32)
    for bit in tl.static_range(4):
        positions += (codes >> bit & 1) * (POSITIONS[1 << bit] - POSITIONS[0])
    return positions


@triton.jit
def _in_registers(zero, bits: tl.constexpr):
    """Constants of the assembly, plus a `zero` that the compiler does not know to be one.

    This keeps them in registers. Otherwise ptxas would move them there for every `prmt` and `lop3`, which take one
    constant.
    """
    return zero + _constant(bits, 0), zero + _constant(bits, 1)


@triton.jit
def hide_from_optimizer(x):
    """Return an int32 `x` as a value unknown to the compiler: dependent values are computed where they are needed, not
    early and kept."""
    if not IS_INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@triton.jit
def to_tf32(x):
    """fp32 rounded to tf32, which a tensor core would otherwise get by truncation."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
