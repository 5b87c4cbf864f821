"""Signatures are short: an `__init__`, that of a dataclass or a NamedTuple included, has up to 8 parameters, any other
function up to 12."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from checkout import REPO

ROOMS = ("overlay", "calibration", "quality", "vllm_patches", "scripts", "benchmarks", "examples", "tests")
MOST, MOST_OF_INIT = 12, 8
EXCEPTIONS = {
    "vLLM gives these arguments": (
        "overlay/packed_kv/attention/impl.py PackedAttentionImpl",
        "overlay/packed_kv/attention/latent/base.py PackedLatents",
        "tests/support/sparse_models.py pick_on_cuda",
    ),
    "a batch's metadata, as vLLM has one class for each kind of attention": (
        "overlay/packed_kv/attention/metadata.py PackedMetadata",
    ),
    "tensors side by side, each with a name and a shape": (
        "overlay/packed_kv/attention/sparse/flash.py SparseMemory",
        "calibration/tq_calibrate/statistics.py LayerStatistics",
    ),
    "constants that a kernel is compiled with": (
        "overlay/packed_kv/kernels/cuda/launch.py PairVariant",
        "overlay/packed_kv/kernels/kernel_layout.py PackedVector",
    ),
    "columns of a table that is printed or written to a file": (
        "overlay/packed_kv/planning/plan.py Row",
        "quality/packed_kv_quality/generation.py Continuation",
    ),
    "settings of a command, as its report has them": (
        "quality/packed_kv_quality/generation.py GenerationSettings",
        "quality/packed_kv_quality/measurement.py Settings",
    ),
    "fields for all kinds of layers, of which each has few": ("overlay/packed_kv/model/shape.py ModelLayer",),
    "cases of tests, which name by keyword what differs from the defaults": (
        "tests/kernels/cuda/test_cuda_latent.py Case",
        "tests/kernels/cuda/test_cuda_picks.py Case",
        "tests/kernels/cuda/test_cuda_prefix.py run",
        "tests/kernels/test_block_bias.py run",
        "tests/kernels/triton/test_decode.py run",
        "tests/kernels/triton/test_ring.py run",
        "tests/support/launchers.py decode",
        "tests/support/launchers.py decode_latents",
    ),
}
"""Reason -> file and name of each function, or of the class whose `__init__` it is."""


def called(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters without `self` and `cls`, and without `*args` and `**options`, which are passed on."""
    given = function.args
    names = [parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def fields(node: ast.ClassDef) -> int:
    """Parameters of the `__init__` that a dataclass or a NamedTuple gets from the fields in its body; 0: of another
    class."""
    made = any(called(name).split(".")[-1] == "dataclass" for name in node.decorator_list)
    if not made and "NamedTuple" not in map(called, node.bases):
        return 0
    annotations = [ast.unparse(line.annotation) for line in node.body if isinstance(line, ast.AnnAssign)]
    return sum("ClassVar" not in annotation for annotation in annotations)


def long_ones(source: str) -> Iterator[str]:
    """Names of functions with too many parameters, and of classes whose `__init__` has."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            inits = [line for line in node.body if isinstance(line, ast.FunctionDef) and line.name == "__init__"]
            is_long = max([fields(node), *map(count, inits)]) > MOST_OF_INIT
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            is_long = count(node) > MOST
        else:
            continue
        if is_long:
            yield node.name


def test_signatures_are_short() -> None:
    found = {
        f"{path.relative_to(REPO)} {name}"
        for room in ROOMS
        for path in sorted((REPO / room).rglob("*.py"))
        for name in long_ones(path.read_text())
    }
    excepted = {place for places in EXCEPTIONS.values() for place in places}
    assert not found - excepted, "group what belongs together into a record"
    assert not excepted - found, "no exception any more"


def test_all_kinds_of_signatures_are_counted() -> None:
    names = [f"a{i}" for i in range(13)]
    body = "\n".join(f"    {name}: int = 0" for name in names[:9])
    cases = {
        f"def F({', '.join(names)}): ...": ["F"],
        f"async def F({', '.join(names[:6])}, *, {', '.join(names[6:])}): ...": ["F"],
        f"def F({', '.join(names[:12])}, *args, **more): ...": [],
        f"@triton.jit(a=1)\ndef F({', '.join(names)}): ...": ["F"],
        f"class C:\n    def f(self, {', '.join(names[:12])}): ...": [],
        f"class C:\n    def __init__(self, {', '.join(names[:9])}): ...": ["C"],
        f"class C:\n    def __init__(self, {', '.join(names[:8])}): ...": [],
        f"@dataclasses.dataclass(frozen=True)\nclass C:\n{body}": ["C"],
        f"@dataclass\nclass C:\n{body[: body.rindex('    ')]}    a: ClassVar[int] = 1": [],
        f"class C(NamedTuple):\n{body}": ["C"],
        f"class C(Protocol):\n{body}": [],
    }
    assert {source: list(long_ones(source)) for source in cases} == cases
