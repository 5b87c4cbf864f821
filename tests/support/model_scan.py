"""Reads vLLM's registry of models and its models' sources, and says which layers are not vLLM's plain causal ones.

A model's sources are the definitions that its class reaches by name, within vLLM's models. A sign is a short text, as
"layer RSWAAttention" or "backend: FlintAttention"; a model may have it only under some options of its config.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

from packed_kv_patches.survey import Tree

MODELS = ("vllm.model_executor.models", "vllm.models")
LAYERS = "vllm.model_executor.layers.attention"
PLAIN = ("Attention", "ChunkedLocalAttention", "MLAAttention")
"""Layers of vLLM that packed pages serve. `MMEncoderAttention` has no cache."""
BASES = (*PLAIN, "AttentionLayerBase")
KNOWN_OPTIONS = {
    "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "cache_config", "quant_config",
    "logits_soft_cap", "per_layer_sliding_window", "prefix", "attn_type", "kv_sharing_target_layer_name",
    "head_size_v", "sinks", "mm_prefix_clamp_sliding_window", "attn_backend", None,
}  # fmt: skip
"""Arguments of `Attention` that it takes itself or that `PackedAttentionImpl` knows."""
CACHE_WRITERS = ("reshape_and_cache", "concat_and_cache", "do_kv_cache_update")
CACHE_CHECKS = ("cache_dtype", "get_name()", "attn_backend")


class Definition(NamedTuple):
    """A class, a function or a constant: its signs, and the names of vLLM's models that it uses."""

    signs: frozenset[str]
    names: frozenset[tuple[str, str]]


class Scan:
    """One vLLM."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.modules: dict[str, dict[str, list[ast.stmt | tuple[str, str]]]] = {}
        self.definitions: dict[tuple[str, str], Definition] = {}
        self.registry = dict(self._registry())
        """Architecture -> module and class."""

    @functools.cached_property
    def signs(self) -> dict[str, set[str]]:
        """Architecture -> its signs; those without any are left out."""
        found = {name: self._signs_of(place) for name, place in self.registry.items()}
        for name in self._made_bidirectional():
            found.setdefault(name, set()).add("not causal by vLLM's config")
        return {name: signs for name, signs in found.items() if signs}

    def _registry(self) -> Iterator[tuple[str, tuple[str, str]]]:
        for name, table in self._constants("registry", "_MODELS"):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and not name.startswith("_PREV"):
                    module, cls = ast.literal_eval(value)
                    yield key.value, (module if "." in module else f"{MODELS[0]}.{module}", cls)

    def _made_bidirectional(self) -> set[str]:
        """Architectures whose configs vLLM changes to `is_causal` False, whatever they say."""
        classes = {n.name: n for n in self._module("config").body if isinstance(n, ast.ClassDef)}
        changing = set()
        for name, node in classes.items():
            for method in (n for n in node.body if isinstance(n, ast.FunctionDef)):
                lines = [ast.unparse(statement) for statement in method.body]  # not those under a condition
                changing |= {name} if any(line.endswith("is_causal = False") for line in lines) else set()
        (table,) = (table for _, table in self._constants("config", "MODELS_CONFIG_MAP"))
        pairs = zip(table.keys, table.values, strict=True)
        return {key.value for key, value in pairs if isinstance(key, ast.Constant) and _word(value) in changing}

    def _module(self, name: str) -> ast.Module:
        found = self.tree.module(f"{MODELS[0]}.{name}")
        assert found is not None, name
        return found[1]

    def _constants(self, module: str, ending: str) -> Iterator[tuple[str, ast.Dict]]:
        for node in self._module(module).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
                continue
            if _target(node).endswith(ending):
                yield _target(node), node.value

    def _signs_of(self, place: tuple[str, str]) -> set[str]:
        seen, waiting, signs = set(), [place], set()
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                found = self._definition(place)
                signs |= found.signs
                waiting += found.names
        return signs

    def _definition(self, place: tuple[str, str]) -> Definition:
        if place not in self.definitions:
            module, name = place
            names, signs = set(), set()
            for found in self._names(module).get(name, ()):
                if isinstance(found, tuple):
                    if found[0].startswith(MODELS) and self.tree.module(".".join(found)) is None:
                        names.add(found)
                    continue
                signs |= set(self._read(module, name, found))
                for node in ast.walk(found):
                    if isinstance(node, ast.Name):
                        names.add((module, node.id))
                    elif isinstance(node, ast.Constant) and node.value in self.registry:  # a part of a larger model
                        names.add(self.registry[node.value])
            self.definitions[place] = Definition(frozenset(signs), frozenset(names))
        return self.definitions[place]

    def _names(self, module: str) -> dict[str, list[ast.stmt | tuple[str, str]]]:
        """Return the definitions of a module, and where it imports the rest from."""
        if module in self.modules:
            return self.modules[module]
        names: dict[str, list[ast.stmt | tuple[str, str]]] = {}
        self.modules[module] = names
        found = self.tree.module(module)
        if found is None:
            return names
        file, parsed = found
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        for node in ast.walk(parsed):
            if isinstance(node, ast.ImportFrom):
                parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(part for part in (parent, node.module) if part)
                for alias in node.names:
                    names.setdefault(alias.asname or alias.name, []).append((source, alias.name))
        waiting: list[ast.AST] = list(parsed.body)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                names.setdefault(_word(node.targets[0] if isinstance(node, ast.Assign) else node.target), []).append(
                    node
                )
            elif isinstance(node, ast.If | ast.Try):
                waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        return names

    def _layer(self, module: str, node: ast.expr) -> str:
        """The class of vLLM's attention layers that an expression names, or ""."""
        sources = (found for found in self._names(module).get(_word(node), ()) if isinstance(found, tuple))
        return next((name for source, name in sources if source.startswith((LAYERS, "vllm.attention"))), "")

    def _read(self, module: str, name: str, definition: ast.stmt) -> Iterator[str]:
        """Signs of one definition."""
        makes_layer = False
        if isinstance(definition, ast.ClassDef):
            bases = [self._layer(module, base) for base in definition.bases]
            yield from (f"class {name} of {base}" for base in bases if base in BASES)
        for node in ast.walk(definition):
            if isinstance(node, ast.Call):
                layer = self._layer(module, node.func)
                makes_layer |= layer in PLAIN
                yield from self._read_call(name, node, layer)
            elif _refuses_caches(node):
                yield f"check: {name}"
        if makes_layer and any(isinstance(x, ast.Attribute) and x.attr == "kv_cache" for x in ast.walk(definition)):
            yield f"cache: {name}"

    def _read_call(self, name: str, call: ast.Call, layer: str) -> Iterator[str]:
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        called = _word(call.func)
        if called.startswith(CACHE_WRITERS):
            yield f"cache: {name}"
        if called == "get_attn_backend" or called.startswith("subclass_attention_backend"):
            yield f"backend: {name}"
        if not isinstance(options.get("attn_backend", ast.Constant(None)), ast.Constant):
            yield f"backend: {name}"
        if (
            isinstance(options.get("use_sparse"), ast.Constant | ast.Name)
            and ast.unparse(options["use_sparse"]) == "True"
        ):
            yield f"sparse: {name}"
        if layer.endswith("Attention") and layer not in (*PLAIN, "MMEncoderAttention"):
            yield f"layer {layer}"
        if layer == "Attention":
            if not {"cache_config", None} & set(options):
                yield f"no cache_config: {name}"
            if not isinstance(options.get("alibi_slopes", ast.Constant(None)), ast.Constant):
                yield f"ALiBi: {name}"
            if None in options:
                yield f"option **: {name}"
            yield from (f"option {option}: {name}" for option in options if option not in KNOWN_OPTIONS)


def _word(node: ast.AST) -> str:
    """The last name of an expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    return _word(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def _refuses_caches(node: ast.AST) -> bool:
    """True if a statement asserts something of a KV-cache dtype or of a backend, or raises because of it."""
    if isinstance(node, ast.If):
        is_check = any(isinstance(statement, ast.Raise) for statement in node.body)
    else:
        is_check = isinstance(node, ast.Assert)
    return is_check and any(word in ast.unparse(node.test) for word in CACHE_CHECKS)
