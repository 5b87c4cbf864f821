"""Machine code by the tools that come with Triton's compiler; they need no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple


def dump(option: str, file: Path) -> str:
    """Return what cuobjdump says of a file of machine code: "--dump-resource-usage" or "--dump-sass"."""
    return _run("cuobjdump", option, str(file))


def resources(file: Path) -> dict[str, tuple[int, int, int]]:
    """Registers of a thread, bytes of its stack and of its local memory, by kernel."""
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", dump("--dump-resource-usage", file))
    return {name: (int(registers), int(stack), int(local)) for name, registers, stack, local in found}


def _run(tool: str, *arguments: str) -> str:
    import triton

    beside = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    if os.access(beside, os.X_OK):
        done = subprocess.run([str(beside), *arguments], capture_output=True, text=True)
        if done.returncode == 0 or shutil.which(tool) is None:  # Triton 3.6's does not know compute capability 10.3
            done.check_returncode()
            return done.stdout
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


class Frame(NamedTuple):
    """A line of the sources."""

    file: str
    line: int


class Instruction(NamedTuple):
    """An instruction of sm_90 or Blackwell's, with what its control word says.

    text: as nvdisasm prints it, with its predicate. sets: the scoreboard that it holds until its result is there (7:
    none). waits: a bit for each scoreboard that must be free before it is issued. place: the lines that it comes from,
    the innermost of nested inlined calls first.
    """

    text: str
    sets: int
    waits: int
    place: tuple[Frame, ...]

    @property
    def operation(self) -> str:
        """The name with its modifiers, without the predicate."""
        return self.text.split()[1 if self.text.startswith("@") else 0]


class Code:
    """A kernel's instructions in order, and which may follow which.

    Compiled with `-lineinfo`, instructions have a `place`; the option changes none of them.
    """

    def __init__(self, instructions: list[Instruction], labels: dict[str, int]) -> None:
        self.instructions, self.labels = instructions, labels

    @classmethod
    def of(cls, file: Path, kernel: str) -> Code:
        """Read a kernel of a cubin."""
        text = _run("nvdisasm", "-c", "-hex", "-gi", str(file))
        start = text.index(f"\n.text.{kernel}:")
        end = text.find("\n.text.", start + 1)
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        place: list[Frame] = []
        is_place_whole = False
        lines = iter(text[start : end if end > 0 else None].splitlines())
        for line in lines:
            if found := re.match(r'\s*//## File "(.*)", line (\d+)', line):
                if is_place_whole:
                    place, is_place_whole = [], False
                place.append(Frame(found[1].rsplit("/", 1)[-1], int(found[2])))
            elif found := re.match(r"(\.L_\w+|\$[\w$]+):", line):
                labels[found[1]] = len(instructions)
            elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]+ \*/", line):
                control = int(re.findall(r"/\* (0x[0-9a-f]+) \*/", next(lines))[0], 16) >> 41
                unique = tuple(dict.fromkeys(place))
                instructions.append(Instruction(found[1], control >> 5 & 7, control >> 11 & 63, unique))
                is_place_whole = True
        assert instructions, f"{file}: no {kernel}"
        return cls(instructions, labels)

    @cached_property
    def next(self) -> list[tuple[int, ...]]:
        """The instructions that may follow each."""
        joins: dict[str, set[int]] = {}
        for instruction in self.instructions:
            if instruction.operation.startswith("BSSY"):
                register, label = re.findall(r"(B\d+), `\((\.L_\w+)\)", instruction.text)[0]
                joins.setdefault(register, set()).add(self.labels[label])
        return [self._after(i, x, joins) for i, x in enumerate(self.instructions)]

    def _after(self, index: int, instruction: Instruction, joins: dict[str, set[int]]) -> tuple[int, ...]:
        operation, text = instruction.operation, instruction.text
        follows = (index + 1,) if index + 1 < len(self.instructions) else ()
        is_conditional = text.startswith("@")
        if operation.startswith(("BRX", "JMX", "JMP")):
            raise AssertionError(f"not followed: {text}")
        if operation.startswith(("EXIT", "RET")):
            return follows if is_conditional else ()
        if operation.startswith("BSYNC"):  # to the label of its BSSY, which is most often what follows
            targets = joins[text.split()[-1]]
            return follows if index + 1 in targets else (*follows, *targets)
        if operation.startswith(("BRA", "CALL")):
            target = self.labels[re.findall(r"`\((\S+?)\)", text)[0]]
            goes_on = is_conditional or operation.startswith("CALL") or not re.search(r"BRA\S* `", text)
            return (*(follows if goes_on else ()), target)
        return follows


def is_shared_load(instruction: Instruction) -> bool:
    return instruction.operation.startswith("LDS")


NO_SCOREBOARD = 7
Pending = dict[int, frozenset[str]]
"""Loads under way, each with the scoreboards and registers of which any says that it has ended."""


def loads_under_way(code: Code, at: Iterable[int]) -> dict[int, set[int]]:
    """Return, for each of the instructions `at`, the loads from shared memory that may be under way when it is issued.

    Such a load is before it on some path, on which no instruction waits for the scoreboard of this load or of a later
    one, or names a register that they bring: a warp's loads from shared memory end in order. ptxas relies on that, too:
    it gives some loads no scoreboard, where it waits for what follows them.
    """
    before: dict[int, Pending] = {0: {}}
    todo = [0]
    while todo:
        index = todo.pop()
        after = _after(code.instructions[index], index, before[index])
        for successor in code.next[index]:
            known = before.get(successor)
            joined = after if known is None else _joined(known, after)
            if joined != known:
                before[successor] = joined
                todo.append(successor)
    return {index: set(_not_ended(code.instructions[index], before.get(index, {}))) for index in at}


def _joined(one: Pending, other: Pending) -> Pending:
    both = one.keys() & other.keys()
    return one | other | {load: one[load] & other[load] for load in both}


def _after(instruction: Instruction, index: int, before: Pending) -> Pending:
    pending = _not_ended(instruction, before)
    if not is_shared_load(instruction):
        return pending
    first, count = int(re.findall(r"\bR(\d+)", instruction.text)[0]), {"64": 2, "128": 4}
    size = count.get(instruction.operation.rsplit(".", 1)[-1], 1)
    own = {f"R{first + i}" for i in range(size)}
    if instruction.sets != NO_SCOREBOARD:
        own.add(f"scoreboard {instruction.sets}")
    pending = {load: says | own for load, says in pending.items()}
    return pending | {index: frozenset(own)}


def _not_ended(instruction: Instruction, pending: Pending) -> Pending:
    if not pending:
        return pending
    says = set(re.findall(r"\bR\d+", instruction.text))
    says |= {f"scoreboard {board}" for board in range(6) if instruction.waits >> board & 1}
    return {load: of_load for load, of_load in pending.items() if not says & of_load} if says else pending


def reached(code: Code, start: int, ends: set[int]) -> set[int]:
    """Return the instructions that may follow `start` before one of `ends` does; these are not followed further."""
    found: set[int] = set()
    todo = list(code.next[start])
    while todo:
        index = todo.pop()
        if index in found or index in ends:
            continue
        found.add(index)
        todo.extend(code.next[index])
    return found
