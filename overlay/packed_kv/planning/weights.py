"""Bytes of a model's weights, from its config: what lies on the cards, and what a decode step reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..json_file import printable, read_json, shown
from ..model.config_defaults import EXPERT_INNER, EXPERTS, EXPERTS_PER_TOKEN, INNER, SHARED_EXPERTS, Config
from ..model.config_fields import MODEL_BYTES, BadInput, listed, nested, whole, word
from ..model.layer_kinds import layer_letters
from ..model.shape import Layer, Model, layer_config, layer_runs
from ..model.state_layers import delta_attention, delta_net_channels, has_delta_attention, mamba_channels

BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.25}
"""`--weights` -> bits of a number in a linear layer; of 4 bits, groups of 64 share a scale of 16."""
PLAIN_MLP = (
    "gpt2", "gptj", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2", "nemotron", "nemotron_h", "mpt",
    "gpt_bigcode", "codegen",
)  # fmt: skip
"""Model types whose MLP has two matrices; the others have three, one of them a gate."""
INDEX = "model.safetensors.index.json"
LARGEST = 1 << 50
"""Bytes of weights that an index may name."""


@dataclass(frozen=True)
class Weights:
    """Bytes of the whole model, of what every token reads of it and of all experts, of which a token reads a share.

    `source`: where they are from, in words. `again`: of `dense`, bytes that layers read which run more than once.
    """

    total: float
    dense: float
    experts: float
    experts_share: float
    source: str
    again: float = 0

    def read(self, tokens: float) -> float:
        """Bytes that a step of `tokens` tokens reads, if experts are chosen at random."""
        return self.dense + self.again + self.experts * (1 - (1 - self.experts_share) ** tokens)


def weights(model: Model, form: str | float | None, folder: Path | None) -> Weights:
    """Weights of a model in a form of `BITS`, or of a number of bytes; None: as its config and its folder say."""
    linear, again, experts, vocabulary = parameters(model)
    share = min(1.0, _experts_per_token(model.config) / max(1, _experts(model.config)))
    bits, source = _bits(model.config, form if isinstance(form, str) else None)
    tables = 1 if model.config.get("tie_word_embeddings", True) else 2
    dense = linear * bits / 8 + vocabulary * MODEL_BYTES  # of an input embedding a step reads a few rows
    routed = experts * bits / 8
    total = dense + routed + (tables - 1) * vocabulary * MODEL_BYTES
    again *= bits / 8
    known = form if isinstance(form, (int, float)) else _known(folder) if form is None else None
    if known:
        source = "as given" if form else f"by {INDEX}"
        scale = known / total
        return Weights(known, scale * dense, scale * routed, share, source, scale * again)
    count = linear + experts + tables * vocabulary
    said = f"{count / 1e9:.2f}e9 parameters by the config, {source}"
    return Weights(total, dense, routed, share, said, again)


def _known(folder: Path | None) -> float | None:
    """Bytes of the weights of a folder, as its index says; None where there is none. Raises BadInput."""
    if folder is None or not (folder / INDEX).is_file():
        return None
    try:
        index = read_json(folder / INDEX)
    except ValueError as error:
        raise BadInput(f"{folder / INDEX} {error}; give --weights SIZE") from error
    size = nested(index, "metadata").get("total_size") if isinstance(index, dict) else None
    if size is None:
        return None
    if type(size) not in (int, float) or not 0 <= size <= LARGEST or size % 1:
        raise BadInput(f"{folder / INDEX}: total_size is {shown(size)}, and no number of bytes; give --weights SIZE")
    return float(size)


def _bits(config: Config, form: str | None) -> tuple[float, str]:
    """Bits of a number in a linear layer, and where they are from."""
    if form is not None:
        return BITS[form], f"linear layers in {form}"
    quantization = nested(config, "quantization_config")
    if not quantization or _keeps_weights(quantization):
        said = "not quantized, except for the KV cache" if quantization else "not quantized"
        return 8.0 * MODEL_BYTES, said
    method, bits = printable(quantization.get("quant_method", ""), 60), whole(quantization, "bits")
    if groups := _weight_groups(quantization):
        bits = whole(groups[0], "num_bits")
    words = f"{method} {_algorithm(quantization)} {quantization.get('load_in_4bit', '')}".lower()
    if not bits:
        bits = 4 if any(word in words for word in ("fp4", "int4", "mxfp4", "true", "awq", "gptq")) else 8
    return (BITS["int4"] if bits == 4 else float(bits)), f"quantized by {method or 'an unknown method'} to {bits} bits"


def _keeps_weights(quantization: Config) -> bool:
    """True if a `quantization_config` is of the KV cache or activations alone, by the fields of the tools that write
    one."""
    method = word(quantization, "quant_method")
    if method == "compressed-tensors":
        return not _weight_groups(quantization)
    return (method.startswith("modelopt") or method == "quark") and not _algorithm(quantization)


def _weight_groups(quantization: Config) -> list[Config]:
    """Settings of weights in `config_groups` of compressed-tensors; groups of attention alone are the KV cache's."""
    groups = nested(quantization, "config_groups")
    found_groups = [nested(groups, name) for name in groups]
    return [
        found
        for group in found_groups
        if (found := nested(group, "weights")) and not _is_of_attention(listed(group, "targets", of=str))
    ]


def _is_of_attention(targets: list[str]) -> bool:
    return len(targets) == 1 and targets[0].endswith("Attention")


def _algorithm(quantization: Config) -> str:
    """The algorithm for weights, in the words of ModelOpt or Quark; "": none is named."""
    if word(quantization, "quant_method") == "quark":
        layers = [nested(quantization, "global_quant_config"), *nested(quantization, "layer_quant_config").values()]
        found = [nested(layer, "weight") for layer in layers if isinstance(layer, dict)]
        return next((word(weight, "dtype") for weight in found if weight), "")
    return word(nested(quantization, "quantization") or quantization, "quant_algo")


def parameters(model: Model) -> tuple[float, float, float, float]:
    """Numbers in linear layers that every token reads, of these in layers that run again, each time counted, in
    experts, and in an embedding or output layer."""
    config, hidden, runs = model.config, model.config["hidden_size"], layer_runs(model.config)
    linear = again = experts = 0.0
    for layer in model.layers:
        number = 0 if layer.is_repeat else _state(config, hidden) if layer.kind == "state" else _attention(model, layer)
        linear, again = linear + number, again + number * (runs[layer.number % len(runs)] - 1)
    for index, times in enumerate(runs):
        dense, routed = _mlp(layer_config(config, index), index, hidden)
        linear, again, experts = linear + dense, again + dense * (times - 1), experts + routed
    vocabulary = whole(config, "vocab_size", "padded_vocab_size")
    return linear, again, experts, vocabulary * hidden


def _attention(model: Model, layer: Layer) -> float:
    shared = 0 if layer.is_shared else layer.kv_heads * model.ranks * layer.channels
    return model.config["hidden_size"] * (model.query_heads(layer) * layer.channels + shared)


def _state(config: Config, hidden: int) -> float:
    """Projections into a state layer and out of it; the rest of it is small."""
    if "linear_num_value_heads" in config:
        keys, values = delta_net_channels(config)
        return hidden * (2 * keys + 3 * values)
    if has_delta_attention(config):
        heads, head_dim, _ = delta_attention(config)
        gates = 1 if nested(config, "linear_attn_config").get("use_full_rank_gate") else 0
        inner = heads * head_dim
        return (4 + gates) * hidden * inner + (2 - gates) * head_dim * (hidden + inner)
    if "conv_L_cache" in config:
        return 4 * hidden * hidden
    if word(config, "model_type") == "nemotron_h" and (heads := whole(config, "mamba_num_heads")):
        return 3 * hidden * heads * whole(config, "mamba_head_dim")
    return 3 * hidden * mamba_channels(config)


def _mlp(config: Config, number: int, hidden: int) -> tuple[float, float]:
    """Numbers of a layer's MLP: those that every token reads, and those of the routed experts."""
    pattern, layers = layer_letters(config), config["num_hidden_layers"]
    if pattern and pattern[number] not in "-E":
        return 0, 0
    if isinstance(config.get("intermediate_size"), list):
        inner = listed(config, "intermediate_size", of=int, least=layers)[number]
    else:
        inner = whole(config, *INNER) or 4 * hidden
    matrices = (2 if word(config, "model_type") in PLAIN_MLP else 3) * hidden
    count = _experts(config)
    step = whole(config, "decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period") or 1
    dense_first = whole(config, "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    is_sparse = count > 1 and number >= dense_first and (number + 1) % step == 0
    if pattern and pattern[number] == "-":
        is_sparse = False
    if isinstance(config.get("moe_layer_freq"), list):  # MiMo-V2
        is_sparse = count > 1 and bool(listed(config, "moe_layer_freq", of=int, least=layers)[number])
    if not is_sparse:
        return matrices * (whole(config, "intermediate_size_mlp") or inner), 0
    expert = whole(config, *EXPERT_INNER) or inner
    if word(config, "model_type").startswith("longcat_flash"):  # two dense ones beside the experts
        return 2 * matrices * inner + hidden * count, count * matrices * expert
    shared = whole(config, "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
    if not shared:
        shared = whole(config, *SHARED_EXPERTS) * expert
    if config.get("model_type") == "llama4_text":
        shared = expert
    narrow = whole(config, "routed_expert_hidden_size")  # Kimi K3: experts read a projection
    routed = count * expert * (3 * narrow or matrices)
    return matrices * shared + hidden * (count + 2 * narrow), routed


def _experts(config: Config) -> int:
    return whole(config, *EXPERTS)


def _experts_per_token(config: Config) -> int:
    return whole(config, *EXPERTS_PER_TOKEN) or 1
