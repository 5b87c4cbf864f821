"""What a request takes in a state layer: vLLM's `MambaStateShapeCalculator`, from a model's config.

A state is a window of a short convolution's inputs and, but for short convolutions alone, a recurrent state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class State:
    """`size`: bytes of a state on one rank. `kept`: states of a request, with the prefix cache on: the one that is
    read, the one that is written and, in Mamba-2 layers, one inside a prefill."""

    size: int
    kept: int = 2


def state_of(config: dict[str, Any], ranks: int, dtype_bytes: int, recurrent_dtype: str | None = None) -> State | None:
    """The state of a layer on one of `ranks` ranks; None: a kind that is not known.

    `dtype_bytes`: of the activations. Recurrent states have them too, unless the model has another dtype for them, or
    `recurrent_dtype` is given (`--mamba-ssm-cache-dtype`).
    """
    hidden, kind = config["hidden_size"], config.get("model_type", "")
    recurrent = DTYPE_BYTES.get(recurrent_dtype or _recurrent_dtype(config), dtype_bytes)
    if "linear_num_value_heads" in config:  # gated delta nets
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        conv = (2 * keys + values) * (config.get("linear_conv_kernel_dim", 4) - 1)
        return State((conv * dtype_bytes + values * config["linear_key_head_dim"] * recurrent) // ranks)
    if "conv_L_cache" in config or kind.startswith("lfm2"):
        return State((config.get("conv_dim") or hidden) * (config.get("conv_L_cache", 3) - 1) * dtype_bytes // ranks)
    size = config.get("mamba_d_state") or config.get("ssm_state_size")
    kernel = config.get("mamba_d_conv") or config.get("conv_kernel") or 4
    heads = config.get("mamba_n_heads") or config.get("mamba_num_heads") or config.get("n_mamba_heads")
    inner = config.get("mamba_d_ssm") or int(config.get("mamba_expand", 2) * hidden)
    if size and heads:  # Mamba-2
        head_dim = config.get("mamba_d_head") or config.get("mamba_head_dim") or config.get("mamba_headdim")
        if not isinstance(head_dim, int):
            head_dim = inner // heads
        if kind == "nemotron_h":
            inner = heads * head_dim
        groups = config.get("mamba_n_groups") or config.get("n_groups") or config.get("mamba_ngroups") or 1
        groups += ranks - groups if groups % ranks else 0
        conv = (inner + 2 * groups * size) * (kernel - 1)
        return State((conv * dtype_bytes + heads * head_dim * size * recurrent) // ranks, kept=3)
    if size:  # Mamba-1
        return State((inner * (kernel - 1) * dtype_bytes + inner * size * recurrent) // ranks)
    return None


def _recurrent_dtype(config: dict[str, Any]) -> str:
    """What vLLM keeps recurrent states in where the model says so, else ""."""
    if config.get("model_type") == "nemotron_h":
        return config.get("mamba_ssm_cache_dtype") or "float32"
    if str(config.get("model_type")).startswith("qwen3_5"):
        return config.get("mamba_ssm_dtype") or ""
    return ""
