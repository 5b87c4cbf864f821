"""Defaults of fields that a config.json may leave out, by model type, as transformers' config classes declare them.

For a nested config, transformers does not write fields that have their class's default, and models are published that
way. `config_defaults.json` has the defaults of the fields that are read here; scripts/architectures/config_defaults.py
writes it. Types that are not in it have no defaults. No torch and no transformers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Config = dict[str, Any]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
EXPERT_INNER = ("moe_intermediate_size", "expert_hidden_dim", "expert_ffn_hidden_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token",
)  # fmt: skip
SYNONYMS = (
    LAYERS, HEADS, HIDDEN, KV_HEADS, HEAD_DIM, LENGTHS, INNER, EXPERT_INNER, EXPERTS, SHARED_EXPERTS, EXPERTS_PER_TOKEN,
)  # fmt: skip
"""Names of one field in several model families, in the order in which they are read."""


def text_type(kind: str) -> str:
    """Model type of the nested text config in a config of a type; "": there is none, or the type is not known."""
    return str(_table().get(kind, {}).get("text_config", ""))


def with_defaults(config: Config, *kinds: str) -> Config:
    """The config plus defaults of fields that it has under no name; the default comes from the first of `kinds` that
    has one."""
    for row in (_table().get(kind, {}) for kind in kinds):
        given = {name for names in SYNONYMS if not {*names}.isdisjoint(config) for name in names} | {"text_config"}
        config = {name: value for name, value in row.items() if name not in given} | config
    return config


@cache
def _table() -> dict[str, Config]:
    file = Path(__file__).with_name("config_defaults.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))
