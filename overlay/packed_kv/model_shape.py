"""The shape of a model's KV cache, read from its config.json: layer by layer, as vLLM builds them.

The runtime, the refusals and `packed-kv plan` share it. Families name and leave out fields in their own ways; this file
holds what is known of them. Imports no torch and no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .config_defaults import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, LENGTHS, Config, text_type, with_defaults
from .formats import FORMATS, ROPE_BITS
from .json_file import printable, shown
from .layout import latent_slot_bytes, ring_slot_bytes

DENSE, FP8 = "bf16", "fp8"
FP8_SPARSE_BYTES = 656
"""Bytes of a token in vLLM's `fp8_ds_mla`, which is fp8 of sparse attention over latents."""
INDEX_GROUP = 128
"""Channels of an index key that share a scale of fp32."""
MAX_PADDING = 1.5
"""Largest ratio of a packed page's bytes to its content. Layers with pages of several sizes share a pool, and vLLM pads
the smaller pages; beside a skipped layer in bf16 a packed page would take 3.8 times its content or more."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MODEL_BYTES = 2
"""Bytes of a number of weights, activations and pages: by default vLLM serves a config's float32 in bf16."""

PICKING_KINDS = ("deepseek_sparse_attention", "indexed_attention", "sparse_attention", "sparse")
"""Words of `layer_types` for layers of latents that read picked tokens, as vLLM's models/hy_v4 knows them."""
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
NEMOTRON_H_WORDS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
"""The same in words, as transformers 5 writes them."""
FULL_AT_LAST = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
FULL_FIRST = ("cwm", "granite_swa", "granitemoe_swa")
SLIDING_AND_FULL = {
    "gemma2": 2, "vaultgemma": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "cohere2": 4,
    "olmo3": 4, "afmoe": 4, "exaone4": 4, "exaone_moe": 4, "laguna": 1, "mellum": 1,
    **dict.fromkeys(FULL_AT_LAST, 6), **dict.fromkeys(FULL_FIRST, 4),
}  # fmt: skip
"""Model type -> period of its layers, of which the last (in `FULL_FIRST`, the first) is full and the others slide,
where the config says nothing. The model's last layer is full, too, in `FULL_AT_LAST`."""
NEED_LAYER_TYPES = (
    "cohere2_moe", "granitemoehybrid", "mimo_v2_flash", "nemotron_h", "olmo_hybrid", "zamba2",
)  # fmt: skip
"""Model types whose layers differ by no rule that is known here where the config says nothing."""
NOT_SERVED = ("bamba", "plamo2", "recurrent_gemma")
"""Model types with layers of several kinds that vLLM served before 0.27, or never: no vLLM that is patched does."""
DELTA_NET = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
"""Sizes of gated delta nets, each after `linear_`."""
EXPANDED_LATENTS = ("minicpm3",)
"""Model types with a `kv_lora_rank` whose latent vectors vLLM expands to K and V of every head."""
LARGEST_WHOLE, MOST_LAYERS = 1 << 40, 10_000
"""Bounds of the numbers in a config."""
LAYER_FIELDS = frozenset((
    "num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_attention_groups", "head_dim",
    "attention_head_dim", "kv_channels", "v_head_dim", "sliding_window", "attention_chunk_size", "intermediate_size",
    "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "n_shared_experts",
))  # fmt: skip
"""Fields of `per_layer_config` that are read here."""
NEUTRAL_FIELDS = frozenset((
    "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "attention_dropout", "attention_bias",
    "mlp_bias", "hidden_act", "hidden_activation", "rms_norm_eps", "attn_logit_softcapping", "num_experts_per_tok",
))  # fmt: skip
"""Fields that change no page and no number of weights."""
WINDOW_FIELDS = frozenset(("sliding_window", "attention_chunk_size"))
"""Fields that may be another number in some layers, but not null in these or in the others alone."""
ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba", "rwkv")
"""Model types whose layers all are state layers, though their configs do not say so."""


class BadInput(ValueError):
    """Input that cannot be used; the message is one line that says what was read and what to give."""


@dataclass(frozen=True)
class Layer:
    """A layer's part of a request's cache: `kind` is "full", "sliding", "chunked" or "state".

    `value_size`: channels of a head of V, 0: as many as K's. `rope_size`: RoPE channels beside one latent vector of
    `head_size` channels, which is K and V at once; 0: K and V are apart. `rope_bits`: of RoPE in packed pages.
    `is_sparse`: it reads picked tokens of latents; `index_bytes`: of a token's index key beside them.
    `window`: tokens of a sliding layer's window or of a chunk. `state_bytes`: of a state layer, for one rank, and
    `states` of them a request. `is_shared`: it reads the pages of a layer before it and has none. `is_repeat`: a
    layer before it runs again, with its weights and a cache of its own.
    """

    number: int
    kind: str
    kv_heads: int = 0
    head_size: int = 0
    window: int = 0
    state_bytes: int = 0
    states: int = 0
    is_shared: bool = False
    is_repeat: bool = False
    value_size: int = 0
    rope_size: int = 0
    rope_bits: int = ROPE_BITS[0]
    is_sparse: bool = False
    index_bytes: int = 0

    @property
    def channels(self) -> int:
        """Channels of a head's K and V together."""
        if self.rope_size:
            return self.head_size + self.rope_size
        return self.head_size + (self.value_size or self.head_size)


@dataclass(frozen=True)
class Model:
    """A model as its config describes it; `layers` are those of one of `ranks` ranks of tensor parallelism."""

    name: str
    config: Config
    layers: tuple[Layer, ...]
    ranks: int
    max_len: int

    @property
    def is_hybrid(self) -> bool:
        return any(layer.kind == "state" for layer in self.layers)

    @property
    def has_latents(self) -> bool:
        return any(layer.rope_size for layer in self.layers)

    @property
    def picks_tokens(self) -> bool:
        return any(layer.is_sparse for layer in self.layers)

    @property
    def rope_bits(self) -> int | None:
        """Bits of RoPE channels in packed pages of latents; None: the model has no latents."""
        return next((layer.rope_bits for layer in self.layers if layer.rope_size), None)

    def with_rope_bits(self, bits: int) -> Model:
        """The same model with other bits of RoPE beside its latents. Raises BadInput if it has none."""
        if not self.has_latents:
            raise BadInput(f"{self.name} has no latent attention (MLA), and so no RoPE channels of {bits} bits")
        return replace(self, layers=tuple(replace(layer, rope_bits=bits) for layer in self.layers))

    @property
    def attention(self) -> tuple[Layer, ...]:
        """The layers with keys and values, those that share others' pages among them."""
        return tuple(layer for layer in self.layers if layer.kind != "state")

    def calibrated_shape(self) -> dict[str, Any]:
        """Arguments of `Calibration.check_model` for a model on one rank."""
        layer = self.attention[0]
        return {
            "layers": self.config["num_hidden_layers"],
            "kv_heads": layer.kv_heads,
            "head_size": layer.head_size,
            "value_head_size": layer.value_size or layer.head_size,
            "every_layer": not self.is_hybrid and not any(layer.is_shared for layer in self.layers),
        }

    def query_heads(self, layer: Layer) -> int:
        """Query heads of a layer, on all ranks."""
        return whole(layer_config(self.config, layer.number % self.config["num_hidden_layers"]), "num_attention_heads")


def whole(config: Config, *names: str, default: int = 0) -> int:
    """The first field that is there and not null: a whole number. Raises BadInput for anything else."""
    name, value = _first(config, names)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value <= LARGEST_WHOLE:
        raise BadInput(f"{name} is {shown(value)}; it must be a whole number of at most {LARGEST_WHOLE:,}")
    return value


def word(config: Config, *names: str) -> str:
    """The first field that is there and not null, a text; "": there is none. Raises BadInput for anything else."""
    name, value = _first(config, names)
    if not isinstance(value, str | None):
        raise BadInput(f"{name} is {shown(value)}; it must be a string")
    return value or ""


def nested(config: Config, *names: str) -> Config:
    """The first field that is there and not null, an object; {}: there is none. Raises BadInput for anything else."""
    name, value = _first(config, names)
    if not isinstance(value, dict | None):
        raise BadInput(f"{name} is {shown(value)}; it must be an object")
    return value or {}


def listed(config: Config, *names: str, of: type, least: int = 0) -> list[Any]:
    """The first field that is there and not null, a list; []: there is none. Raises BadInput for anything else, and for
    fewer than `least` entries."""
    name, value = _first(config, names)
    if value is None:
        return []
    bounded = range(LARGEST_WHOLE + 1)
    if not isinstance(value, list) or not all(isinstance(x, of) and (of is not int or x in bounded) for x in value):
        kinds = {int: "whole numbers", str: "words"}[of]
        raise BadInput(f"{name} is {shown(value)}; it must be a list of {kinds}")
    if len(value) < least:
        raise BadInput(f"{name} has {len(value)} entries, but the model has {least} layers; give a config that agrees")
    return value


def _first(config: Config, names: Iterable[str]) -> tuple[str, Any]:
    return next(((name, config[name]) for name in names if config.get(name) is not None), ("", None))


def text_config(config: Config) -> Config:
    """The part of a config that describes the language model, with the defaults that it leaves out. Raises BadInput."""
    above: Config = {key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in config}
    outer, kind = nested(config, "thinker_config") or config, word(config, "model_type")  # Qwen's Omni models
    text = nested(outer, "text_config", "llm_config")
    if text:
        own = word(text, "model_type") or text_type(kind)
        return with_defaults({**above, **text, "model_type": own}, kind, own)
    if text_type(kind) and {*LAYERS}.isdisjoint(outer):  # a default text may have other sizes than its class
        return config
    return with_defaults({**above, **outer}, text_type(kind) or kind)


def reads_latents(text: Config) -> bool:
    """True if vLLM serves the model with latent attention (MLA)."""
    return whole(text, "kv_lora_rank") > 0 and word(text, "model_type") not in EXPANDED_LATENTS


def picks_tokens(text: Config) -> bool:
    """True if layers of latent attention read picked tokens (DeepSeek V3.2, GLM-5)."""
    return reads_latents(text) and text.get("index_topk") is not None


def all_pick(layer_types: object) -> bool:
    """True if `layer_types` of a config says of every layer that it reads picked tokens."""
    return isinstance(layer_types, list) and bool(layer_types) and all(kind in PICKING_KINDS for kind in layer_types)


def index_bytes(text: Config, number: int) -> int:
    """Bytes of a token's index key in a layer; 0 where it takes another layer's picks. As vLLM's
    `models/deepseek_v32/attention.py`, and for Hy4 `models/hy_v4`. Raises BadInput."""
    pattern, every = text.get("index_topk_pattern"), whole(text, "index_topk_freq", default=1)
    if word(text, "model_type") == "hy_v4":
        types = listed(text, "indexer_types", of=str, least=text["num_hidden_layers"])
        takes_picks = types[number] == "shared" if types else number > 0 and number % 4 != 1
    elif isinstance(pattern, str | list):
        takes_picks = number < len(pattern) and pattern[number] == "S"
    else:
        behind = max(number - whole(text, "index_skip_topk_offset", default=2) + 1, 0)
        takes_picks = behind % max(every, 1) != 0
    channels = whole(text, "index_head_dim", default=INDEX_GROUP)
    return 0 if takes_picks else channels + channels // INDEX_GROUP * 4


def parse(config: Config, name: str, ranks: int = 1, recurrent_dtype: str | None = None) -> Model:
    """The model of a config, split over `ranks`. Raises BadInput for a config that describes no decoder.

    Whether packed pages serve it, `refusals` says. `recurrent_dtype`: of state layers, vLLM's
    `--mamba-ssm-cache-dtype`; None: the model's.
    """
    name, text = printable(name), text_config(config)
    kind = f"{name} ({printable(word(text, 'model_type'), 60) or 'of no model_type'})"
    if word(text, "model_type") in NOT_SERVED:
        raise BadInput(f"{kind} is of a type that no vLLM serves that packed-kv supports; give another model")
    number = _layers_with_weights(text)
    heads = whole(text, *HEADS)
    hidden = whole(text, *HIDDEN)
    if not (number and heads and hidden):
        raise BadInput(
            f"{kind} has no attention that its config describes (num_hidden_layers {number}, num_attention_heads "
            f"{heads}, hidden_size {hidden}); give a decoder's config"
        )
    if number > MOST_LAYERS:
        raise BadInput(f"{kind} has {number:,} layers; packed-kv reads configs of at most {MOST_LAYERS:,}")
    text = {**text, "num_hidden_layers": number, "num_attention_heads": heads, "hidden_size": hidden}
    text["per_layer_config"] = _per_layer(text)
    if not any(set(kept) - {"state"} for kept in layer_kinds(text)):
        raise BadInput(f"{kind} has no attention layers, so no KV cache; give a model that has")
    if heads % ranks:
        raise BadInput(f"--tensor-parallel {ranks} does not divide the {heads} attention heads of {name}; give another")
    layers = tuple(_layers(text, name, ranks, recurrent_dtype))
    if all(layer.is_shared or layer.kind == "state" for layer in layers):
        shared = text["num_kv_shared_layers"]
        raise BadInput(f"{kind} has num_kv_shared_layers {shared}, which leaves no KV cache to share")
    return Model(name=name, config=text, layers=layers, ranks=ranks, max_len=whole(text, *LENGTHS))


def _layers(text: Config, name: str, ranks: int, recurrent_dtype: str | None) -> Iterable[Layer]:
    kinds, runs, latents = layer_kinds(text), layer_runs(text), reads_latents(text)
    own = len(kinds) - whole(text, "num_kv_shared_layers")
    for index, (kept, times) in enumerate(zip(kinds, runs, strict=True)):
        for run, kind in ((run, kind) for run in range(1 if _shares_over_runs(text) else times) for kind in kept):
            number = run * len(kinds) + index  # as vLLM counts the caches of layers that run again
            if kind == "state":
                state = state_of(text, ranks, recurrent_dtype)
                if state is None:
                    what = f"{name} has state layers of {printable(word(text, 'model_type'), 60)}"
                    raise BadInput(f"{what}, whose size is not known here; start the engine and read its line")
                if state.size > LARGEST_WHOLE:
                    raise BadInput(f"{name} has states of {state.size:.3g} bytes by its config; give one that agrees")
                yield Layer(number, kind, state_bytes=state.size, states=state.kept)
                continue
            layer = Layer(number, kind, is_shared=index >= own, is_repeat=run > 0)
            if latents:  # one vector on every rank
                expanded_size(text)  # a bad field is named before anything reads it
                rank, rope_size = whole(text, "kv_lora_rank"), whole(text, "qk_rope_head_dim")
                layer = replace(layer, kv_heads=1, head_size=rank, rope_size=rope_size)
                if picks_tokens(text):
                    layer = replace(layer, is_sparse=True, index_bytes=index_bytes(text, index))
                yield layer
                continue
            config = layer_config(text, index)
            heads, size, value_size = _heads(config, kind)
            if heads % ranks and ranks % heads:
                raise BadInput(
                    f"--tensor-parallel {ranks} neither divides the {heads} KV heads of {name} nor is a multiple of "
                    "them; give another"
                )
            kind, window = _window(config, kind, run)
            layer = replace(layer, kind=kind, kv_heads=max(1, heads // ranks), head_size=size, window=window)
            yield replace(layer, value_size=0 if value_size == size else value_size)


def _window(layer: Config, kind: str, run: int) -> tuple[str, int]:
    """Kind of a layer's cache, and tokens of its window or of a chunk, by the layer's own config."""
    if run and _loops(layer, "loop_num"):  # LoopCoder's second run and later
        return "sliding", whole(layer, "loop_window_size", default=64)
    field = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}.get(kind, "")
    return kind, whole(layer, field) if field else 0


def layer_config(text: Config, number: int) -> Config:
    """The config of one layer: what `per_layer_config` says of it stands above what the model has."""
    fields = text.get("per_layer_config", {}).get(number)
    return {**text, **fields} if fields else text


def _per_layer(text: Config) -> dict[int, Config]:
    """Settings of layers that differ, by number: `per_layer_config`, as transformers 5.19 writes it. Raises
    BadInput."""
    layers, number = nested(text, "per_layer_config"), text["num_hidden_layers"]
    found = {int(key): nested(layers, key) for key in layers if key.isdecimal() and len(key) < 6 and int(key) < number}
    if len(found) < len(layers):
        raise BadInput(f"per_layer_config has {len(layers)} entries, not all for one of {number} layers, from 0 on")
    for layer, fields in found.items():
        unknown = {*fields} - LAYER_FIELDS - NEUTRAL_FIELDS
        unknown |= {name for name in WINDOW_FIELDS & {*fields} if (fields[name] is None) != (text.get(name) is None)}
        if unknown:
            what = f"per_layer_config has {printable(', '.join(sorted(unknown)))} for layer {layer}"
            raise BadInput(f"{what}; how its pages change is not known here; start the engine and read its line")
    return found


def _layers_with_weights(text: Config) -> int:
    """Layers with weights of their own. Raises BadInput."""
    if text.get("block_configs") is not None:
        raise BadInput("block_configs, by which layers differ, are not read here; start the engine and read its line")
    if word(text, "model_type") == "hrm_text":  # two stacks
        return 2 * whole(text, "num_layers_per_stack", "num_hidden_layers")
    if word(text, "model_type").startswith("longcat_flash"):  # num_hidden_layers counts attention
        return whole(text, "num_layers") or whole(text, "num_hidden_layers") // 2
    return whole(text, *LAYERS) or len(listed(text, "layers_block_type", of=str))  # Nemotron-H of transformers 5


def layer_runs(text: Config) -> list[int]:
    """Runs of each layer per token: in vLLM each run has a cache of its own, unless they share one. Raises BadInput."""
    number = text["num_hidden_layers"]
    if word(text, "model_type") == "hrm_text":
        high, low = whole(text, "H_cycles", default=2), whole(text, "L_cycles", default=3)
        runs = [high * low] * (number // 2) + [high] * (number // 2)
    elif again := whole(text, "n_recurrent_loops"):  # Dory
        first, last = whole(text, "n_input_layers"), number - whole(text, "n_output_layers")
        runs = [again if first <= index < last else 1 for index in range(number)]
    else:
        runs = [max(_loops(text, "loop_num"), _loops(text, "total_ut_steps"), 1)] * number
    if sum(runs) > MOST_LAYERS:
        raise BadInput(f"layers run {sum(runs):,} times per token; packed-kv reads configs of at most {MOST_LAYERS:,}")
    return runs


def _loops(text: Config, name: str) -> int:
    """Runs of all layers by LoopCoder's or Ouro's field; 0: it has none."""
    is_loop_coder = name == "loop_num" and any("LoopCoder" in name for name in listed(text, "architectures", of=str))
    return whole(text, name, default=2 if is_loop_coder else 0)


def _shares_over_runs(text: Config) -> bool:
    return word(text, "recurrent_kv_cache_mode") == "last_loop"


def expanded_size(text: Config) -> int:
    """Channels of a head of K where latent vectors are expanded to K and V. Raises BadInput."""
    return whole(text, "qk_nope_head_dim") + whole(text, "qk_rope_head_dim")


def _heads(text: Config, kind: str) -> tuple[int, int, int]:
    """KV heads of the whole model, and their sizes in K and V, of its layers of a kind. Raises BadInput."""
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    if word(text, "model_type") in EXPANDED_LATENTS:  # V is padded to K's size
        size = expanded_size(text)
        return heads, size, size
    kv_heads = whole(nested(text, "attn_config"), "kv_n_heads") or whole(text, *KV_HEADS)  # DBRX and MPT, others
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # Falcon, StarCoder
        kv_heads = 1
    size = whole(text, *HEAD_DIM) or hidden // heads
    if word(text, "model_type") == "zamba2":  # whatever its config says
        size = 2 * hidden // heads
    if kind == "full" and whole(text, "global_head_dim") and not text.get("per_layer_config"):  # Gemma 4
        size = whole(text, "global_head_dim")
        kv_heads = whole(text, "num_global_key_value_heads") or kv_heads
    value_size = whole(text, "v_head_dim") or size
    if kind == "sliding" and whole(text, "swa_head_dim"):  # MiMo-V2
        kv_heads, size = whole(text, "swa_num_key_value_heads"), whole(text, "swa_head_dim")
        value_size = whole(text, "swa_v_head_dim") or size
    return kv_heads or heads, size, value_size


def layer_letters(text: Config) -> str:
    """Nemotron-H's letter of each layer; "" for other models. Raises BadInput for fewer letters than layers."""
    letters, number = word(text, "hybrid_override_pattern"), text["num_hidden_layers"]
    if not letters and word(text, "model_type") == "nemotron_h":
        words = listed(text, "layers_block_type", "layer_types", of=str)
        letters = "".join(NEMOTRON_H_WORDS.get(word, "?") for word in words)
    if letters and len(letters) < number:
        raise BadInput(f"hybrid_override_pattern has {len(letters)} letters, but the model has {number} layers")
    return letters[:number]


def layer_kinds(text: Config) -> list[tuple[str, ...]]:
    """Kind of each layer in one run, one of `KINDS`' values. Raises BadInput for a word that is not known."""
    kinds = _kinds(text)
    return [kept * 2 for kept in kinds] if word(text, "model_type").startswith("longcat_flash") else kinds


def _kinds(text: Config) -> list[tuple[str, ...]]:
    number, kind, letters = text["num_hidden_layers"], word(text, "model_type"), layer_letters(text)
    window = whole(text, "sliding_window") if text.get("use_sliding_window") is not False else 0
    if pattern := listed(text, "hybrid_layer_pattern", of=int, least=number):  # MiMo-V2, whatever its layer_types say
        return [("sliding",) if slides else ("full",) for slides in pattern[:number]]
    if words := listed(text, "layer_types", "layers_block_type", of=str, least=number):
        known = KINDS | dict.fromkeys(PICKING_KINDS, ("full",)) if picks_tokens(text) else KINDS
        if unknown := sorted(set(words) - set(known)):
            what = printable(", ".join(unknown))
            raise BadInput(f"layers of the kind {what} are not known; known: {', '.join(known)}")
        return [known[word] for word in words[:number]]
    if letters:
        return [NEMOTRON_H.get(letter, ()) for letter in letters]
    if set(listed(text, "attn_type_list", of=int)) - {1}:
        raise BadInput(
            "attn_type_list has layers of linear attention, as in MiniMax-Text-01, which no vLLM serves that packed-kv "
            "supports; give another model"
        )
    if kind in NEED_LAYER_TYPES:
        raise BadInput(f"layers of {kind} differ, but the config has no layer_types; give one that has")
    if kind in ATTENTION_FREE:
        return [("state",)] * number
    if kind == "falcon_h1":
        return [("state", "full")] * number
    if period := whole(text, "attn_layer_period"):  # Jamba
        offset = whole(text, "attn_layer_offset")
        return [("full",) if i % period == offset else ("state",) for i in range(number)]
    if interval := whole(text, "full_attention_interval"):  # Qwen3-Next
        return [("state",) if (i + 1) % interval else ("full",) for i in range(number)]
    if "linear_attn_config" in text:  # Kimi-Linear, Kimi K3: numbers begin at 1
        states = set(listed(nested(text, "linear_attn_config"), "kda_layers", of=int))
        return [("state",) if i + 1 in states else ("full",) for i in range(number)]
    if group := whole(text, "layer_group_size"):  # Ling V2.5, and V3, whose last layers are full beyond whole groups
        states = number // group * group if has_delta_attention(text) else number
        return [("state",) if (i + 1) % group and i < states else ("full",) for i in range(number)]
    if "full_attn_idxs" in text:  # LFM2
        full = set(listed(text, "full_attn_idxs", of=int))
        return [("full",) if i in full else ("state",) for i in range(number)]
    if whole(text, "attention_chunk_size"):  # Llama 4
        given = text.get("no_rope_layers") != []  # which means the default
        rope = (given and listed(text, "no_rope_layers", of=int, least=number)) or [(i + 1) % 4 for i in range(number)]
        return [("chunked",) if rotates else ("full",) for rotates in rope[:number]]
    if kind in SLIDING_AND_FULL and window:
        return [("sliding",) if slides else ("full",) for slides in _sliding_layers(text, kind, number)]
    if window and text.get("use_sliding_window"):  # Qwen2
        start = whole(text, "max_window_layers")
        return [("sliding",) if i >= start else ("full",) for i in range(number)]
    return [("sliding",) if window else ("full",)] * number


def _sliding_layers(text: Config, kind: str, number: int) -> list[bool]:
    """Return for each layer of a model of a type in `SLIDING_AND_FULL` whether it slides."""
    letters = text.get("sliding_window_pattern")
    if isinstance(letters, str) and letters and {*letters} <= {"L", "G"}:  # EXAONE 4, whose last layer is full
        return [letters[i % len(letters)] == "L" for i in range(number - 1)] + [False]
    period = whole(text, "sliding_window_pattern", "global_attn_every_n_layers") or SLIDING_AND_FULL[kind]
    full = 0 if kind in FULL_FIRST else period - 1
    slides = [i % period != full for i in range(number)]
    return [*slides[:-1], False] if kind in FULL_AT_LAST else slides


def slot_bytes(dtype: str, layer: Layer, dtype_bytes: int = MODEL_BYTES) -> int:
    """Bytes of K and V of one token and KV head. `dtype_bytes`: of a number in `DENSE`, the model's own dtype."""
    if dtype in FORMATS and layer.rope_size:
        sizes = layer.head_size, layer.rope_size, layer.rope_bits
        return latent_slot_bytes(FORMATS[dtype], *sizes, rows=layer.is_sparse)
    if dtype == FP8 and layer.is_sparse:
        return FP8_SPARSE_BYTES
    if dtype in FORMATS:
        return FORMATS[dtype].slot_bytes(layer.head_size)
    return layer.channels * (1 if dtype == FP8 else dtype_bytes)


def recent_slot_bytes(layer: Layer) -> int:
    """Bytes of one token and KV head in the ring of a layer's recent window."""
    if layer.rope_size:
        return ring_slot_bytes(layer.head_size + layer.rope_size, vectors=1)
    return ring_slot_bytes(layer.head_size)


def bytes_per_token(layers: Iterable[tuple[Layer, str]], dtype_bytes: int = MODEL_BYTES) -> int:
    """KV bytes of a token on one rank: the sum over (layer, dtype). Layers without pages of their own count nothing."""
    return sum(
        layer.kv_heads * slot_bytes(dtype, layer, dtype_bytes) + layer.index_bytes
        for layer, dtype in layers
        if layer.kind != "state" and not layer.is_shared
    )


@dataclass(frozen=True)
class State:
    """`size`: bytes of a state on one rank. `kept`: states of a request, with the prefix cache on: the one that is
    read, the one that is written and, in Mamba-2 layers, one inside a prefill."""

    size: int
    kept: int = 2


def state_of(config: Config, ranks: int, recurrent_dtype: str | None = None) -> State | None:
    """The state of a layer on one of `ranks` ranks, as vLLM's `MambaStateShapeCalculator` has it; None: not known.

    It is a window of a short convolution's inputs and, but for short convolutions alone, a recurrent state.
    Recurrent states have the dtype of the activations, unless the model has another one for them, or `recurrent_dtype`
    is given (`--mamba-ssm-cache-dtype`).
    """
    hidden, kind = config["hidden_size"], word(config, "model_type")
    recurrent = DTYPE_BYTES.get(recurrent_dtype or _recurrent_dtype(config), MODEL_BYTES)
    if "linear_num_value_heads" in config:  # gated delta nets
        keys, values = delta_net_channels(config)
        conv = (2 * keys + values) * max(0, whole(config, "linear_conv_kernel_dim", default=4) - 1)
        return State((conv * MODEL_BYTES + values * whole(config, "linear_key_head_dim") * recurrent) // ranks)
    if has_delta_attention(config):
        heads, head_dim, kernel = delta_attention(config)
        conv = 3 * heads * head_dim * max(0, kernel - 1)
        return State((conv * MODEL_BYTES + heads * head_dim**2 * recurrent) // ranks)
    if whole(config, "layer_group_size"):  # linear attention of Ling V2.5
        heads = config["num_attention_heads"]
        return State(heads * (whole(config, "head_dim") or hidden // heads) ** 2 * MODEL_BYTES // ranks)
    if "conv_L_cache" in config or kind.startswith("lfm2"):
        kept = max(0, whole(config, "conv_L_cache", default=3) - 1)
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
        conv = (inner + 2 * groups * size) * (kernel - 1)
        return State((conv * MODEL_BYTES + heads * head_dim * size * recurrent) // ranks, kept=3)
    if size:  # Mamba-1
        return State((inner * (kernel - 1) * MODEL_BYTES + inner * size * recurrent) // ranks)
    return None


def delta_net_channels(config: Config) -> tuple[int, int]:
    """Channels of all heads of a gated delta net: of K, and of V. Raises BadInput."""
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
    """Channels within a Mamba layer."""
    expand = config.get("mamba_expand", 2)
    if type(expand) not in (int, float) or not 0 < expand < LARGEST_WHOLE:
        raise BadInput(f"mamba_expand is {shown(expand)}; it must be a number above 0")
    return whole(config, "mamba_d_ssm") or int(expand * config["hidden_size"])


def _recurrent_dtype(config: Config) -> str:
    """Dtype in which vLLM keeps recurrent states if the model says so, else ""."""
    kind = word(config, "model_type")
    if has_delta_attention(config) or "AliceAIForCausalLM" in listed(config, "architectures", of=str):
        return "float32"
    if kind == "nemotron_h":
        return word(config, "mamba_ssm_cache_dtype") or "float32"
    return word(config, "mamba_ssm_dtype") if kind.startswith("qwen3_5") else ""
