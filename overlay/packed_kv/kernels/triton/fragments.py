"""Micro-blocks from memory to tensor-core fragments, in Triton.

A warp loads the words of 2 micro-blocks (32 tokens of one head) as tensors [32 lanes, 2]: lane i of the tensor is
lane i of the warp, so every step here happens in registers, and the fp16 tensors that come out lie as `mma.m16n8k16`
wants its left operand. No layout conversion, no shared memory (tests/kernels/test_compile.py looks at the SASS).

The 16 codes of a lane and group:

    4 bits   2 code words            a look-up (`prmt`) of 8 bytes in 2 registers, 4 codes at a time; signs above
    3 bits   a code word, half of    the same with signs among the 8 bytes, 2 codes at a time with a zero byte each
             a word of signs
    2 bits   a code word             sign and magnitude are bits of the fp16 (`lop3`)

Nothing is converted: `units.py` says why. Scales are not applied here: K's go to the scores, V's to the weights, which
are fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import layout
from ...formats import MAGNITUDES
from .. import units

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter has no inline assembly; there, plain Triton computes the same values."""


def _hex(bytes_: list[int]) -> str:
    return f"0x{units.word(bytes_):08x}"


# Assembly for the 16 codes of a lane and group. $0 .. $7: the fp16 pairs. $8: the code word; $9: the second code word
# or the sign word; $10, $11: constants in registers.
# An ALU instruction takes 1.91 cycles of a scheduler on Hopper, an fp16 addition, which another pipe does, 1.04: so the
# upper half of t moves down as -0 is added to it (it is no NaN: its top bits are a 0 and a magnitude below 8, or a code
# below 8 and a 1 with a 0 behind it).
_UPPER_HALF = "mov.b32 {l, u}, t; mov.b32 t, {u, u}; add.rn.f16x2 t, t, z;"
# A byte of m and above it the same byte of s, a sign in its top bit: half an instruction a code.
_PAIRS = "prmt.b32 ${0}, m, s, 0x5140; prmt.b32 ${1}, m, s, 0x7362;"


def _four_bits() -> str:
    look_up = f"prmt.b32 m, $10, {_hex(units.four_bit_bytes()[4:])}, t;"
    halves = ""
    for half, word in enumerate(("$8", "$9")):
        halves += f"and.b32 t, {word}, 0x77777777; {look_up} and.b32 s, {word}, 0x80808080;"
        halves += _PAIRS.format(4 * half, 4 * half + 1)
        halves += f"{_UPPER_HALF} {look_up} shl.b32 s, {word}, 4; and.b32 s, s, 0x80808080;"
        halves += _PAIRS.format(4 * half + 2, 4 * half + 3)
    return halves


def _three_bits(parity: int) -> str:
    """t: 8 codes as nibbles, with another code's bit on top. Nibbles 1, 3, 5 and 7 are looked up as two pairs, once as
    they are and once moved up from 0, 2, 4 and 6; the nibbles between, $11, ask for a zero byte: the sign of $10's
    first one."""
    look_up = f"prmt.b32 ${{}}, $10, {_hex(units.three_bit_bytes()[4:])}, t;"
    halves = ""
    for half in range(2):
        left = 2 * parity + half - 1
        halves += f"shr.u32 m, $8, {2 * half}; {'shr.u32' if left < 0 else 'shl.b32'} s, $9, {abs(left)};"
        halves += "lop3.b32 m, m, s, 0x33333333, 0xe4; shl.b32 s, m, 4;"
        for first, codes in ((4 * half, "s"), (4 * half + 1, "m")):
            halves += f"lop3.b32 t, {codes}, 0x70707070, $11, 0xea; {look_up.format(first)}"
            halves += f"{_UPPER_HALF} {look_up.format(first + 2)}"
    return halves


def _two_bits() -> str:
    """A shift to the left and a mask leave sign and magnitude bit of a pair, $10 has the bits that all have."""
    mask = f"0x{units.twice(units.MASK_2):08x}"
    shifts = [15 - shift for shift in layout.SIGN_SHIFT[2][::2]]
    pairs = (f"shl.b32 t, $8, {shift}; lop3.b32 ${i}, t, {mask}, $10, 0xea;" for i, shift in enumerate(shifts))
    return "".join(pairs)


def _assembly(body: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 t, z, m, s; .reg .b16 l, u; mov.b32 z, 0x80008000; " + body + " }")


ASSEMBLY_2, ASSEMBLY_3_0, ASSEMBLY_3_1, ASSEMBLY_4 = map(
    _assembly, (_two_bits(), _three_bits(0), _three_bits(1), _four_bits())
)
CONSTANTS = tl.constexpr(
    {
        4: (units.word(units.four_bit_bytes()[:4]), 0),
        3: (units.word(units.three_bit_bytes()[:4]), units.twice(units.ZERO_BYTES_3)),
        2: (units.twice(units.two_bit_base()), 0),
    }
)
"""bits -> $10 and $11 of the assembly, below 2^31: int32."""
assert all(constant < 1 << 31 for pair in CONSTANTS.value.values() for constant in pair)


@triton.constexpr_function
def _constant(bits, number):
    return CONSTANTS.value[bits][number]


LEVELS_2, LEVELS_3, LEVELS_4 = (
    tl.constexpr(tuple(level * units.VALUE_UNITS[bits] for level in MAGNITUDES[bits])) for bits in (2, 3, 4)
)


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
def decode_key(first, second, constants, bits: tl.constexpr, parity: tl.constexpr):
    """Like `_decode`, fp16 [32 tokens, 32 channels]."""
    return opaque(as_key(_decode(first, second, constants, bits, parity)))


@triton.jit
def decode_value(first, second, constants, bits: tl.constexpr, parity: tl.constexpr):
    """Like `_decode`, fp16 [32 channels, 32 tokens]."""
    return opaque(as_value(_decode(first, second, constants, bits, parity)))


@triton.jit
def as_key(codes):
    """What lies as `_decode` returns it, as [32 tokens, 32 channels]."""
    return tl.reshape(tl.permute(codes, (2, 3, 0, 4, 5, 1, 6)), [32, 32])


@triton.jit
def as_value(codes):
    """What lies as `_decode` returns it, as [32 channels, 32 tokens]."""
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
def _decode(first, second, constants, bits: tl.constexpr, parity: tl.constexpr):
    """Decode the 16 codes of a lane and group, times `VALUE_UNITS[bits]`.

    Args:
        first: int32 [32, 2], the (first) code word.
        second: int32 [32, 2], the second code word (4 bits), the sign word (3 bits), or any tensor.
        constants: of `in_registers`.
        bits: 2, 3 or 4.
        parity: which of the two groups of the sign word.

    Returns:
        fp16 [g = 8, t = 4, micro-block, bit 3, bit 2, bit 1, bit 0 of the code].
    """
    if IS_INTERPRETED:
        values = _decode_portable(first, second, bits, parity)
    else:
        if bits == 4:
            assembly: tl.constexpr = ASSEMBLY_4
        elif bits == 3:
            assembly: tl.constexpr = ASSEMBLY_3_1 if parity else ASSEMBLY_3_0
        else:
            assembly: tl.constexpr = ASSEMBLY_2
        # Pairs of codes leave the assembly as 32-bit registers, and LLVM finds that taking them apart and putting them
        # together is nothing; of 16-bit ones, ptxas moves half once more (77 instructions a tile). All 16 codes as one
        # result (pack=16) would be as short, but wrong where Triton lays the result out otherwise: at head_dim 96.
        pairs = tl.inline_asm_elementwise(
            assembly, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [first, second, constants[0], constants[1]],
            dtype=(tl.int32,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
        values = _join_pairs(pairs)
    return tl.reshape(values, [8, 4, 2, 2, 2, 2, 2])


@triton.jit
def from_pairs(pairs):
    """The 16 codes of a lane and group as 8 int32 [32, 2] of two fp16 each, as `_decode` returns them."""
    return tl.reshape(_join_pairs(pairs), [8, 4, 2, 2, 2, 2, 2])


@triton.jit
def _join_pairs(pairs):
    low = tl.join(tl.join(pairs[0], pairs[4]), tl.join(pairs[2], pairs[6]))
    high = tl.join(tl.join(pairs[1], pairs[5]), tl.join(pairs[3], pairs[7]))
    return halves(tl.join(low, high))


@triton.jit
def halves(pairs):
    """int32 of any shape, two fp16 in each -> fp16 [..., 2]."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.join(low, high).to(tl.float16, bitcast=True)


@triton.jit
def _decode_portable(first, second, bits: tl.constexpr, parity: tl.constexpr):
    codes = tl.arange(0, 16)[None, None, :]
    first, second, k, half = first[:, :, None], second[:, :, None], codes % 8, codes // 8
    if bits == 4:
        word = tl.where(codes < 8, first, second)
        magnitude = word >> (4 * k) & 7
        sign = word >> (8 * (k % 4) + tl.where(k < 4, 7, 3)) & 1
        levels: tl.constexpr = LEVELS_4
    elif bits == 3:
        nibble = k & 4 | (k & 1) << 1 | k >> 1 & 1
        magnitude = first >> (4 * nibble + 2 * half) & 3
        sign = second >> (4 * nibble + 3 - 2 * parity - half) & 1
        levels: tl.constexpr = LEVELS_3
    else:
        sign_shift = 16 * (k & 1) + 15 - k // 2 - 8 * half
        magnitude = first >> (sign_shift - 4) & 1
        sign = first >> sign_shift & 1
        levels: tl.constexpr = LEVELS_2
    value = tl.zeros(magnitude.shape, tl.float32)
    for m in tl.static_range(2 ** (bits - 1)):
        value = tl.where(magnitude == m, levels[m], value)
    return tl.where(sign == 1, -value, value).to(tl.float16)


@triton.jit
def in_registers(zero, bits: tl.constexpr):
    """Constants of the assembly, plus a `zero` that the compiler does not know to be one.

    So they stay in registers. Else ptxas moves them there anew for every `prmt` and `lop3`, which take one constant.
    """
    return zero + _constant(bits, 0), zero + _constant(bits, 1)


@triton.jit
def again(x):
    """An int32 `x`, unknown to be that: what comes of it is computed where it is needed, not early and kept."""
    if not IS_INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x
