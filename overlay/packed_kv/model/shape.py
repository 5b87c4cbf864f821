"""The shape of a model's KV cache, read from its config.json, layer by layer, as vLLM builds the layers.

The runtime, the refusals and `packed-kv plan` share it. Imports no torch and no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..formats import FORMATS, ROPE_BITS
from ..json_file import printable
from ..layout import latent_slot_bytes, ring_slot_bytes
from .config_defaults import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, LENGTHS, Config
from .config_fields import (
    EXPANDED_LATENTS,
    LARGEST_WHOLE,
    MODEL_BYTES,
    BadInput,
    listed,
    nested,
    picks_tokens,
    reads_latents,
    text_config,
    whole,
    word,
)
from .layer_kinds import layer_kinds
from .state_layers import state_of

DENSE, FP8 = "bf16", "fp8"
FP8_SPARSE_BYTES = 656
"""Bytes of a token in vLLM's `fp8_ds_mla`, the fp8 of sparse attention over latents."""
INDEX_GROUP = 128
"""Channels of an index key that share an fp32 scale."""
MAX_PADDING = 1.5
"""Largest ratio of a packed page's bytes to its content. Layers with pages of several sizes share a pool, and vLLM pads
the smaller pages; beside a skipped layer in bf16 a packed page would take 3.8 times its content or more."""
NOT_SERVED = ("bamba", "plamo2", "recurrent_gemma")
"""Model types with layers of several kinds that vLLM served only before 0.27, or never, so no patched vLLM does."""
MOST_LAYERS = 10_000
"""The most layers, and runs of layers, of a config."""
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
"""Fields that may have another number in some layers, but must not be null in only some layers."""


@dataclass(frozen=True)
class ModelLayer:
    """A layer's part of a request's cache: `kind` is "full", "sliding", "chunked" or "state".

    `value_size`: channels of a head of V, 0: as many as K's. `rope_size`: RoPE channels beside one latent vector of
    `head_size` channels, which is K and V at once; 0: K and V are apart. `rope_bits`: bits of RoPE channels in packed
    pages. `is_sparse`: it reads picked latents; `index_bytes`: bytes of a token's index key beside them.
    `window`: tokens of a sliding layer's window or of a chunk. `state_bytes`: bytes of a state of a state layer on one
    rank; `states`: states per request. `is_shared`: it reads an earlier layer's pages and has none. `is_repeat`: an
    earlier layer runs again, with the same weights and a cache of its own.
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
    """A model as its config describes it; `layers` as on one of `ranks` ranks of tensor parallelism."""

    name: str
    config: Config
    layers: tuple[ModelLayer, ...]
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
        """The same model with another number of bits for RoPE beside its latents. Raises BadInput if it has no
        latents."""
        if not self.has_latents:
            raise BadInput(f"{self.name} has no latent attention (MLA), and so no RoPE channels of {bits} bits")
        return replace(self, layers=tuple(replace(layer, rope_bits=bits) for layer in self.layers))

    @property
    def attention(self) -> tuple[ModelLayer, ...]:
        """The layers with keys and values, including layers that share others' pages."""
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

    def query_heads(self, layer: ModelLayer) -> int:
        """Query heads of a layer, on all ranks."""
        return whole(layer_config(self.config, layer.number % self.config["num_hidden_layers"]), "num_attention_heads")


def index_bytes(text: Config, number: int) -> int:
    """Bytes of a token's index key in a layer; 0 where the layer takes another layer's picks. As vLLM's
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


def parse(config: Config, name: str, ranks: int = 1, recurrent_dtype: str | None = None, drafts: int = 0) -> Model:
    """The model of a config, split over `ranks`. Raises BadInput for a config that describes no decoder.

    `refusals` decides whether packed pages serve it. `recurrent_dtype`: dtype of state layers, vLLM's
    `--mamba-ssm-cache-dtype`; None: the model's. `drafts`: tokens that a step drafts, which make states larger.
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
    layers = tuple(_layers(text, name, ranks, recurrent_dtype, drafts))
    if all(layer.is_shared or layer.kind == "state" for layer in layers):
        shared = text["num_kv_shared_layers"]
        raise BadInput(f"{kind} has num_kv_shared_layers {shared}, which leaves no KV cache to share")
    return Model(name=name, config=text, layers=layers, ranks=ranks, max_len=whole(text, *LENGTHS))


def _layers(text: Config, name: str, ranks: int, recurrent_dtype: str | None, drafts: int) -> Iterable[ModelLayer]:
    kinds, runs, latents = layer_kinds(text), layer_runs(text), reads_latents(text)
    own = len(kinds) - whole(text, "num_kv_shared_layers")
    for index, (kept, times) in enumerate(zip(kinds, runs, strict=True)):
        for run, kind in ((run, kind) for run in range(1 if _shares_over_runs(text) else times) for kind in kept):
            number = run * len(kinds) + index  # as vLLM counts the caches of layers that run again
            if kind == "state":
                state = state_of(text, ranks, recurrent_dtype, drafts)
                if state is None:
                    what = f"{name} has state layers of {printable(word(text, 'model_type'), 60)}"
                    raise BadInput(f"{what}, whose size is not known here; start the engine and read its line")
                if state.size > LARGEST_WHOLE:
                    raise BadInput(f"{name} has states of {state.size:.3g} bytes by its config; give one that agrees")
                yield ModelLayer(number, kind, state_bytes=state.size, states=state.kept)
                continue
            layer = ModelLayer(number, kind, is_shared=index >= own, is_repeat=run > 0)
            if latents:  # one vector on every rank
                expanded_size(text)  # report a bad field before anything reads it
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
    """Kind of a layer's cache, and tokens of its window or chunk, from the layer's own config."""
    if run and _loops(layer, "loop_num"):  # LoopCoder's second run and later
        return "sliding", whole(layer, "loop_window_size", default=64)
    field = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}.get(kind, "")
    return kind, whole(layer, field) if field else 0


def layer_config(text: Config, number: int) -> Config:
    """The config of one layer: `per_layer_config` overrides the model's fields."""
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
    """Channels of a head in K where latent vectors are expanded to K and V. Raises BadInput."""
    return whole(text, "qk_nope_head_dim") + whole(text, "qk_rope_head_dim")


def _heads(text: Config, kind: str) -> tuple[int, int, int]:
    """KV heads of the whole model, and their sizes in K and V, in layers of a kind. Raises BadInput."""
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


def slot_bytes(dtype: str, layer: ModelLayer, dtype_bytes: int = MODEL_BYTES) -> int:
    """Bytes of K and V of one token and KV head. `dtype_bytes`: bytes per number in `DENSE`, the model's own dtype."""
    if dtype in FORMATS and layer.rope_size:
        sizes = layer.head_size, layer.rope_size, layer.rope_bits
        return latent_slot_bytes(FORMATS[dtype], *sizes, rows=layer.is_sparse)
    if dtype == FP8 and layer.is_sparse:
        return FP8_SPARSE_BYTES
    if dtype in FORMATS:
        return FORMATS[dtype].slot_bytes(layer.head_size)
    return layer.channels * (1 if dtype == FP8 else dtype_bytes)


def recent_slot_bytes(layer: ModelLayer) -> int:
    """Bytes of one token and KV head in the ring of a layer's recent window."""
    if layer.rope_size:
        return ring_slot_bytes(layer.head_size + layer.rope_size, vectors=1)
    return ring_slot_bytes(layer.head_size)


def bytes_per_token(layers: Iterable[tuple[ModelLayer, str]], dtype_bytes: int = MODEL_BYTES) -> int:
    """KV bytes of a token on one rank: the sum over (layer, dtype). Layers without pages of their own count nothing."""
    return sum(
        layer.kv_heads * slot_bytes(dtype, layer, dtype_bytes) + layer.index_bytes
        for layer, dtype in layers
        if layer.kind != "state" and not layer.is_shared
    )
