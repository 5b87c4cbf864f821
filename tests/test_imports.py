"""The package's import graph, lazy and TYPE_CHECKING imports included: no cycle, floors, who imports vLLM and torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from checkout import REPO

PACKAGE = REPO / "overlay" / "packed_kv"
FLOORS = (
    "formats", "layout", "gpu_generations", "private_file", "json_file", "child_process", "model", "refusals",
    "channel_calibration", "calibration_content", "calibration_file", "codecs", "reference", "kernels",
    "packed_vectors", "vllm_compat", "settings", "window", "attention", "sharing", "planning", "engine", "plugin",
)  # fmt: skip
"""Rooms from the bottom up. A module imports its own room and those below it."""
BESIDE = {
    "__init__": {"formats", "codecs"},
    "transformers": {
        "formats",
        "layout",
        "json_file",
        "model",
        "channel_calibration",
        "calibration_file",
        "codecs",
        "kernels",
        "packed_vectors",
    },
    "lmcache": {"formats", "codecs"},
    "selftest": {
        "formats",
        "layout",
        "gpu_generations",
        "child_process",
        "refusals",
        "codecs",
        "kernels",
        "reference",
        "vllm_compat",
        "window",
        "attention",
    },
    "commands": {
        "formats",
        "layout",
        "gpu_generations",
        "private_file",
        "json_file",
        "child_process",
        "model",
        "refusals",
        "planning",
        "calibration_file",
        "kernels",
    },
}
"""Rooms that no floor imports, and what they import besides themselves."""
KNOWS_VLLM = {"vllm_compat", "settings", "window", "attention", "sharing", "engine", "plugin", "selftest"}
PROBE = "commands.probe"
"""Imports vLLM, in a process of its own."""
NO_TORCH = {
    "formats", "layout", "gpu_generations", "private_file", "json_file", "child_process", "model", "refusals",
    "channel_calibration", "calibration_content", "calibration_file", "planning", "commands",
}  # fmt: skip
THIRD_PARTY = {"torch", "triton", "vllm", "transformers"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if parts[-1] == "__init__" and len(parts) > 1 else ".".join(parts)


def room(module: str) -> str:
    return module.partition(".")[0]


@cache
def graph() -> dict[str, set[str]]:
    """Module -> what it imports: modules of the package, and third parties by their first name.

    `from .room import name` counts as an import of room.name if that is a module. A room's `__init__` stands for the
    room; that of the package for itself only where something is imported from it.
    """
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        package = ("packed_kv", *path.relative_to(PACKAGE).parts[:-1])
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parents = package[: len(package) - node.level + 1] if node.level else ()
                base = ".".join((*parents, *filter(None, [node.module])))
                names |= {f"{base}.{alias.name}" for alias in node.names}
        found[module] = {target for name in names if (target := _target(name, files)) not in ("", module)}
    return found


def _target(name: str, files: dict[str, Path]) -> str:
    """The node of the graph that a dotted name belongs to; empty for other packages."""
    first, *rest = name.split(".")
    if first != "packed_kv":
        return first if first in THIRD_PARTY else ""
    while rest and ".".join(rest) not in files:
        rest.pop()
    return ".".join(rest) or "__init__"


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach themselves, in groups that reach each other."""
    reached = {module: reachable(edges, module) for module in edges}
    groups = {
        frozenset(other for other in reached[module] if other in edges and module in reached[other])
        for module in edges
        if module in reached[module]
    }
    return sorted(map(sorted, groups))


def reachable(edges: dict[str, set[str]], module: str) -> set[str]:
    """Return what importing a module may come to import, at whatever time."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = edges.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def test_the_walk_finds_lazy_and_typing_imports():
    """Else the tests below would hold an empty graph."""
    assert "engine.backend" in graph()["engine.registration"], "imported in a function"
    assert "vllm" in graph()["sharing.fingerprint"], "imported for types"
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "vllm"}}) == [["b", "c"]]


def test_no_cycle():
    assert cycles(graph()) == []


@pytest.mark.parametrize("module", sorted(graph()))
def test_imports_run_downwards(module: str):
    own = room(module)
    imported = {room(name) for name in graph()[module] - THIRD_PARTY} - {own}
    assert own in FLOORS or own in BESIDE, f"new room {own}: give it a floor"
    allowed = BESIDE[own] if own in BESIDE else {*FLOORS[: FLOORS.index(own)]}
    assert imported <= allowed | ({"vllm_compat"} if module == PROBE else set())


@pytest.mark.parametrize("module", sorted(graph()))
def test_who_imports_vllm_and_torch(module: str):
    if module != PROBE:
        assert "vllm" not in graph()[module] or room(module) in KNOWS_VLLM
    if room(module) in NO_TORCH and module != PROBE:
        assert not reachable(graph(), module) & THIRD_PARTY


PRIVATE_OF_VLLM = "vllm_compat"
"""The module that may use private names of vLLM."""
PROTECTED = {
    "_asdict", "_replace",  # of named tuples
    "_actions", "_SubParsersAction",  # of argparse
    "_block_hashes_begun",  # our mark on a request of vLLM
    "_init_reorder_batch_threshold", "_concat_k_nope_k_pe",  # of base classes of vLLM, for those derived from them
}  # fmt: skip


def private_names(source: str) -> tuple[set[str], set[str]]:
    """Private names that a module defines or sets on its own objects, and those that it reads of any object."""
    defined, read = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (defined if is_own and isinstance(node.ctx, ast.Store) else read).add(node.attr)
    return defined, read


def private_imports(source: str) -> set[str]:
    """Private modules and names of vLLM that a module imports, by their whole names."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in imported if name.startswith("vllm.") and "._" in name}


def test_private_names_of_vllm_are_imported_in_one_module():
    found = {module_name(path): private_imports(path.read_text()) for path in PACKAGE.rglob("*.py")}
    foreign = {module: names for module, names in found.items() if names}
    assert [*foreign] == [PRIVATE_OF_VLLM], foreign


def test_all_kinds_of_private_imports_are_found():
    source = (
        "from __future__ import annotations\nfrom ._room import _name\nfrom vllm.v1 import public\n"
        "def f():\n    from vllm.a import b, _c as d\n    import vllm._d\n    from vllm._e.f import g\n"
    )
    assert private_imports(source) == {"vllm.a._c", "vllm._d", "vllm._e.f.g"}


def test_private_names_of_vllm_are_read_in_one_module():
    found = {module_name(path): private_names(path.read_text()) for path in PACKAGE.rglob("*.py")}
    ours = set().union(*(defined for defined, _ in found.values())) | PROTECTED
    foreign = {module: names for module, (_, read) in found.items() if (names := read - ours)}
    assert [*foreign] == [PRIVATE_OF_VLLM], foreign
