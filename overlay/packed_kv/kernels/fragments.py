"""Micro-blocks from memory to tensor-core fragments, in Triton.

A warp loads the words of 2 micro-blocks (32 tokens of one head) as tensors [32 lanes, 2]: lane i of the tensor is
lane i of the warp, so every step here happens in registers, and the fp16 tensors that come out lie as `mma.m16n8k16`
wants its left operand. No layout conversion, no shared memory (tests/kernels/test_compile.py looks at the SASS).

Eight codes of a lane are decoded at a time (half `h` of its 16 codes of a group, codes 8h .. 8h + 7):

    4 bits   word h         a byte look-up (`prmt`) of 8 magnitudes in 2 registers, 4 codes at a time
    3 bits   word >> 2h     the same with 4 magnitudes in 1 register; signs from the sign word
    2 bits   word << 4h     the magnitude bit, replicated over its byte, selects one of 2 bytes

The look-up gives e4m3 bytes without sign; one `lop3` puts the signs in, `cvt.rn.f16x2.e4m3x2` makes fp16 pairs (before
sm_89, which lacks it: the byte shifted into place is the value times 2^-8). Scales are not applied here: K's go to the
scores, V's to the weights, which are fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import MAGNITUDES

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter has no inline assembly; there, plain Triton computes the same values."""


def _e4m3(value: float) -> int:
    """The byte of a positive number that is exact and normal in fp8 e4m3."""
    exponent = 0
    while value >= 2 ** (exponent + 1):
        exponent += 1
    while value < 2**exponent:
        exponent -= 1
    mantissa = (value / 2**exponent - 1) * 8
    assert mantissa == int(mantissa) and exponent > -7, value
    return (exponent + 7) << 3 | int(mantissa)


def _register(values: tuple[float, ...]) -> str:
    """Up to four magnitudes as the bytes of a 32-bit constant."""
    return f"0x{sum(_e4m3(value) << 8 * i for i, value in enumerate(values)):08x}"


# Magnitudes of codes 0-3 and 4-7 of the half, unsigned, as bytes of m0 and m1; then their signs as bytes' top bits in
# s0 and s1. $8 is the word, $9 the sign word, $10 the first register of the table.
# An ALU instruction takes 1.91 cycles of a scheduler on Hopper, an fp16 add, which another pipe does, 1.04: so the
# upper half moves down in an addition of -0 (codes are no NaN: their top bit is 0 and a 4-bit magnitude is below 8).
_UPPER_HALF = """
        mov.b32 {b0, b1}, t;
        mov.b32 t, {b1, b1};
        add.rn.f16x2 t, t, z;
"""
_LOOK_UP = {
    4: f"""
        and.b32 t, $8, 0x77777777;
        prmt.b32 m0, $10, {_register(MAGNITUDES[4][4:])}, t;
        {_UPPER_HALF}
        prmt.b32 m1, $10, {_register(MAGNITUDES[4][4:])}, t;
        mov.b32 s0, $8;
        shl.b32 s1, $8, 4;
    """,
    3: f"""
        and.b32 t, $8, 0x33333333;
        prmt.b32 m0, $10, 0, t;
        {_UPPER_HALF}
        prmt.b32 m1, $10, 0, t;
        mov.b32 s0, $9;
        shl.b32 s1, $9, 1;
    """,
    2: f"""
        shl.b32 t, $8, 1;
        prmt.b32 m0, t, 0, 0xba98;
        lop3.b32 m0, m0, $10, {_register(MAGNITUDES[2][1:] * 4)}, 0xac;
        shl.b32 t, $8, 3;
        prmt.b32 m1, t, 0, 0xba98;
        lop3.b32 m1, m1, $10, {_register(MAGNITUDES[2][1:] * 4)}, 0xac;
        mov.b32 s0, $8;
        shl.b32 s1, $8, 2;
    """,
}
TABLE_2, TABLE_3, TABLE_4 = (
    tl.constexpr(int(_register(levels), 16)) for levels in (MAGNITUDES[2][:1] * 4, MAGNITUDES[3], MAGNITUDES[4][:4])
)
_SIGNS = """
        lop3.b32 m0, s0, 0x80808080, m0, 0xea;
        lop3.b32 m1, s1, 0x80808080, m1, 0xea;
        mov.b32 {b0, b1}, m0;
        mov.b32 {b2, b3}, m1;
"""
_CONVERT = "".join(f"        cvt.rn.f16x2.e4m3x2 h{i}, b{i};\n" for i in range(4))
# fp16 bits of the value times 2^-8: sign, a zero, 4 exponent bits, 3 mantissa bits.
_SHIFT = "".join(
    f"""
        prmt.b32 h{i}, m{i // 2}, 0, 0x{0x1404 if i % 2 == 0 else 0x3424:04x};
        shr.u32 t, h{i}, 1;
        and.b32 t, t, 0x3f803f80;
        lop3.b32 h{i}, h{i}, 0x80008000, t, 0xea;
"""
    for i in range(4)
)
_RESULT = "".join(f"        mov.b32 {{${2 * i}, ${2 * i + 1}}}, h{i};\n" for i in range(4))


def _assembly(bits: int, has_e4m3: bool) -> str:
    registers = """
        .reg .b32 t, z, m0, m1, s0, s1, h0, h1, h2, h3;
        .reg .b16 b0, b1, b2, b3;
        mov.b32 z, 0x80008000;
    """
    return "{" + registers + _LOOK_UP[bits] + _SIGNS + (_CONVERT if has_e4m3 else _SHIFT) + _RESULT + "}"


_HAS_E4M3 = {bits: tl.constexpr(_assembly(bits, True)) for bits in (2, 3, 4)}
_NO_E4M3 = {bits: tl.constexpr(_assembly(bits, False)) for bits in (2, 3, 4)}
ASSEMBLY_2, ASSEMBLY_3, ASSEMBLY_4 = _HAS_E4M3[2], _HAS_E4M3[3], _HAS_E4M3[4]
SHIFTING_2, SHIFTING_3, SHIFTING_4 = _NO_E4M3[2], _NO_E4M3[3], _NO_E4M3[4]
LEVELS_2, LEVELS_3, LEVELS_4 = (tl.constexpr(MAGNITUDES[bits]) for bits in (2, 3, 4))


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
def decode_half(
    word, sign_word, table,
    half: tl.constexpr, bits: tl.constexpr, parity: tl.constexpr, shifting: tl.constexpr,
):  # fmt: skip
    """Decode codes 8 * half .. 8 * half + 7 of a lane and group.

    Args:
        word: int32 [32, 2], the code word that holds them.
        sign_word: int32 [32, 2], of 3-bit groups; any tensor otherwise.
        table: of `in_register`.
        half: 0 or 1.
        bits: 2, 3 or 4.
        parity: which of the two groups of `sign_word`.
        shifting: for chips without e4m3 conversion; the values come out times 2^-8.

    Returns:
        tuple of 8 fp16 [32, 2].
    """
    if bits == 3:
        word = word >> (2 * half)
        sign_word = sign_word << (4 * parity + 2 * half)
    elif bits == 2:
        word = word << (4 * half)
    if IS_INTERPRETED:
        values = _decode_half_portable(word, sign_word, bits)
    else:
        if bits == 4:
            assembly: tl.constexpr = SHIFTING_4 if shifting else ASSEMBLY_4
        elif bits == 3:
            assembly: tl.constexpr = SHIFTING_3 if shifting else ASSEMBLY_3
        else:
            assembly: tl.constexpr = SHIFTING_2 if shifting else ASSEMBLY_2
        values = tl.inline_asm_elementwise(
            assembly,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [word, sign_word, table],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    return values


@triton.jit
def _decode_half_portable(word, sign_word, bits: tl.constexpr):
    values = ()
    for k in tl.static_range(8):
        if bits == 4:
            magnitude = word >> (4 * k) & 7
            sign = word >> (8 * (k % 4) + (7 if k < 4 else 3)) & 1
            levels: tl.constexpr = LEVELS_4
        elif bits == 3:
            magnitude = word >> (4 * k) & 3
            sign = sign_word >> (8 * (k % 4) + 7 - k // 4) & 1
            levels: tl.constexpr = LEVELS_3
        else:
            magnitude = word >> (8 * (k % 4) + 6 - 2 * (k // 4)) & 1
            sign = word >> (8 * (k % 4) + 7 - 2 * (k // 4)) & 1
            levels: tl.constexpr = LEVELS_2
        value = tl.full(word.shape, 0.0, tl.float32)
        for m in tl.static_range(2 ** (bits - 1)):
            value = tl.where(magnitude == m, levels[m], value)
        values = values + ((tl.where(sign == 1, -value, value)).to(tl.float16),)
    return values


@triton.jit
def assemble_key(half0, half1):
    """Two halves of `decode_half` of K words -> fp16 [32 tokens, 32 channels]."""
    return opaque(tl.reshape(tl.permute(_join(half0, half1), (2, 6, 0, 5, 4, 1, 3)), [32, 32]))


@triton.jit
def assemble_value(half0, half1):
    """Two halves of `decode_half` of V words -> fp16 [32 channels, 32 tokens]."""
    return opaque(tl.reshape(tl.permute(_join(half0, half1), (6, 5, 0, 2, 4, 1, 3)), [32, 32]))


@triton.jit
def opaque(x):
    """`x`, behind an operation that Triton does not look through.

    Where Triton 3.6 sees a `join` before a dot, it takes the operand for unpacked 8-bit data and asks for fragments of
    twice the width; this keeps the width of fp16. The move itself is gone in SASS.
    """
    if not IS_INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [x], dtype=tl.float16, is_pure=False, pack=1)
    return x


@triton.jit
def _join(a, b):
    """16 tensors [32, 2] -> [g = 8, t = 4, micro-block, bit 0, bit 1, bit 2, bit 3 of the code]."""
    return tl.reshape(tl.join(_join_half(a), _join_half(b)), [8, 4, 2, 2, 2, 2, 2])


@triton.jit
def _join_half(x):
    low = tl.join(tl.join(x[0], x[1]), tl.join(x[2], x[3]))
    high = tl.join(tl.join(x[4], x[5]), tl.join(x[6], x[7]))
    return tl.join(low, high)


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
def program_id_1_again():
    """`tl.program_id(1)`, unknown to be that: what comes of it is computed when needed, not kept in registers."""
    if IS_INTERPRETED:
        index = tl.program_id(1)
    else:
        index = tl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.y;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    return index
