"""Micro-blocks from memory to tensor-core fragments, in Triton.

A warp loads the words of 2 micro-blocks (32 tokens of one head) as tensors [32 lanes, 2]: lane i of the tensor is
lane i of the warp, so every step here happens in registers, and the fp16 tensors that come out lie as `mma.m16n8k16`
wants its left operand. No layout conversion, no shared memory (tests/kernels/test_compile.py looks at the SASS).

The 16 codes of a lane and group:

    4 bits   2 code words            a byte look-up (`prmt`) of 8 magnitudes in 2 registers, 4 codes at a time
    3 bits   a code word, half of    the same with 4 magnitudes in 1 register
             a word of signs
    2 bits   a code word             its magnitude bit, over its byte, selects one of 2 bytes (`lop3`)

Bytes become fp16 without a conversion: see `VALUE_UNIT`. Scales are not applied here: K's go to the scores, V's to the
weights, which are fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import MAGNITUDES

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter has no inline assembly; there, plain Triton computes the same values."""
VALUE_UNIT = 2.0**-17
"""Decoded codes are magnitudes times this: 128 times a magnitude is an integer below 256, which as the bits of an fp16
is a subnormal number of 2^-24 each. So a byte with a zero above it is a value, and needs no conversion."""
OVER_UNIT = tl.constexpr(1 / VALUE_UNIT)


def _register(levels: tuple[float, ...]) -> str:
    """Up to four magnitudes, times 128, as the bytes of a 32-bit constant."""
    values = [round(128 * level) for level in levels]
    assert all(value == 128 * level < 256 for value, level in zip(values, levels, strict=True)), levels
    return f"0x{sum(value << 8 * i for i, value in enumerate(values)):08x}"


def _signed(bits: str) -> int:
    return int(bits, 16) - (int(bits, 16) >> 31 << 32)


# Assembly for the 16 codes of a lane and group. $0 .. $7: the fp16 pairs. $8: the code word; $9: the second code word
# or the sign word; $10: a constant in a register.
# An ALU instruction takes 1.91 cycles of a scheduler on Hopper, an fp16 addition, which another pipe does, 1.04: so the
# upper half of t moves down as -0 is added to it (codes are no NaN: their top bit is 0, a 4-bit magnitude is below 8).
_UPPER_HALF = "mov.b32 {l, u}, t; mov.b32 t, {u, u}; add.rn.f16x2 t, t, z;"
# A byte of m and above it the same byte of s, a sign in its top bit: half an instruction a code.
_PAIRS = "prmt.b32 ${0}, m, s, 0x5140; prmt.b32 ${1}, m, s, 0x7362;"


def _four_bits() -> str:
    look_up = f"prmt.b32 m, $10, {_register(MAGNITUDES[4][4:])}, t;"
    halves = ""
    for half, word in enumerate(("$8", "$9")):
        halves += f"and.b32 t, {word}, 0x77777777; {look_up} and.b32 s, {word}, 0x80808080;"
        halves += _PAIRS.format(4 * half, 4 * half + 1)
        halves += f"{_UPPER_HALF} {look_up} shl.b32 s, {word}, 4; and.b32 s, s, 0x80808080;"
        halves += _PAIRS.format(4 * half + 2, 4 * half + 3)
    return halves


def _three_bits(parity: int) -> str:
    halves = ""
    for half in range(2):
        shift = 4 * parity + 2 * half
        halves += f"shr.u32 t, $8, {2 * half}; and.b32 t, t, 0x33333333; prmt.b32 m, $10, 0, t;"
        halves += f"shl.b32 s, $9, {shift}; and.b32 s, s, 0x80808080;"
        halves += _PAIRS.format(4 * half, 4 * half + 1)
        halves += f"{_UPPER_HALF} prmt.b32 m, $10, 0, t; shl.b32 s, $9, {shift + 1}; and.b32 s, s, 0x80808080;"
        halves += _PAIRS.format(4 * half + 2, 4 * half + 3)
    return halves


def _two_bits() -> str:
    """Each half of t: 8 times the magnitude bit, and the byte with the sign on top. $10 has a magnitude below each sign
    bit: lop3 takes it, or the other magnitude, by the magnitude bit, and nothing else of the byte with the sign."""
    other = f"0x{round(128 * MAGNITUDES[2][0]) * 0x10001:08x}"
    quarters = ""
    for quarter in range(4):
        quarters += f"shl.b32 s, $8, {2 * quarter}; shl.b32 m, $8, {2 * quarter + 1};"
        for i, selector in enumerate(("0x5948", "0x7b6a")):
            quarters += f"prmt.b32 t, m, s, {selector}; lop3.b32 ${2 * quarter + i}, t, $10, {other}, 0xca;"
    return quarters


def _assembly(body: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 t, z, m, s; .reg .b16 l, u; mov.b32 z, 0x80008000; " + body + " }")


ASSEMBLY_2, ASSEMBLY_3_0, ASSEMBLY_3_1, ASSEMBLY_4 = map(
    _assembly, (_two_bits(), _three_bits(0), _three_bits(1), _four_bits())
)
TABLE_4, TABLE_3 = (tl.constexpr(_signed(_register(levels))) for levels in (MAGNITUDES[4][:4], MAGNITUDES[3]))
TABLE_2 = tl.constexpr(_signed(f"{0x80008000 | round(128 * MAGNITUDES[2][1]) * 0x10001:08x}"))
LEVELS_2, LEVELS_3, LEVELS_4 = (
    tl.constexpr(tuple(level * VALUE_UNIT for level in MAGNITUDES[bits])) for bits in (2, 3, 4)
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
def decode_key(first, second, table, bits: tl.constexpr, parity: tl.constexpr):
    """Like `_decode`, fp16 [32 tokens, 32 channels]."""
    return opaque(as_key(_decode(first, second, table, bits, parity)))


@triton.jit
def decode_value(first, second, table, bits: tl.constexpr, parity: tl.constexpr):
    """Like `_decode`, fp16 [32 channels, 32 tokens]."""
    return opaque(as_value(_decode(first, second, table, bits, parity)))


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
def _decode(first, second, table, bits: tl.constexpr, parity: tl.constexpr):
    """Decode the 16 codes of a lane and group, times `VALUE_UNIT`.

    Args:
        first: int32 [32, 2], the (first) code word.
        second: int32 [32, 2], the second code word (4 bits), the sign word (3 bits), or any tensor.
        table: of `in_register`.
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
            assembly, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [first, second, table],
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
    first, second, k = first[:, :, None], second[:, :, None], codes % 8
    if bits == 4:
        word = tl.where(codes < 8, first, second)
        magnitude = word >> (4 * k) & 7
        sign = word >> (8 * (k % 4) + tl.where(k < 4, 7, 3)) & 1
        levels: tl.constexpr = LEVELS_4
    elif bits == 3:
        magnitude = first >> (4 * k + 2 * (codes // 8)) & 3
        sign = second >> (8 * (k % 4) + 7 - 4 * parity - codes // 4) & 1
        levels: tl.constexpr = LEVELS_3
    else:
        magnitude = first >> (8 * (k % 4) + 6 - 2 * (codes // 4)) & 1
        sign = first >> (8 * (k % 4) + 7 - 2 * (codes // 4)) & 1
        levels: tl.constexpr = LEVELS_2
    value = tl.zeros(magnitude.shape, tl.float32)
    for m in tl.static_range(2 ** (bits - 1)):
        value = tl.where(magnitude == m, levels[m], value)
    return tl.where(sign == 1, -value, value).to(tl.float16)


@triton.jit
def in_register(zero, bits: tl.constexpr):
    """The first operand of the look-up: the constant, plus a `zero` that the compiler does not know to be one.

    So it stays in a register. Else ptxas moves it there anew for every look-up, as `prmt` takes one constant only.
    """
    if bits == 4:
        table: tl.constexpr = TABLE_4
    elif bits == 3:
        table: tl.constexpr = TABLE_3
    else:
        table: tl.constexpr = TABLE_2
    return zero + table


@triton.jit
def again(x):
    """An int32 `x`, unknown to be that: what comes of it is computed where it is needed, not early and kept."""
    if not IS_INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x
