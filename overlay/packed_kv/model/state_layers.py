"""Sizes of state layers, as vLLM computes them from a config. Imports no torch and no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from ..json_file import shown
from .config_defaults import Config
from .config_fields import LARGEST_WHOLE, MODEL_BYTES, BadInput, listed, nested, whole, word

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
DELTA_NET = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
"""Size fields of gated delta nets, each with the prefix `linear_`."""


@dataclass(frozen=True)
class State:
    """`size`: bytes of a state on one rank. `kept`: states per request, with the prefix cache on: one is read, one is
    written and, in Mamba-2 layers, one is inside a prefill."""

    size: int
    kept: int = 2


def state_of(config: Config, ranks: int, recurrent_dtype: str | None = None, drafts: int = 0) -> State | None:
    """The state of a layer on one of `ranks` ranks, as vLLM's `MambaStateShapeCalculator` has it; None: not known.

    It is a window of a short convolution's inputs and, except in layers of short convolutions alone, a recurrent state.
    Recurrent states have the activations' dtype, unless the model sets another one or `recurrent_dtype` is given
    (`--mamba-ssm-cache-dtype`). `drafts` lengthens the window by as many tokens, except in Mamba-1 layers.
    """
    hidden, kind = config["hidden_size"], word(config, "model_type")
    recurrent = DTYPE_BYTES.get(recurrent_dtype or _recurrent_dtype(config), MODEL_BYTES)
    if "linear_num_value_heads" in config:  # gated delta nets
        keys, values = delta_net_channels(config)
        conv = (2 * keys + values) * max(0, whole(config, "linear_conv_kernel_dim", default=4) - 1 + drafts)
        return State((conv * MODEL_BYTES + values * whole(config, "linear_key_head_dim") * recurrent) // ranks)
    if has_delta_attention(config):
        heads, head_dim, kernel = delta_attention(config)
        conv = 3 * heads * head_dim * max(0, kernel - 1 + drafts)
        return State((conv * MODEL_BYTES + heads * head_dim**2 * recurrent) // ranks)
    if whole(config, "layer_group_size"):  # linear attention of Ling V2.5
        heads = config["num_attention_heads"]
        return State(heads * (whole(config, "head_dim") or hidden // heads) ** 2 * MODEL_BYTES // ranks)
    if "conv_L_cache" in config or kind.startswith("lfm2"):
        kept = max(0, whole(config, "conv_L_cache", default=3) - 1 + drafts)
        return State((whole(config, "conv_dim") or hidden) * kept * MODEL_BYTES // ranks)
    size = whole(config, "mamba_d_state", "ssm_state_size")
    kernel = whole(config, "mamba_d_conv", "conv_kernel") or 4
    heads = whole(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    inner = mamba_channels(config)
    if size and heads:  # Mamba-2
        names = [name for name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim") if config.get(name) != "auto"]
        head_dim = whole(config, *names) or inner // heads
        if kind == "nemotron_h":
            inner = heads * head_dim
        groups = whole(config, "mamba_n_groups", "n_groups", "mamba_ngroups") or 1
        groups += ranks - groups if groups % ranks else 0
        conv = (inner + 2 * groups * size) * (kernel - 1 + drafts)
        return State((conv * MODEL_BYTES + heads * head_dim * size * recurrent) // ranks, kept=3)
    if size:  # Mamba-1
        return State((inner * (kernel - 1) * MODEL_BYTES + inner * size * recurrent) // ranks)
    return None


def delta_net_channels(config: Config) -> tuple[int, int]:
    """Channels of all heads of a gated delta net, in K and in V. Raises BadInput."""
    sizes = {f"linear_{name}": whole(config, f"linear_{name}") for name in DELTA_NET}
    if missing := [name for name in sizes if not sizes[name]]:
        raise BadInput(f"{' and '.join(missing)} must be above 0 in gated delta nets; give a config that has all sizes")
    keys, values, key_size, value_size = sizes.values()
    return keys * key_size, values * value_size


def has_delta_attention(config: Config) -> bool:
    """True if state layers are Kimi's delta attention (KDA): in Kimi-Linear, Kimi K3 and Ling V3."""
    return "linear_attn_config" in config or bool(
        whole(config, "layer_group_size") and whole(config, "short_conv_kernel_size")
    )


def delta_attention(config: Config) -> tuple[int, int, int]:
    """Heads of Kimi's delta attention, channels of a head in Q, K and V, and tokens that its convolution reads."""
    linear = nested(config, "linear_attn_config")
    if linear:
        heads, head_dim = whole(linear, "num_heads"), whole(linear, "head_dim")
    else:
        heads, head_dim = config["num_attention_heads"], whole(config, "head_dim")
    return heads, head_dim, whole(linear or config, "short_conv_kernel_size", default=4)


def mamba_channels(config: Config) -> int:
    """Inner channels of a Mamba layer."""
    expand = config.get("mamba_expand", 2)
    if type(expand) not in (int, float) or not 0 < expand < LARGEST_WHOLE:
        raise BadInput(f"mamba_expand is {shown(expand)}; it must be a number above 0")
    return whole(config, "mamba_d_ssm") or int(expand * config["hidden_size"])


def _recurrent_dtype(config: Config) -> str:
    """Dtype of recurrent states in vLLM if the model sets it, else ""."""
    kind = word(config, "model_type")
    if has_delta_attention(config) or "AliceAIForCausalLM" in listed(config, "architectures", of=str):
        return "float32"
    if kind == "nemotron_h":
        return word(config, "mamba_ssm_cache_dtype") or "float32"
    return word(config, "mamba_ssm_dtype") if kind.startswith("qwen3_5") else ""
