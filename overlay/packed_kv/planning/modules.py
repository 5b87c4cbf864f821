"""Linear layers of a model, with their names in checkpoints and their numbers of weights, from its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from ..model.config_defaults import EXPERT_INNER, EXPERTS, EXPERTS_PER_TOKEN, INNER, SHARED_EXPERTS, Config
from ..model.config_fields import listed, nested, whole, word
from ..model.layer_kinds import layer_letters
from ..model.shape import Model, ModelLayer, layer_config, layer_runs
from ..model.state_layers import delta_attention, delta_net_channels, has_delta_attention, mamba_channels

PLAIN_MLP = (
    "gpt2", "gptj", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2", "nemotron", "nemotron_h", "mpt",
    "gpt_bigcode", "codegen",
)  # fmt: skip
"""Model types whose MLP has two matrices; the others have three, one of them a gate."""
STACKS = (
    "model.layers", "model.language_model.layers", "language_model.model.layers", "model.text_model.layers",
    "backbone.layers", "transformer.h",
)  # fmt: skip
"""Names of the stack of layers in checkpoints."""
ATTENTION = ("self_attn", "attention", "attn", "mixer")
STATE = ("linear_attn", "mamba", "mixer", "conv", "self_attn")
MLP = ("mlp", "feed_forward", "block_sparse_moe", "mixer", "moe")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
SHARED = ("shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True)
class Module:
    """A linear layer, or one matrix of an MLP for all experts. `names`: its names in checkpoints of several families.
    `numbers`: count of its weights; `runs`: runs of its layer per token; `is_routed`: it belongs to experts, and a
    token reads only some of these.
    """

    names: tuple[str, ...]
    numbers: float
    runs: int = 1
    is_routed: bool = False


def modules(model: Model) -> Iterator[Module]:
    """All linear layers of a model, on all ranks, but the output layer. Raises BadInput."""
    config, hidden, runs = model.config, model.config["hidden_size"], layer_runs(model.config)
    for layer in model.layers:
        if layer.is_repeat:
            continue
        number = layer.number % len(runs)
        kinds = _state(config, hidden) if layer.kind == "state" else _attention(model, layer)
        blocks = STATE if layer.kind == "state" else ATTENTION
        for projections, numbers in kinds:
            yield Module(_names(number, blocks, projections), numbers, runs[number])
    for index, times in enumerate(runs):
        yield from _mlp(layer_config(config, index), index, hidden, times)


@cache
def _names(layer: int, blocks: tuple[str, ...], projections: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{stack}.{layer}.{block}.{last}" for stack, block, last in product(STACKS, blocks, projections))


def _attention(model: Model, layer: ModelLayer) -> list[tuple[tuple[str, ...], float]]:
    """Names of an attention layer's projections, and their numbers of weights."""
    hidden, heads = model.config["hidden_size"], model.query_heads(layer)
    if layer.rope_size:
        return _latents(model.config, layer, heads)
    size, value_size = layer.head_size, layer.value_size or layer.head_size
    kv_heads = 0 if layer.is_shared else layer.kv_heads * model.ranks
    return [
        (("q_proj", "qkv_proj"), hidden * heads * size),
        (("k_proj", "qkv_proj"), hidden * kv_heads * size),
        (("v_proj", "qkv_proj"), hidden * kv_heads * value_size),
        (("o_proj", "out_proj"), hidden * heads * value_size),
    ]


def _latents(config: Config, layer: ModelLayer, heads: int) -> list[tuple[tuple[str, ...], float]]:
    hidden, queries = config["hidden_size"], whole(config, "q_lora_rank")
    plain, value = whole(config, "qk_nope_head_dim"), whole(config, "v_head_dim")
    of_queries = heads * (plain + layer.rope_size)
    narrow = queries * (hidden + of_queries) if queries else hidden * of_queries
    return [
        (("q_proj", "q_a_proj", "q_b_proj"), narrow),
        (("kv_a_proj_with_mqa",), hidden * (layer.head_size + layer.rope_size)),
        (("kv_b_proj",), layer.head_size * heads * (plain + value)),
        (("o_proj",), heads * value * hidden),
    ]


def _state(config: Config, hidden: int) -> list[tuple[tuple[str, ...], float]]:
    """Projections into and out of a state layer; its other weights are few."""
    into, out = ("in_proj", "in_proj_qkvz", "in_proj_qkv", "q_proj"), ("out_proj", "o_proj")
    if "linear_num_value_heads" in config:
        keys, values = delta_net_channels(config)
        return [(into, hidden * 2 * (keys + values)), (out, hidden * values)]
    if has_delta_attention(config):
        heads, head_dim, _ = delta_attention(config)
        gates = 1 if nested(config, "linear_attn_config").get("use_full_rank_gate") else 0
        inner = heads * head_dim
        beside = (2 - gates) * head_dim * (hidden + inner)
        return [(into, (3 + gates) * hidden * inner + beside), (out, hidden * inner)]
    if "conv_L_cache" in config:
        return [(into, 3 * hidden * hidden), (out, hidden * hidden)]
    if word(config, "model_type") == "nemotron_h" and (heads := whole(config, "mamba_num_heads")):
        inner = heads * whole(config, "mamba_head_dim")
    else:
        inner = mamba_channels(config)
    return [(into, 2 * hidden * inner), (out, hidden * inner)]


def _mlp(config: Config, number: int, hidden: int, runs: int) -> Iterator[Module]:
    """Matrices of a layer's MLP: matrices that every token reads, and the routed experts'."""
    pattern, layers = layer_letters(config), config["num_hidden_layers"]
    if pattern and pattern[number] not in "-E":
        return
    if isinstance(config.get("intermediate_size"), list):
        inner = listed(config, "intermediate_size", of=int, least=layers)[number]
    else:
        inner = whole(config, *INNER) or 4 * hidden
    matrices = (UP, DOWN) if word(config, "model_type") in PLAIN_MLP else (GATE, UP, DOWN)
    count = experts(config)
    step = whole(config, "decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period") or 1
    dense_first = whole(config, "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    is_sparse = count > 1 and number >= dense_first and (number + 1) % step == 0
    if pattern and pattern[number] == "-":
        is_sparse = False
    if isinstance(config.get("moe_layer_freq"), list):  # MiMo-V2
        is_sparse = count > 1 and bool(listed(config, "moe_layer_freq", of=int, least=layers)[number])

    def dense(size: float, below: tuple[str, ...] = ("",)) -> Iterator[Module]:
        for matrix in matrices:
            last = (*matrix, "gate_up_proj") if matrix is not DOWN else matrix
            paths = tuple(f"{block}{name}" for block in below for name in last)
            yield Module(_names(number, MLP, paths), hidden * size, runs)

    if not is_sparse:
        yield from dense(whole(config, "intermediate_size_mlp") or inner)
        return
    size = whole(config, *EXPERT_INNER) or inner
    narrow = whole(config, "routed_expert_hidden_size")  # Kimi K3: experts read a projection
    if word(config, "model_type").startswith("longcat_flash"):  # two dense ones beside the experts
        yield from dense(2 * inner)
        shared = narrow = 0
    else:
        shared = whole(config, "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
        shared = shared or whole(config, *SHARED_EXPERTS) * size
        if config.get("model_type") == "llama4_text":
            shared = size
    if shared:
        yield from dense(shared, tuple(f"{name}." for name in SHARED))
    yield Module(_names(number, MLP, ("gate", "router")), hidden * (count + 2 * narrow), runs)
    for matrix in (GATE, UP, DOWN) if narrow else matrices:
        last = (*matrix, "gate_up_proj") if matrix is not DOWN else matrix
        paths = tuple(f"experts.{name}" for name in last) + tuple(f"experts.0.{name}" for name in matrix)
        yield Module(_names(number, MLP, paths), count * size * (narrow or hidden), is_routed=True)


def experts(config: Config) -> int:
    """Routed experts of a layer; 0: it has none."""
    return whole(config, *EXPERTS)


def experts_per_token(config: Config) -> int:
    return whole(config, *EXPERTS_PER_TOKEN) or 1
