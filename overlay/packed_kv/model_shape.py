"""The shape of a model's KV cache, read from its config.json: layer by layer, as vLLM builds them.

The runtime, the refusals and `packed-kv plan` share it. Families name and leave out fields in their own ways; this file
holds what is known of them. Imports no torch and no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .formats import FORMATS, HEAD_DIM_STEP

Config = dict[str, Any]

DENSE, FP8 = "bf16", "fp8"
MAX_PADDING = 1.5
"""How many times its content a packed page may take. Layers with pages of several sizes share a pool, and vLLM pads the
smaller pages; beside a skipped layer in bf16 a packed page would take 3.8 times its content or more."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

KINDS = {
    "full_attention": ("full",),
    "attention": ("full",),
    "sliding_attention": ("sliding",),
    "chunked_attention": ("chunked",),
    "linear_attention": ("state",),
    "mamba": ("state",),
    "mamba2": ("state",),
    "conv": ("state",),
    "hybrid": ("state", "full"),
    "moe": (),
    "mlp": (),
}
"""Words of `layer_types` and its like -> what the layer keeps."""
NEMOTRON_H = {"M": ("state",), "*": ("full",), "-": (), "E": ()}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""
SLIDING_AND_FULL = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "cohere2": 4}
"""Model type -> period of its layers, of which the last is full and the others slide, where the config says nothing."""
ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba", "rwkv")
"""Model types whose layers all are state layers, though their configs do not say so."""


class BadInput(ValueError):
    """What cannot be planned with; the message is one line that says what was read and what to give."""


@dataclass(frozen=True)
class Layer:
    """What one layer keeps of a request: `kind` is "full", "sliding", "chunked" or "state".

    `value_size`: channels of a head of V, 0: as many as K's. `window`: tokens of a sliding layer's window or of a
    chunk. `state_bytes`: of a state layer, for one rank, and `states` of them a request. `is_shared`: it reads the
    pages of a layer before it and has none.
    """

    number: int
    kind: str
    kv_heads: int = 0
    head_size: int = 0
    window: int = 0
    state_bytes: int = 0
    states: int = 0
    is_shared: bool = False
    value_size: int = 0

    @property
    def channels(self) -> int:
        """Of a head's K and V together."""
        return self.head_size + (self.value_size or self.head_size)


@dataclass(frozen=True)
class Model:
    """A model as its config describes it; `layers` are those of one of `ranks` ranks of tensor parallelism."""

    name: str
    config: Config
    layers: tuple[Layer, ...]
    ranks: int
    max_len: int
    dtype_bytes: int

    @property
    def is_hybrid(self) -> bool:
        return any(layer.kind == "state" for layer in self.layers)

    @property
    def attention(self) -> tuple[Layer, ...]:
        """The layers with keys and values, those that share others' pages among them."""
        return tuple(layer for layer in self.layers if layer.kind != "state")


def parse(config: Config, name: str, ranks: int = 1, recurrent_dtype: str | None = None) -> Model:
    """The model of a config, split over `ranks`. Raises BadInput for what packed pages do not serve.

    `recurrent_dtype`: of state layers, vLLM's `--mamba-ssm-cache-dtype`; None: the model's.
    """
    text = next((config[part] for part in ("text_config", "llm_config") if isinstance(config.get(part), dict)), config)
    text = {**{key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in config}, **text}
    kind = text.get("model_type", "of no model_type")
    if text.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        raise BadInput(f"{name} ({kind}) is an encoder-decoder; packed pages hold those of decoders alone")
    if text.get("kv_lora_rank"):
        raise BadInput(f"{name} ({kind}) has MLA (kv_lora_rank {text['kv_lora_rank']}), which has no packed pages")
    number = first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = first(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = first(text, "hidden_size", "n_embd", "d_model")
    if not all(isinstance(value, int) and value > 0 for value in (number, heads, hidden)):
        raise BadInput(
            f"{name} ({kind}) has no attention that its config describes (num_hidden_layers {number}, "
            f"num_attention_heads {heads}, hidden_size {hidden}); give a decoder's config"
        )
    text = {**text, "num_hidden_layers": number, "num_attention_heads": heads, "hidden_size": hidden}
    if not any(set(kept) - {"state"} for kept in layer_kinds(text)):
        raise BadInput(f"{name} ({kind}) has no attention layers, so no KV cache to plan; give a model that has")
    if heads % ranks:
        raise BadInput(f"--tensor-parallel {ranks} does not divide the {heads} attention heads of {name}; give another")
    dtype = first(text, "dtype", "torch_dtype") or "bfloat16"
    return Model(
        name=name,
        config=text,
        layers=tuple(_layers(text, name, ranks, recurrent_dtype)),
        ranks=ranks,
        max_len=first(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length") or 0,
        dtype_bytes=DTYPE_BYTES.get(dtype, 2),
    )


def first(config: Config, *names: str) -> Any:
    """The first of the entries that is there and not null."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _layers(text: Config, name: str, ranks: int, recurrent_dtype: str | None) -> Iterable[Layer]:
    kinds = layer_kinds(text)
    own = len(kinds) - (text.get("num_kv_shared_layers") or 0)
    for number, kept in enumerate(kinds):
        for kind in kept:
            if kind == "state":
                dtype_bytes = DTYPE_BYTES.get(first(text, "dtype", "torch_dtype") or "", 2)
                state = state_of(text, ranks, dtype_bytes, recurrent_dtype)
                if state is None:
                    what = f"{name} has state layers of {text.get('model_type')}"
                    raise BadInput(f"{what}, whose size plan does not know; start the engine and read its line")
                yield Layer(number, kind, state_bytes=state.size, states=state.kept)
                continue
            heads, size, value_size = _heads(text, name, kind)
            window = {"sliding": text.get("sliding_window"), "chunked": text.get("attention_chunk_size")}.get(kind) or 0
            sizes = {"head_size": size, "value_size": 0 if value_size == size else value_size}
            yield Layer(number, kind, max(1, heads // ranks), window=window, is_shared=number >= own, **sizes)


def _heads(text: Config, name: str, kind: str) -> tuple[int, int, int]:
    """KV heads of the whole model, and their sizes in K and V, of its layers of a kind. Raises BadInput."""
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    kv_heads = first(
        text, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups"
    )
    if isinstance(text.get("attn_config"), dict):  # DBRX, MPT
        kv_heads = text["attn_config"].get("kv_n_heads")
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # Falcon, StarCoder
        kv_heads = 1
    size = first(text, "head_dim", "attention_head_dim", "kv_channels") or hidden // heads
    if kind == "full" and text.get("global_head_dim"):  # Gemma 4
        size = text["global_head_dim"]
        kv_heads = text.get("num_global_key_value_heads") or kv_heads
    value_size = text.get("v_head_dim") or size
    if kind == "sliding" and text.get("swa_head_dim"):  # MiMo-V2
        kv_heads, size = text["swa_num_key_value_heads"], text["swa_head_dim"]
        value_size = text.get("swa_v_head_dim") or size
    if not isinstance(kv_heads or heads, int) or not isinstance(size, int):
        raise BadInput(f"{name} has heads that differ from layer to layer (KV heads {kv_heads}); plan reads one number")
    if value_size > size:
        raise BadInput(f"{name} has K of {size} and V of {value_size} channels; packed pages need V of at most K's")
    if size % HEAD_DIM_STEP or value_size % HEAD_DIM_STEP:
        sizes = f"{size}" if value_size == size else f"{size} (K) and {value_size} (V)"
        raise BadInput(f"{name} has heads of {sizes} channels; packed pages need a multiple of {HEAD_DIM_STEP}")
    return kv_heads or heads, size, value_size


def layer_kinds(text: Config) -> list[tuple[str, ...]]:
    """What each layer keeps, in words of `KINDS`' values. Raises BadInput for a word that is not known."""
    number, kind = text["num_hidden_layers"], text.get("model_type")
    window = text.get("sliding_window") if text.get("use_sliding_window") is not False else None
    if words := first(text, "layer_types", "layers_block_type"):
        if unknown := sorted(set(map(str, words)) - set(KINDS)):
            raise BadInput(f"layers of the kind {', '.join(unknown)} are not known; known: {', '.join(KINDS)}")
        return [KINDS[word] for word in words]
    if pattern := text.get("hybrid_layer_pattern"):  # MiMo-V2
        return [("sliding",) if slides else ("full",) for slides in pattern]
    if pattern := text.get("hybrid_override_pattern"):
        return [NEMOTRON_H.get(letter, ()) for letter in pattern]
    if kind in ATTENTION_FREE:
        return [("state",)] * number
    if kind == "falcon_h1":
        return [("state", "full")] * number
    if period := text.get("attn_layer_period"):  # Jamba
        return [("full",) if i % period == text["attn_layer_offset"] else ("state",) for i in range(number)]
    if interval := text.get("full_attention_interval"):  # Qwen3-Next
        return [("state",) if (i + 1) % interval else ("full",) for i in range(number)]
    if "full_attn_idxs" in text:  # LFM2
        return [("full",) if i in text["full_attn_idxs"] else ("state",) for i in range(number)]
    if text.get("attention_chunk_size"):  # Llama 4
        rope = text.get("no_rope_layers") or [(i + 1) % 4 for i in range(number)]
        return [("chunked",) if rotates else ("full",) for rotates in rope]
    if kind in SLIDING_AND_FULL and window:
        period = text.get("sliding_window_pattern") or SLIDING_AND_FULL[kind]
        return [("sliding",) if (i + 1) % period else ("full",) for i in range(number)]
    if window and text.get("use_sliding_window"):  # Qwen2
        start = text.get("max_window_layers") or 0
        return [("sliding",) if i >= start else ("full",) for i in range(number)]
    return [("sliding",) if window else ("full",)] * number


def slot_bytes(dtype: str, layer: Layer, dtype_bytes: int = 2) -> int:
    """Bytes of K and V of one token and KV head. `dtype_bytes`: of a number in `DENSE`, the model's own dtype."""
    if dtype in FORMATS:
        return FORMATS[dtype].slot_bytes(layer.head_size)
    return layer.channels * (1 if dtype == FP8 else dtype_bytes)


def bytes_per_token(layers: Iterable[tuple[Layer, str]], dtype_bytes: int = 2) -> int:
    """KV bytes of a token on one rank: the sum over (layer, dtype). Layers without pages of their own count nothing."""
    return sum(
        layer.kv_heads * slot_bytes(dtype, layer, dtype_bytes)
        for layer, dtype in layers
        if layer.kind != "state" and not layer.is_shared
    )


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
