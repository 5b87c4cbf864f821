"""Small random models, one per thing that models do differently with their KV cache, and the truth about them."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packed_kv import get_codec
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

VOCAB = 256
WINDOW = 40
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
"""Weights are ten times larger than usual, so that attention is peaked and logits differ from token to token."""


def llama(**options: object) -> PretrainedConfig:
    return transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": False, **options})


def mistral(**options: object) -> PretrainedConfig:
    """A sliding window in all layers."""
    return transformers.MistralConfig(**{**SMALL, "sliding_window": WINDOW, **options})


def gemma2(**options: object) -> PretrainedConfig:
    """Sliding and full layers in turn; a soft cap on the scores of attention, low enough to matter."""
    special = {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
    return transformers.Gemma2Config(**{**SMALL, **special, "num_hidden_layers": 4, **options})


def gemma3(**options: object) -> PretrainedConfig:
    """Two sliding layers, a full one; norms of q and k."""
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    special = {"sliding_window": WINDOW, "layer_types": layers, "num_hidden_layers": 6, "query_pre_attn_scalar": 16}
    return transformers.Gemma3TextConfig(**{**SMALL, **special, **options})


def gemma4(**options: object) -> PretrainedConfig:
    """Sliding layers of head size 64 and full ones of 128; the last two read the pages of layers before them."""
    special = {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "global_head_dim": 128,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
    }
    return transformers.Gemma4TextConfig(**{**SMALL, **special, **options})


def gpt_oss(**options: object) -> PretrainedConfig:
    """Attention sinks; sliding and full layers in turn, 8 query heads a KV head; experts, two of four by default."""
    special = {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return transformers.GptOssConfig(**{**SMALL, **special, "tie_word_embeddings": False, **options})


def mimo_v2(**options: object) -> PretrainedConfig:
    """Values of fewer channels than keys; full layers, and sliding ones with sinks and twice the KV heads. The second
    half of the options is vLLM's way to say what the first says to transformers."""
    layers = ["full_attention", "sliding_attention"] * 2
    special = {
        "head_dim": 192,
        "v_head_dim": 128,
        "num_key_value_heads": 1,
        "num_hidden_layers": len(layers),
        "sliding_window": WINDOW,
        "layer_types": layers,
        "mlp_layer_types": ["dense"] * len(layers),
        "n_routed_experts": 1,
        "moe_intermediate_size": 64,
    }
    of_vllm = {
        "layernorm_epsilon": 1e-5,
        "hybrid_layer_pattern": [0, 1] * 2,
        "moe_layer_freq": [0] * len(layers),
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window_size": WINDOW,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
        "add_swa_attention_sink_bias": True,
        "architectures": ["MiMoV2FlashForCausalLM"],
    }
    return transformers.MiMoV2FlashConfig(**{**SMALL, **special, **of_vllm, **options})


def llama4(**options: object) -> PretrainedConfig:
    """Chunked layers, in which a token sees those of its own chunk; the fourth sees all."""
    special = {
        "num_hidden_layers": 4,
        "attention_chunk_size": 128,
        "intermediate_size_mlp": 64,
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return transformers.Llama4TextConfig(**{**SMALL, **special, "tie_word_embeddings": False, **options})


LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 3,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
}
"""Fields of DeepSeek's configs: latents, and layers without experts."""


def deepseek_v2(**options: object) -> PretrainedConfig:
    """Latent attention, in layers without experts."""
    special = {
        **LATENTS,
        "q_lora_rank": None,
        "tie_word_embeddings": False,
    }
    return transformers.DeepseekV2Config(**{**SMALL, **special, **options})


def deepseek_v32(**options: object) -> PretrainedConfig:
    """Latent attention over 24 picked tokens. Of fewer index heads than 32, scores of many tokens would tie at 0."""
    special = {
        **LATENTS,
        "q_lora_rank": 64,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "index_topk": 24,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "tie_word_embeddings": False,
        "architectures": ["DeepseekV32ForCausalLM"],
    }
    of_model = {name: value for name, value in SMALL.items() if name != "head_dim"}
    return transformers.DeepseekV32Config(**{**of_model, **special, **options})


def hy_v4(**options: object) -> PretrainedConfig:
    """The same with sinks, gates and hyper-connections; the second layer takes the first one's picks."""
    special = {
        **LATENTS,
        "q_lora_rank": 64,
        "rms_norm_eps": 1e-6,
        "index_topk": 24,
        "index_n_heads": 32,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense"] * 3,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "architectures": ["HYV4ForCausalLM"],
    }
    of_model = {name: value for name, value in SMALL.items() if name != "head_dim"}
    return transformers.HYV4Config(**{**of_model, **special, **options})


def eagle(folder: Path, kv_heads: int, head_dim: int, target: PretrainedConfig) -> str:
    """Write an EAGLE draft of one layer for a Llama, and return its folder. It proposes the target's last token again,
    more or less, so that some drafts are accepted and most are not."""
    config = llama(
        **{**target.to_dict(), "num_hidden_layers": 1, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    )
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    shapes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(0)
    weights = {f"layers.0.{name}.weight": torch.randn(shape, generator=random) / 20 for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    folder.mkdir()
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def save(config: PretrainedConfig, folder: Path) -> str:
    """Write the model of a configuration, random but the same every time, and return its folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.model_type == "gemma4_text":  # its scores have no scale but that of trained norms
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.data /= layer.self_attn.head_dim**0.5
    if config.model_type in ("deepseek_v2", "deepseek_v32", "hy_v4"):  # else latents of all channels are alike
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight.data += 0.3 * torch.randn(config.kv_lora_rank)
    for module in model.modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):  # random ones are all near 0
            module.sinks.data = torch.linspace(-3, 6, config.num_attention_heads)
    model.save_pretrained(folder)
    if config.model_type == "hy_v4":
        file = folder / "model.safetensors"
        save_file({_hy_v4_name(name): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    return str(folder)


def _hy_v4_name(name: str) -> str:
    """Name of a weight in a checkpoint as vLLM and transformers read it, of that which transformers writes."""
    name = name.replace(".mlp.linear_gate.", ".mlp.gate_proj.").replace(".hc_pre.hc_head.", ".hc_head.")
    return re.sub(r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre.", name)


def write_other_weights(model: str, folder: Path) -> str:
    """The model with its layers' weights exchanged: the first one's are the last one's."""
    weights = load_file(f"{model}/model.safetensors")
    count = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    other = {}
    for name, weight in weights.items():
        parts = name.split(".")
        if name.startswith("model.layers."):
            parts[2] = str(count - 1 - int(parts[2]))
        other[".".join(parts)] = weight.contiguous()
    folder.mkdir()
    for path in Path(model).glob("*.json"):
        (folder / path.name).write_text(path.read_text())
    save_file(other, folder / "model.safetensors")
    return str(folder)


def true_logits(
    model: str,
    token_ids: list[int],
    kv_cache_dtype: str | None = None,
    skip_layers: Collection[int] = (),
    channels: Callable[[int, str], dict] = lambda _layer, _role: {},
    latents: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Logits [tokens, vocabulary] of transformers in float64, without paging, chunks or vLLM.

    With a dtype, K and V of each layer but `skip_layers` go through its public codec before they are attended to.
    `channels` gives, for layer and role, more arguments of the codec. `latents` makes of latents fp32 [...,
    rank] and RoPE channels fp32 [..., rope_dim] those for K, those for V and RoPE's.
    """
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    kind: Any = AutoModelForCausalLM
    model_type = json.loads((Path(model) / "config.json").read_text())["model_type"]
    if prefix := {"deepseek_v32": "DeepseekV32", "hy_v4": "HYV4"}.get(model_type):  # vLLM has them read otherwise
        kind = getattr(transformers, f"{prefix}ForCausalLM")
        eager["config"] = getattr(transformers, f"{prefix}Config").from_pretrained(model)
    reference = kind.from_pretrained(model, dtype=torch.float64, **eager)
    modeling = importlib.import_module(type(reference).__module__)
    attention = modeling.eager_attention_forward

    def through(codec, x, order):
        heads_last = x[..., order].float().transpose(1, 2)  # [batch, tokens, KV heads, head_dim]
        positions = torch.arange(x.shape[2])[:, None]
        decoded = codec.decode(codec.encode(heads_last, positions), positions)
        return decoded[..., order.argsort()].transpose(1, 2).double()

    def through_codec(layer, query, key, value, *args, **kwargs):
        if kv_cache_dtype and layer.layer_idx not in skip_layers:
            sizes = {"key": {}, "value": {"layout_dim": key.shape[-1]}}
            key, value = (
                through(
                    get_codec(kv_cache_dtype, x.shape[-1], role, **sizes[role], **channels(layer.layer_idx, role)),
                    x,
                    channel_order(reference.config.model_type, x.shape[-1], role),
                )
                for role, x in (("key", key), ("value", value))
            )
        return attention(layer, query, key, value, *args, **kwargs)

    def through_latents(expand, latent, rope):
        for_key, for_value, rope = (x.to(latent.dtype) for x in latents(latent.float(), rope.float()))
        return expand(for_key, rope)[0], expand(for_value, rope)[1]

    if latents is not None:
        for layer in reference.model.layers:
            layer.self_attn.expand_kv = functools.partial(through_latents, layer.self_attn.expand_kv)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(modeling, "eager_attention_forward", through_codec)
        if model_type == "hy_v4":
            patch.setattr(modeling, "apply_rotary_pos_emb", _of_neighbours(modeling.apply_rotary_pos_emb))
        return reference(torch.tensor([token_ids])).logits[0]


def _of_neighbours(rotate: Callable) -> Callable:
    """Rotation of RoPE channels that are neighbours, as vLLM's Hy4 has them, by that of channels that are halves apart.
    Queries and keys stay in the order of halves."""

    def of_halves(query: torch.Tensor, key: torch.Tensor, *tables: torch.Tensor, **options: Any) -> Any:
        halves = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (query, key))
        return rotate(*halves, *tables, **options)

    return of_halves


def channel_order(model_type: str, head_dim: int, role: str) -> torch.Tensor:
    """The channels of a head in vLLM's order: it takes those of Llama 4's keys apart that rotate together."""
    order = torch.arange(head_dim)
    if model_type == "llama4_text" and role == "key":
        return order.view(-1, 2).T.flatten()
    return order
