"""Counts of Triton's decode kernel, without a GPU: registers, spills, shared memory, and instructions a tile.

    python benchmarks/triton_counts.py --csv triton_counts.csv [--sm 80 86]

Each variant is compiled for each architecture by the compiler that comes with Triton, and the machine code is read: the
instructions on the usual path of the loop over pages, which handles a tile of 32 tokens of one KV head, by the pipe
that they take. docs/lab/cards.md holds them against the bytes that memory brings.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from packed_kv.formats import FORMATS
from packed_kv.gpu_generations import generation_of
from packed_kv.layout import page_layout
from rows import append, commit_here

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))
from compiling import Resources, compile_kernels
from test_compile import decode_case, shape_of

ARCHITECTURES = (80, 86, 89, 90)
"""Ampere, Ada, and Hopper, which was measured."""
RING_BLOCK = 8
TILE_TOKENS = 32
PIPES = {
    "tensor": r"HMMA|IMMA",
    "special": r"MUFU|F2F\b|I2F\b|F2I\b|POPC|FLO",
    "memory": r"LD|ST|SHFL|MOVM|RED|ATOM",
    "half": r"HFMA2|HADD2|HMUL2|HMNMX2",
    "fp32": r"FFMA|FADD|FMUL",
    "imad": r"IMAD",
    "alu": r"PRMT|P?LOP3|SHF|I(ADD3|SETP|MNMX|ABS)|LEA|[FH]SETP|F?SEL|FMNMX|VIMNMX|MOV|I2FP|F2FP|SGXT|BMSK",
}  # fmt: skip
"""Pipe -> the names of its instructions; what has none of them is only issued."""


class Variant(NamedTuple):
    """A variant of the kernel: `ring`: whether the recent window is read behind the pages."""

    dtype: str
    head_dim: int = 128
    columns: int = 8
    ring: bool = False


EVERYWHERE = Variant("tq4"), Variant("turboquant25"), Variant("tq4", columns=32)
"""Variants that are counted for every architecture; their code differs little from one to another."""
OTHERS = (
    Variant("turboquant35"), Variant("tq3"), Variant("tq4", columns=16), Variant("turboquant25", columns=32),
    Variant("tq4", ring=True), Variant("tq4", head_dim=256),
)  # fmt: skip
MOST = 86
"""The architecture for which all variants are counted."""


def variants(arch: int) -> tuple[Variant, ...]:
    """Return the variants that are counted for an architecture."""
    return EVERYWHERE + OTHERS if arch == MOST else EVERYWHERE


def pipe_of(instruction: str) -> str:
    """Return the pipe of a line of machine code, or "" of one that is only issued, such as a branch."""
    name = re.sub(r"^@!?U?P\w+\s+", "", instruction.strip())
    return next((pipe for pipe, names in PIPES.items() if re.match(names, name)), "")


def counted(variant: Variant, arch: int, found: Resources) -> dict[str, object]:
    """Return a variant's row, without versions: what an SM holds of its programs, and what one does for a tile."""
    loop, generation = found.loop(), generation_of(divmod(arch, 10))
    pipes = Counter(pipe_of(text) for text in loop)
    page = page_layout(FORMATS[variant.dtype], variant.head_dim)
    counted_on = shape_of(page, arch, variant.head_dim).programs(variant.columns, generation)
    return {
        **variant._asdict(), "ring": "yes" if variant.ring else "no", "sm": arch, "registers": found.registers,
        "stack_bytes": found.stack_bytes, "spills_in_loop": sum(bool(re.search(r"\b(LDL|STL)\b", x)) for x in loop),
        "shared_bytes": found.shared_bytes, "programs": generation.resident_blocks(found.registers, found.shared_bytes),
        "counted_on": counted_on, "tile_bytes": TILE_TOKENS // 16 * page.micro_block_bytes, "instructions": len(loop),
        **{pipe: pipes[pipe] for pipe in PIPES},
    }  # fmt: skip


def count(cases: Iterable[tuple[Variant, int]]) -> list[dict[str, object]]:
    """Compile variants for architectures, in one process, and return their rows."""
    asked = list(cases)
    made = [
        decode_case(
            FORMATS[variant.dtype], arch, variant.head_dim, RING_BLOCK if variant.ring else 0, columns=variant.columns
        )
        for variant, arch in asked
    ]
    return [counted(*case, found) for case, found in zip(asked, compile_kernels(made), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sm", nargs="+", type=int, choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--commit", default=commit_here())
    options = parser.parse_args()
    for arch in options.sm:
        for row in count((variant, arch) for variant in variants(arch)):
            append(options.csv, {**row, "triton": version("triton"), "commit": options.commit})


if __name__ == "__main__":
    main()
