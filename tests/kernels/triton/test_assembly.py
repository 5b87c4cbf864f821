"""The assembly of `fragments.py`, which Triton's interpreter does not run, on random words, in Python."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from packed_kv import layout
from packed_kv.formats import CODES
from packed_kv.kernels import units
from packed_kv.kernels.triton import fragments

ASSEMBLIES = [(bits, parity) for bits in CODES for parity in ((0, 1) if CODES[bits].has_sign_words else (0,))]
"""(bits, parity of the group in its sign word)."""
MASK = 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    return units.word([(255 * (source[n & 7] >> 7)) if n & 8 else source[n] for n in chosen])


def lop3(a: int, b: int, c: int, table: int) -> int:
    rows = (i for i in range(8) if table >> i & 1)
    return sum(
        (a if i & 4 else ~a & MASK) & (b if i & 2 else ~b & MASK) & (c if i & 1 else ~c & MASK) for i in rows
    )  # fmt: skip


def add_halves(a: int, b: int) -> int:
    pairs = np.array([a, b], np.uint32).view(np.float16).reshape(2, 2)
    return int((pairs[0] + pairs[1]).view(np.uint32)[0])


OPERATIONS: dict[str, Callable[..., int]] = {
    "shl.b32": lambda a, n: a << n & MASK,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "add.rn.f16x2": add_halves,
}


def execute(assembly: str, registers: dict[str, int]) -> dict[str, int]:
    """Registers by name behind the statements of an inline assembly."""

    def read(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for statement in assembly.strip(" {}").split(";"):
        if not (statement := statement.strip()) or statement.startswith(".reg"):
            continue
        if halves := re.fullmatch(r"mov\.b32 \{(\w+), (\w+)\}, (\S+)", statement):
            value = read(halves[3])
            registers |= {halves[1]: value & 0xFFFF, halves[2]: value >> 16}
        elif halves := re.fullmatch(r"mov\.b32 (\S+), \{(\w+), (\w+)\}", statement):
            registers[halves[1]] = read(halves[2]) | read(halves[3]) << 16
        else:
            name, _, operands = statement.partition(" ")
            target, *sources = operands.split(", ")
            values = [read(source) for source in sources]
            registers[target] = values[0] if name == "mov.b32" else OPERATIONS[name](*values)
    return registers


def test_every_width_has_a_decoder() -> None:
    assert set(CODES) <= set(fragments.DECODERS.value)


@pytest.mark.parametrize(("bits", "parity"), ASSEMBLIES)
def test_words_become_the_values_of_the_layout(bits: int, parity: int) -> None:
    draw = random.Random(bits + parity)
    for _ in range(50):
        words = [draw.getrandbits(32) for _ in range(3)]
        decoder = fragments.DECODERS.value[bits]
        registers = {f"${8 + i}": value for i, value in enumerate((*decoder.constants, *words))}
        registers = execute(decoder.assembly[parity], registers)
        pairs = np.array([registers[f"${i}"] for i in range(8)], np.uint32)
        values = pairs.view(np.float16) / CODES[bits].unit
        assert values.tolist() == [value_of(words, bits, parity, e) for e in range(16)]


def value_of(words: list[int], bits: int, parity: int, e: int) -> float:
    """Code e of a lane and group, as `layout.py` draws it."""
    code = CODES[bits]
    word = words[e * code.code_words // 16]
    magnitude = word >> code.magnitude_shift[e] & (1 << bits - 1) - 1
    if code.has_sign_words:
        sign = words[code.code_words] >> layout.SIGN_WORD_SHIFT[e] + parity * layout.SIGN_PARITY_SHIFT
    else:
        sign = word >> code.sign_shift[e]
    return code.magnitudes[magnitude] * (-1.0 if sign & 1 else 1.0)
