"""Private names of vLLM that packed-kv overrides or calls: whether a vLLM has them as packed-kv knows them.

An override that no method of vLLM has any more is dead code, and vLLM's own method would read packed bytes as numbers.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from .survey import Tree


class Private(NamedTuple):
    """A private function or method. `owner`: its class; "": it is a function. `parameters`: the names, without `self`
    and `cls`, that our override takes or our call gives, in order. `since`: the first version that needs it."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]
    since: str = "0.31.0"


_MLA = "vllm.model_executor.layers.attention.mla_attention"
_PREFIX = ("q", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale")
PRIVATE = (
    Private(_MLA, "MLACommonBaseImpl", "_compute_prefill_context", _PREFIX, "0.32.0"),
    Private(_MLA, "MLACommonBaseImpl", "_context_parallel_compute_prefill_context", _PREFIX, "0.32.0"),
    Private(_MLA, "MLACommonBaseImpl", "_concat_k_nope_k_pe", ("k_nope", "k_pe"), "0.32.0"),
    Private(
        _MLA, "MLACommonMetadataBuilder", "_build_decode",
        ("block_table_tensor", "seq_lens_device", "max_seq_len", "query_start_loc_cpu", "query_start_loc_device",
         "num_decode_tokens", "max_query_len", "dcp_tot_seq_lens_device"), "0.32.0",
    ),
    Private(
        "vllm.v1.attention.backend", "AttentionMetadataBuilder", "_init_reorder_batch_threshold",
        ("reorder_batch_threshold", "supports_spec_as_decode"),
    ),
    Private("vllm.models.kimi_k3.nvidia.mla", "MultiHeadLatentAttention", "_attention",
            ("positions", "q", "kv_c_normed", "k_pe", "attn_out"), "0.33.0"),
    Private("vllm.v1.core.kv_cache_utils", "", "_gen_lora_extra_hash_keys", ("request",)),
    Private("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry", "_ensure_registered", ()),
    Private("vllm.v1.attention.backends.cpu_attn", "", "_get_attn_isa", ("dtype", "block_size", "head_size")),
)  # fmt: skip


def faults(tree: Tree, version: str) -> Iterator[str]:
    """Each name that a vLLM of this version lacks or has with other parameters, one line each."""
    for wanted in PRIVATE:
        if _numbers(version) < _numbers(wanted.since):
            continue
        where = ".".join(filter(None, (wanted.module, wanted.owner, wanted.name)))
        found = _function(tree, wanted)
        if found is None:
            yield f"vllm {version}: no {where}, which packed-kv overrides or calls"
            continue
        names = [argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
        names = names[names[:1] in (["self"], ["cls"]) :]
        if tuple(names[: len(wanted.parameters)]) != wanted.parameters:
            expected = ", ".join(wanted.parameters)
            yield f"vllm {version}: {where} takes ({', '.join(names)}), packed-kv knows it with ({expected})"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3])


def _function(tree: Tree, wanted: Private) -> ast.FunctionDef | None:
    node = tree.definition(wanted.module, wanted.owner or wanted.name)
    if wanted.owner:
        body = node.body if isinstance(node, ast.ClassDef) else []
        node = next((x for x in body if isinstance(x, ast.FunctionDef) and x.name == wanted.name), None)
    return node if isinstance(node, ast.FunctionDef) else None
