"""A small model whose layers of latent attention (MLA) lie beside Mamba-2 layers, in vLLM and in transformers.

It is GraniteMoeHybrid with other attention: vLLM's `MLAAttention`, or the layer of Kimi K3 and Kimi-Linear, whose own
models need CUDA. Both are without RoPE, as Kimi's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from coverage_models import MODELS
from torch import nn
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

RANK, ROPE, NOPE, VALUE = 512, 64, 32, 32
VOCABULARY = 256
CONFIG: dict[str, Any] = MODELS["GraniteMoeHybridForCausalLM"] | {
    "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "q_lora_rank": None,
    "num_local_experts": 0, "layer_types": ["mamba", "attention", "mamba", "attention", "mamba"],
    "num_hidden_layers": 5, "initializer_range": 0.1, "dtype": "float32", "position_embedding_type": "nope",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
Latents = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class LatentAttention(nn.Module):
    """Latent attention in transformers. `latents`: see `tiny_models.true_logits`."""

    latents: Latents | None = None

    def __init__(self, config: transformers.PretrainedConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.q_proj = nn.Linear(hidden, self.heads * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, RANK + ROPE, bias=False)
        self.kv_a_layernorm = modeling.GraniteMoeHybridRMSNorm(RANK, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(RANK, self.heads * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(self.heads * VALUE, hidden, bias=False)

    def forward(self, hidden_states: torch.Tensor, **_options: object) -> tuple[torch.Tensor, None]:
        query = self.q_proj(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, rope = self.kv_a_proj_with_mqa(hidden_states).split([RANK, ROPE], dim=-1)
        for_key = for_value = self.kv_a_layernorm(latent)
        if self.latents is not None:
            known = self.latents(for_key.float(), rope.float())
            for_key, for_value, rope = (x.to(latent.dtype) for x in known)
        up = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        key, value = (
            torch.einsum("btr,hcr->bhtc", x, part)
            for x, part in zip((for_key, for_value), up.split([NOPE, VALUE], dim=1), strict=True)
        )
        key = torch.cat((key, rope.unsqueeze(1).expand(-1, self.heads, -1, -1)), dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), None


def reference(patch: pytest.MonkeyPatch) -> nn.Module:
    """The model in transformers, in float64, random but the same every time."""
    patch.setattr(modeling, "GraniteMoeHybridAttention", LatentAttention)
    torch.manual_seed(0)
    config = transformers.GraniteMoeHybridConfig(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for module in model.modules():
        if isinstance(module, LatentAttention):  # else latents of all channels are alike, and attention is not peaked
            module.kv_a_layernorm.weight.data += 0.3 * torch.randn(RANK)
            module.q_proj.weight.data *= 3
    return model.double()


def true_logits(model: nn.Module, token_ids: list[int], latents: Latents | None = None) -> torch.Tensor:
    """Logits [tokens, vocabulary], without paging, chunks or vLLM."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(LatentAttention, "latents", staticmethod(latents) if latents else None)
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def of_mla(config: Any, cache_config: Any, quant_config: Any, prefix: str) -> nn.Module:
    """DeepSeek V2's layer around vLLM's `MLAAttention`, without its RoPE."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention

    sizes = config.hidden_size, config.num_attention_heads, NOPE, ROPE, VALUE, None, RANK
    places = config.max_position_embeddings, cache_config, quant_config, prefix
    layer = DeepseekV2MLAAttention(get_current_vllm_config(), config, *sizes, *places)
    layer.mla_attn.rotary_emb = None
    return layer


def of_kimi(config: Any, cache_config: Any, quant_config: Any, prefix: str) -> nn.Module:
    """The layer of Kimi K3 and Kimi-Linear."""
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    sizes = config.hidden_size, config.num_attention_heads, NOPE, ROPE, VALUE, None, RANK
    layer = MultiHeadLatentAttention(
        config, *sizes, cache_config=cache_config, quant_config=quant_config, prefix=prefix
    )  # fmt: skip
    layer.kv_b_proj._cpu_skip_gemm_dispatch = True  # else vLLM's CPU platform frees the weights, as of other layers
    return layer


LAYERS = {"mla": of_mla, "kimi": of_kimi}


def install(patch: pytest.MonkeyPatch, folder: Path, layer: str) -> str:
    """Let vLLM serve the model with a layer of `LAYERS` and the weights of `reference`, with `load_format="dummy"`;
    return its folder."""
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.models import granitemoehybrid
    from vllm.platforms.cpu import CpuPlatform

    class Latent(nn.Module):
        def __init__(self, config, model_config=None, cache_config=None, quant_config=None, prefix=""):
            super().__init__()
            self.of_vllm = LAYERS[layer](config, cache_config, quant_config, prefix)
            self.is_mla = layer == "mla"

        def forward(self, positions, hidden_states):
            return self.of_vllm(positions, hidden_states, *[None] * self.is_mla)

    patch.setitem(sys.modules, "numba", None)  # Kimi's module imports it, and vLLM 0.32 starts one engine beside it
    weights = reference(patch).state_dict()

    def load_weights(_loader: object, model: nn.Module, model_config: object) -> None:
        model.load_weights((name, x.float()) for name, x in weights.items() if ".self_attn." not in name)
        found = {name.replace(".of_vllm.", "."): x for name, x in model.named_parameters() if ".of_vllm." in name}
        assert found.keys() == {name for name in weights if ".self_attn." in name}
        for name, parameter in found.items():
            parameter.data.copy_(weights[name])

    check = CpuPlatform.check_and_update_config

    def keep_options(vllm_config: Any) -> None:
        """Undo what the platform changes for its own backend of latents, which cannot do what ours can."""
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunks, batched = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefixes, block_size = cache.enable_prefix_caching, cache.block_size
        check(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunks, batched
        cache.enable_prefix_caching, cache.block_size = prefixes, block_size

    patch.setattr(granitemoehybrid, "GraniteMoeHybridAttention", Latent)
    patch.setattr(DummyModelLoader, "load_weights", load_weights)
    patch.setattr(ModelConfig, "is_deepseek_mla", property(lambda _config: True))
    patch.setattr(ModelConfig, "get_head_size", lambda _config: RANK + ROPE)
    patch.setattr(ModelConfig, "get_num_kv_heads", lambda _config, _parallel: 1)
    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep_options))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)
