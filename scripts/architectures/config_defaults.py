#!/usr/bin/env python3
"""Writes overlay/packed_kv/model/config_defaults.json: defaults of the installed transformers' config classes.

    python scripts/architectures/config_defaults.py

A row is a class of `TEXT`: the defaults that its fields of `FIELDS` declare; or a class of `OUTER`, with a nested
config: the type of its text, and defaults of its own for it. vLLM reads configs of these types by transformers'
classes, not by its own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

FILE = Path(__file__).parents[2] / "overlay" / "packed_kv" / "model" / "config_defaults.json"
TEXT = (
    "afmoe", "apertus", "arcee", "aria_text", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
    "emu3_text_model", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo", "gemma",
    "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe_text", "glm4v_text", "glm_moe_dsa", "glm_ocr_text", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hy_v3", "jais2", "jamba", "laguna",
    "lfm2", "lfm2_moe", "llama", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2",
    "ministral3", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "paddleocr_vl_text", "phi", "phi3", "phimoe", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe",
    "qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text",
    "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "zamba2",
)  # fmt: skip
OUTER = (
    "aria", "audioflamingo3", "blip-2", "cohere2_vision", "emu3", "exaone4_5", "gemma3", "gemma3n", "gemma4",
    "gemma4_unified", "glm4v", "glm4v_moe", "glm_ocr", "glmasr", "granite4_vision", "granite_speech",
    "granite_speech_plus", "hunyuan_vl", "idefics3", "internvl", "lfm2_vl", "llama4", "llava", "llava_next",
    "llava_next_video", "llava_onevision", "minicpmv4_6", "minicpmv4_7", "mistral3", "paddleocr_vl", "paligemma",
    "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl",
    "qwen3_vl_moe", "smolvlm", "vibevoice_asr", "voxtral",
)  # fmt: skip
FIELDS = frozenset((
    "vocab_size", "tie_word_embeddings", "max_position_embeddings", "n_positions", "max_seq_len", "hidden_size",
    "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_attention_heads", "n_head",
    "n_heads", "num_heads", "num_key_value_heads", "head_dim", "attention_head_dim", "kv_channels", "v_head_dim",
    "global_head_dim", "num_global_key_value_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "index_topk", "index_head_dim", "index_topk_freq",
    "sliding_window", "use_sliding_window", "max_window_layers", "attention_chunk_size", "num_kv_shared_layers",
    "attn_layer_period", "attn_layer_offset", "full_attention_interval", "multi_query", "intermediate_size",
    "intermediate_size_mlp", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size",
    "expert_ffn_hidden_size", "shared_expert_intermediate_size", "shared_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts", "num_shared_experts",
    "moe_num_shared_experts", "num_experts_per_tok", "moe_k", "moe_topk", "decoder_sparse_step",
    "interleave_moe_layer_step", "expert_layer_period", "first_k_dense_replace", "moe_layer_start_index",
    "num_dense_layers", "global_attn_every_n_layers", "sliding_window_pattern", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "conv_L_cache",
    "q_lora_rank", "conv_dim", "mamba_d_state", "ssm_state_size", "mamba_d_conv", "conv_kernel", "mamba_n_heads",
    "mamba_num_heads", "n_mamba_heads", "mamba_d_head", "mamba_head_dim", "mamba_headdim", "mamba_n_groups", "n_groups",
    "mamba_ngroups", "mamba_expand", "mamba_d_ssm", "mamba_ssm_cache_dtype", "mamba_ssm_dtype",
))  # fmt: skip
"""Fields that packed_kv/model/{shape,layer_kinds,state_layers}.py and packed_kv/planning/modules.py read, without those
that are lists."""
UNDECLARED = {
    **{kind: {"global_head_dim": 512} for kind in ("gemma4_text", "gemma4_unified_text")},
    **{kind: {"full_attention_interval": 4} for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}
"""Defaults that a class has in its `__post_init__`."""


def declared(kind: str) -> dict[str, Any]:
    """Defaults of a model type."""
    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    return _known(fields | UNDECLARED.get(kind, {}))


def nested(kind: str) -> dict[str, Any]:
    """Type of a model type's nested text, and defaults of its fields that are not those of its class."""
    outer = CONFIG_MAPPING[kind]()
    own = getattr(outer, "_default_text_config_kwargs", {})
    return {"text_config": outer.get_text_config().model_type, **_known(own)}


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in sorted(FIELDS & {*fields}) if type(fields[name]) in (int, bool, str)}


def table() -> dict[str, dict[str, Any]]:
    """All rows."""
    return {kind: declared(kind) for kind in TEXT} | {kind: nested(kind) for kind in OUTER}


def main() -> None:
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(row)}" for kind, row in table().items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
