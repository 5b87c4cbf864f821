"""Tiny config.json contents for each architecture that model_coverage.py tries.

Sizes are small, but every family keeps what it does differently with its KV cache: windows shorter than the prompts,
layers of several kinds, heads of uncommon sizes, shared caches, sinks, latent attention, state layers.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

WINDOW = 96
"""Tokens of a sliding window: less than a prompt has."""
SIZES: Config = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: Config = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
DELTA_NET: Config = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
MAMBA2: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2


def tiny(model_type: str, *parts: Config, **options: Any) -> Config:
    """A configuration of `SIZES`, changed by `parts` and by `options`; what is None is left out."""
    config = {**SIZES, "model_type": model_type}
    for part in (*parts, options):
        config |= part
    return {name: value for name, value in config.items() if value is not None}


def sliding(*parts: Config, **options: Any) -> Config:
    """Every second layer has a window."""
    config: Config = {"sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL}
    for part in (*parts, options):
        config |= part
    return config


def heads(size: int, number: int = 4, kv_heads: int = 4) -> Config:
    """Heads of a size, of models that take it as hidden size / heads."""
    return {
        "head_dim": None,
        "hidden_size": size * number,
        "num_attention_heads": number,
        "num_key_value_heads": kv_heads,
    }


def with_text(model_type: str, text: Config, **options: Any) -> Config:
    """A model of text and images."""
    return {"model_type": model_type, "text_config": text, "tie_word_embeddings": False, **options}


def quarter_of_heads(sections: list[int]) -> Config:
    """RoPE of a quarter of a head's channels, by three positions, each of so many pairs of channels."""
    return {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": sections}  # fmt: skip


VISION: Config = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "depth": 2, "out_hidden_size": 256}
QWEN3_5 = tiny("qwen3_5_text", DELTA_NET, head_dim=256)
QWEN3_5_MOE = tiny(
    "qwen3_5_moe_text", DELTA_NET, EXPERTS, num_experts=4, shared_expert_intermediate_size=128, head_dim=128
)
QWEN3_5_VISION: Config = {**VISION, "num_position_embeddings": 64}
DENSE = {
    "LlamaForCausalLM": tiny("llama"),
    "MistralForCausalLM": tiny("mistral", sliding_window=WINDOW),
    "Ministral3ForCausalLM": tiny("ministral3", rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "Qwen2ForCausalLM": tiny("qwen2"),
    "Qwen3ForCausalLM": tiny("qwen3", head_dim=128),
    "GemmaForCausalLM": tiny("gemma", head_dim=256, tie_word_embeddings=True),
    "Gemma2ForCausalLM": tiny("gemma2", sliding_window=WINDOW, head_dim=128, tie_word_embeddings=True),
    "Gemma3ForCausalLM": tiny("gemma3_text", sliding(), head_dim=256, tie_word_embeddings=True),
    "Gemma3nForCausalLM": tiny(
        "gemma3n_text", sliding(), head_dim=128, tie_word_embeddings=True, num_kv_shared_layers=2, laurel_rank=16,
        hidden_size_per_layer_input=64, vocab_size_per_layer_input=256, intermediate_size=[256] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "Gemma4ForCausalLM": tiny(
        "gemma4_text", sliding(), head_dim=128, global_head_dim=256, num_kv_shared_layers=2, tie_word_embeddings=True,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=256,
    ),
    "PhiForCausalLM": tiny("phi", heads(80)),
    "Phi3ForCausalLM": tiny("phi3", heads(96, kv_heads=2)),
    "StableLmForCausalLM": tiny("stablelm", heads(80)),
    "GPT2LMHeadModel": {
        "model_type": "gpt2", "vocab_size": 256, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 4096,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "GPTJForCausalLM": {
        "model_type": "gptj", "vocab_size": 256, "n_embd": 512, "n_layer": 4, "n_head": 2, "n_positions": 4096,
        "rotary_dim": 64, "bos_token_id": 1, "eos_token_id": 2,
    },
    "GPTNeoXForCausalLM": tiny("gpt_neox", heads(96)),
    "OPTForCausalLM": tiny(
        "opt", num_key_value_heads=None, ffn_dim=256, word_embed_proj_dim=256, tie_word_embeddings=True,
    ),
    "BloomForCausalLM": tiny("bloom", num_key_value_heads=None, n_head=4, n_layer=4, tie_word_embeddings=True),
    "FalconForCausalLM": tiny(
        "falcon", heads(64), num_key_value_heads=None, num_kv_heads=1, ffn_hidden_size=256, tie_word_embeddings=True,
    ),
    "CohereForCausalLM": tiny("cohere", heads(64, kv_heads=2), tie_word_embeddings=True),
    "Cohere2ForCausalLM": tiny("cohere2", sliding(), tie_word_embeddings=True),
    "Olmo2ForCausalLM": tiny("olmo2", heads(64)),
    "Olmo3ForCausalLM": tiny("olmo3", sliding(heads(64))),
    "Starcoder2ForCausalLM": tiny("starcoder2", heads(128, 2, 2), tie_word_embeddings=True),
    "GraniteForCausalLM": tiny("granite", heads(112, kv_heads=2), attention_multiplier=0.1),
    "Glm4ForCausalLM": tiny("glm4", head_dim=128),
    "Exaone4ForCausalLM": tiny("exaone4", sliding()),
    "SmolLM3ForCausalLM": tiny("smollm3", heads(64, kv_heads=2), no_rope_layers=[1, 1, 1, 0]),
    "NemotronForCausalLM": tiny("nemotron", head_dim=128),
    "ApertusForCausalLM": tiny("apertus"),
    "SeedOssForCausalLM": tiny("seed_oss", head_dim=128),
    "Ernie4_5ForCausalLM": tiny("ernie4_5", head_dim=128),
    "HunYuanDenseV1ForCausalLM": tiny("hunyuan_v1_dense", head_dim=128),
    "MiniCPM3ForCausalLM": tiny(
        "minicpm3", LATENT, head_dim=None, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
    ),
}  # fmt: skip
EXPERTS_OF: dict[str, Config] = {
    "MixtralForCausalLM": tiny("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "Qwen2MoeForCausalLM": tiny("qwen2_moe", EXPERTS, num_experts=4, shared_expert_intermediate_size=128),
    "Qwen3MoeForCausalLM": tiny("qwen3_moe", EXPERTS, num_experts=4, head_dim=128),
    "OlmoeForCausalLM": tiny("olmoe", heads(64), num_experts=4, num_experts_per_tok=2),
    "FlexOlmoForCausalLM": tiny("flex_olmo", heads(64), num_experts=4, num_experts_per_tok=2),
    "SolarForCausalLM": tiny(
        "llama", heads(64, kv_heads=2), bskcn_1=[1], bskcn_2=[2], bskcn_3=[3], bskcn_4=[3], bskcn_tv=[0.9, 0.8],
    ),
    "PhiMoEForCausalLM": tiny("phimoe", heads(64, kv_heads=2), num_local_experts=4, num_experts_per_tok=2),
    "GraniteMoeForCausalLM": tiny("granitemoe", heads(64, kv_heads=2), num_local_experts=4, attention_multiplier=0.1),
    "Glm4MoeForCausalLM": tiny("glm4_moe", EXPERTS, head_dim=128, n_routed_experts=4, num_nextn_predict_layers=0),
    "GptOssForCausalLM": tiny(
        "gpt_oss", sliding(), num_attention_heads=8, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    ),
    "MiniMaxM2ForCausalLM": tiny(
        "minimax_m2", num_local_experts=4, num_experts_per_tok=2, head_dim=128, rotary_dim=64, num_mtp_modules=0,
        scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer",
    ),
    "Ernie4_5_MoeForCausalLM": tiny(
        "ernie4_5_moe", heads(64, kv_heads=2), moe_intermediate_size=128, moe_k=2, moe_num_experts=4,
        moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=3,
    ),
    "AfmoeForCausalLM": tiny(
        "afmoe", sliding(), EXPERTS, num_experts=4, num_shared_experts=1, score_func="sigmoid", route_norm=True,
        n_group=1, topk_group=1,
    ),
    "ExaoneMoeForCausalLM": tiny("exaone_moe", sliding(), EXPERTS, num_experts=4, num_shared_experts=1),
    "LagunaForCausalLM": tiny(
        "laguna", sliding(), EXPERTS, num_experts=4, shared_expert_intermediate_size=128,
        num_attention_heads_per_layer=[4] * 4,
    ),
    "HYV3ForCausalLM": tiny(
        "hy_v3", EXPERTS, num_experts=4, num_shared_experts=1, first_k_dense_replace=1, head_dim=128,
        expert_hidden_dim=128, route_norm=True,
    ),
    "DbrxForCausalLM": {
        "model_type": "dbrx", "vocab_size": 256, "d_model": 256, "n_heads": 4, "n_layers": 4, "max_seq_len": 4096,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 256, "ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "Llama4ForCausalLM": tiny(
        "llama4_text", head_dim=128, attention_chunk_size=128, num_local_experts=4, num_experts_per_tok=1,
        intermediate_size_mlp=256, moe_layers=[0, 1, 2, 3],
    ),
    "Step3p5ForCausalLM": tiny(
        "step3p5", sliding(), EXPERTS, head_dim=128, num_attention_groups=2, num_sliding_attention_heads=8,
        moe_num_experts=4, n_routed_experts=4, moe_top_k=2, share_expert_dim=128, moe_layers_enum="2,3",
        mlp_layer_types=["dense", "dense", "sparse", "sparse"], use_moe_router_bias=True, norm_expert_weight=True,
        need_fp32_gate=True,
        attention_other_setting={
            "attention_type": "sliding_attention", "num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 128,
        },
    ),
    "MiMoV2FlashForCausalLM": tiny(
        "mimo_v2_flash", EXPERTS, head_dim=192, v_head_dim=128, swa_head_dim=192, swa_v_head_dim=128,
        swa_num_attention_heads=4, swa_num_key_value_heads=2, sliding_window=WINDOW, sliding_window_size=WINDOW,
        hybrid_layer_pattern=[0, 1, 0, 1], moe_layer_freq=[0, 1, 1, 1], n_routed_experts=4, n_shared_experts=None,
        n_group=1, topk_group=1, layernorm_epsilon=1e-5, rope_theta=5e6, swa_rope_theta=1e4, attention_bias=False,
        add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, partial_rotary_factor=0.334,
        attention_value_scale=0.707, scoring_func="sigmoid", norm_topk_prob=True, topk_method="noaux_tc",
    ),
    "DeepseekV2ForCausalLM": tiny("deepseek_v2", LATENT),
    "DeepseekV3ForCausalLM": tiny("deepseek_v3", LATENT, num_nextn_predict_layers=0),
    "Glm4MoeLiteForCausalLM": tiny("glm4_moe_lite", LATENT, num_nextn_predict_layers=0),
}  # fmt: skip
HYBRIDS: dict[str, Config] = {
    "Qwen3NextForCausalLM": tiny(
        "qwen3_next", DELTA_NET, EXPERTS, num_experts=4, shared_expert_intermediate_size=128, head_dim=128,
    ),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "OlmoHybridForCausalLM": tiny("olmo_hybrid", heads(64), DELTA_NET, linear_num_key_heads=4),
    "FalconH1ForCausalLM": tiny("falcon_h1", MAMBA2, mamba_d_ssm=512),
    "GraniteMoeHybridForCausalLM": tiny(
        "granitemoehybrid", MAMBA2, heads(64, kv_heads=2), num_local_experts=4, shared_intermediate_size=128,
        attention_multiplier=0.1, layer_types=["mamba", "mamba", "attention", "mamba"],
    ),
    "NemotronHForCausalLM": tiny(
        "nemotron_h", EXPERTS, hybrid_override_pattern="M*-M", num_hidden_layers=4, ssm_state_size=64,
        mamba_num_heads=8, mamba_head_dim=64, n_groups=2, chunk_size=64, n_routed_experts=4,
        moe_shared_expert_intermediate_size=128,
    ),
    "JambaForCausalLM": tiny(
        "jamba", heads(64, kv_heads=2), num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=16,
        mamba_dt_rank=16,
    ),
    "Lfm2ForCausalLM": tiny(
        "lfm2", heads(64, kv_heads=2), layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False,
        block_dim=256, conv_dim=256, block_ff_dim=256, tie_word_embeddings=True,
    ),
    "Lfm2MoeForCausalLM": tiny(
        "lfm2_moe", heads(64, kv_heads=2), EXPERTS, layer_types=["conv", "full_attention"] * 2, num_dense_layers=1,
        num_experts=4, tie_word_embeddings=True,
    ),
    "Zamba2ForCausalLM": tiny(
        "zamba2", heads(64), layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=64, mamba_headdim=64,
        n_mamba_heads=8, mamba_ngroups=1, chunk_size=64, attention_head_dim=128, attention_hidden_size=512,
        adapter_rank=16, hybrid_layer_ids=[1, 3], tie_word_embeddings=True,
    ),
    "KimiLinearForCausalLM": tiny(
        "kimi_linear", LATENT, head_dim=None, q_lora_rank=None, mla_use_nope=True, num_experts=4,
        num_experts_per_token=2, num_shared_experts=1, moe_layer_freq=1, linear_attn_config={
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    ),
    "MambaForCausalLM": tiny(
        "mamba", intermediate_size=512, state_size=16, time_step_rank=16, tie_word_embeddings=True,
    ),
    "Mamba2ForCausalLM": tiny(
        "mamba2", intermediate_size=512, num_heads=8, head_dim=64, state_size=64, n_groups=1, chunk_size=64,
    ),
}  # fmt: skip
VISION_LANGUAGE: dict[str, Config] = {
    "Qwen2_5_VLForConditionalGeneration": with_text(
        "qwen2_5_vl",
        tiny("qwen2_5_vl_text", heads(64, kv_heads=2),
             rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}),
        vision_config={**VISION, "fullatt_block_indexes": [1]},
    ),
    "Qwen3VLForConditionalGeneration": with_text(
        "qwen3_vl",
        tiny("qwen3_vl_text",
             rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [12, 10, 10]}),
        vision_config={**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    ),
    "Qwen3_5ForConditionalGeneration": with_text(
        "qwen3_5", {**QWEN3_5, "rope_parameters": quarter_of_heads([11, 11, 10])}, vision_config=QWEN3_5_VISION,
    ),
    "Qwen3_5MoeForConditionalGeneration": with_text(
        "qwen3_5_moe", {**QWEN3_5_MOE, "rope_parameters": quarter_of_heads([6, 5, 5])}, vision_config=QWEN3_5_VISION,
    ),
    "Gemma3ForConditionalGeneration": with_text(
        "gemma3", tiny("gemma3_text", sliding(), head_dim=128, tie_word_embeddings=True),
        vision_config={
            "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=4, image_token_index=250, boi_token_index=251, eoi_token_index=252,
    ),
}  # fmt: skip
MODELS: dict[str, Config] = {
    architecture: {**config, "architectures": [architecture], "dtype": "bfloat16"}
    for part in (HYBRIDS, VISION_LANGUAGE, EXPERTS_OF, DENSE)
    for architecture, config in part.items()
}
"""Architecture -> its config.json, those that take longest to start first."""
