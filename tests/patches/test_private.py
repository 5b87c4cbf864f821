"""Private methods of vLLM that packed-kv overrides or calls exist, with their parameters.

Here in the installed vLLM; `packed-kv-patch verify`, which `scripts/test.sh --all` runs, checks each pinned wheel.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import FunctionType

import pytest
import vllm
from checkout import REPO
from packed_kv_patches import private, survey

PACKAGE = REPO / "overlay" / "packed_kv"
IMPLEMENTATIONS = (
    "attention.impl PackedAttentionImpl", "attention.metadata PackedMetadataBuilder",
    "attention.latent.impl LatentAttentionImpl", "attention.sparse.impl SparseLatentImpl",
    "attention.latent.metadata LatentMetadataBuilder", "attention.sparse.metadata SparseLatentBuilder",
)  # fmt: skip
SITE = Path(vllm.__file__).parents[1]
KNOWN = {wanted.name for wanted in private.PRIVATE}


def version() -> str:
    return vllm.__version__.split("+")[0]


def test_installed_vllm_has_them() -> None:
    assert not list(private.faults(survey.Tree(SITE), version()))


@pytest.mark.parametrize("what", IMPLEMENTATIONS)
def test_each_override_is_listed(what: str) -> None:
    module, name = what.split()
    kind = getattr(importlib.import_module(f"packed_kv.{module}"), name)
    ours, theirs = (
        {x for base in kind.__mro__ if base.__module__.startswith(package) for x in methods(base)}
        for package in ("packed_kv.", "vllm.")
    )
    assert ours & theirs <= KNOWN


def methods(kind: type) -> list[str]:
    """Names of the private methods that a class defines."""
    kinds = FunctionType, classmethod, staticmethod
    return [name for name, x in vars(kind).items() if is_private(name) and isinstance(x, kinds)]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_each_inherited_method_that_is_called_is_listed() -> None:
    """Of `self` and `super()`, those that no class of ours defines."""
    called, defined = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of, name = ast.unparse(node.func.value), node.func.attr
                if of in ("self", "super()") and is_private(name):
                    called.add(name)
    assert "_concat_k_nope_k_pe" in called - defined <= KNOWN


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("def _concat_k_nope_k_pe(", "def _concatenate(", "no vllm.model_executor.layers.attention.mla_attention"),
        (
            "self, k_nope: torch.Tensor, k_pe: torch.Tensor",
            "self, k_pe: torch.Tensor, k_nope: torch.Tensor",
            "takes (k_pe",
        ),
    ],
)
def test_renamed_methods_and_other_parameters_are_found(old: str, new: str, fault: str) -> None:
    file = "vllm/model_executor/layers/attention/mla_attention.py"
    text = (SITE / file).read_text()
    assert old in text
    (found,) = private.faults(survey.Tree(SITE, {file: text.replace(old, new).encode()}), version())
    assert fault in found
