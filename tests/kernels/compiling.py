"""Compile Triton kernels for GPUs that need not be there, and read what ptxas made of them.

    resources = compile_kernels([Case(kernel="packed_kv.kernels.triton.store:store_kernel", ...)])

A process in which triton was imported for its interpreter cannot compile, so one child process does it all. Its start
takes as long as a compile: it stays for the next one, until its parent ends.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from machine_code import dump, resources


@dataclass(frozen=True)
class Case:
    """One variant of a kernel.

    `kernel` is "module:function"; `types` the triton types ("*u8", "i32") of its arguments that are not constexpr, of
    records by field; `constants` the constexpr ones. Arguments in `types` are taken to be multiples of 16 unless listed
    in `unaligned`. `made_for`: the compute capability of IR and PTX, if it is not that of `arch`.
    """

    kernel: str
    arch: int
    types: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    unaligned: tuple[str, ...] = ()
    made_for: tuple[int, int] | None = None


@dataclass(frozen=True)
class Resources:
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    ttgir: str
    ptx: str
    sass: str

    @property
    def spills(self) -> bool:
        return self.stack_bytes > 0 or self.local_bytes > 0 or bool(re.search(r"\b(LDL|STL)\b", self.sass))

    def count(self, instruction: str) -> int:
        """Number of SASS instructions whose name begins so."""
        return len(re.findall(rf"\s{re.escape(instruction)}", self.sass))

    def loop(self) -> list[str]:
        """The instructions on the usual path of the loop over pages: the first backward branch ends it, and what a
        branch inside skips is for the tiles at the ends alone."""
        lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?;)", self.sass)
        code = [(int(address, 16), text) for address, text in lines]
        found = ((at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)) for at, text in code)
        jumps = [(at, int(target[1], 16)) for at, target in found if target]
        end, begin = next((at, target) for at, target in jumps if target < at)
        skipped = [(at, target) for at, target in jumps if begin <= at < target <= end]
        assert skipped, "the branch around the tiles at the ends is gone"
        return [text for at, text in code if begin <= at <= end and not any(a < at < b for a, b in skipped)]


@cache
def _child(triton: Path | None = None) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in (triton, *sys.path) if path)
    child = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )  # fmt: skip
    atexit.register(child.communicate)  # it ends where its input does
    return child


def _ask(child: subprocess.Popen[bytes], function: str, cases: list[Case]) -> list[Any]:
    assert child.stdin is not None and child.stdout is not None
    pickle.dump((function, [vars(case) for case in cases]), child.stdin)
    child.stdin.flush()
    results = pickle.load(child.stdout)
    if isinstance(results, str):
        raise RuntimeError(results)
    return results


def compile_kernels(cases: list[Case]) -> list[Resources]:
    return [Resources(**result) for result in _ask(_child(), _compile.__name__, cases)]


def translate_kernels(cases: list[Case], triton: Path) -> list[str]:
    """Triton's IR of the cases, by the Triton of a folder: what another version's language takes."""
    return _ask(_child(triton), _translate.__name__, cases)


EXACT_FMAS = 16
"""Of a store kernel that looks up levels: of a step and two of them, whose products are exact, for each of a lane's 8
values."""


def check_look_ups(stored: Resources) -> None:
    """A lane has the word of its bin, and `shfl` asks for lanes: right only while none of these tensors moves between
    them. Others may, of other shapes."""
    lanes, asking = (
        set(re.findall(rf"{name}.*-> tensor<(\d+)x[if]32,", stored.ttgir)) for name in ("%laneid", "shfl.sync.idx")
    )
    assert len(lanes) == 1 and lanes == asking, (lanes, asking)
    assert not re.search(rf"convert_layout .*: tensor<{lanes.pop()}x[if]32,", stored.ttgir)


def _leaves(place: tuple[int, ...], kind: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    """The places and types of an argument, or of a record's fields."""
    if isinstance(kind, tuple):
        for i, field_type in enumerate(kind):
            yield from _leaves((*place, i), field_type)
    else:
        yield place, kind


SAME_IR = {86: 80, 89: 80}
"""Compute capability -> the one whose TritonGPU IR Triton 3.8 makes for it, too: LLVM and ptxas compile it for each."""


def _by_triton(case: Case) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", case.arch, 32)
    if case.made_for is not None:
        import older_gpu
        import pytest

        with pytest.MonkeyPatch.context() as patch:
            older_gpu.compile_for(patch, case.made_for)
            return triton.compile(_source(case), target=target, options=case.options)
    if case.arch in SAME_IR and triton.__version__ == "3.8.0":
        made_for = SAME_IR[case.arch]
        text = _by_triton(replace(case, arch=made_for)).asm["ttgir"]
        with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
            file.write(text.replace(f'"cuda:{made_for}"', f'"cuda:{case.arch}"'))
            file.flush()
            return triton.compile(file.name, target=target, options=case.options)
    return triton.compile(_source(case), target=target, options=case.options)


def _source(case: Case) -> Any:
    from triton.compiler import ASTSource

    module, name = case.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    attributes = {
        place: [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in case.types and name not in case.unaligned
        for place, kind in _leaves((i,), signature[name])
        if not kind.startswith("fp")
    }
    return ASTSource(kernel, signature, constexprs=case.constants, attrs=attributes)


def _translate(case: Case) -> str:
    """The kernel in Triton's IR, before any pass."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target, context = GPUTarget("cuda", case.arch, 32), ir.context()
    backend = make_backend(target)
    options = backend.parse_options(case.options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(_source(case).make_ir(target, options, functions, modules, context))


def _compile(case: Case) -> dict[str, Any]:
    compiled = _by_triton(case)
    (cubin,) = (Path(path) for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    (used,) = resources(cubin).values()
    return dict(
        registers=used[0],
        stack_bytes=used[1],
        local_bytes=used[2],
        shared_bytes=compiled.metadata.shared,
        ttgir=compiled.asm["ttgir"],
        ptx=compiled.asm["ptx"],
        sass=dump("--dump-sass", cubin),
    )


def _answer(function: str, cases: list[dict[str, Any]]) -> list[Any] | str:
    """The results of cases, or why there are none."""
    try:
        return [globals()[function](Case(**case)) for case in cases]
    except Exception:  # of any kind: the process that asked raises it
        return traceback.format_exc()


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed on the way does not reach the pickles
    while sys.stdin.buffer.peek(1):
        pickle.dump(_answer(*pickle.load(sys.stdin.buffer)), output)
        output.flush()
