"""Kinds of a model's layers: what each keeps, keys and values of all tokens, of a window or of a chunk, or a state.

Families of models say it in their own ways, or leave it out. Imports no torch and no vLLM.
"""

from __future__ import annotations

from ..json_file import printable
from .config_defaults import Config
from .config_fields import PICKING_KINDS, BadInput, listed, nested, picks_tokens, whole, word
from .state_layers import has_delta_attention

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
"""Words of `layer_types` and similar fields -> the kind of layer."""
NEMOTRON_H = {"M": ("state",), "*": ("full",), "-": (), "E": ()}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""
NEMOTRON_H_WORDS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
"""The kinds in words, as transformers 5 writes them."""
FULL_AT_LAST = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
FULL_FIRST = ("cwm", "granite_swa", "granitemoe_swa")
SLIDING_AND_FULL = {
    "gemma2": 2, "vaultgemma": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "cohere2": 4,
    "olmo3": 4, "afmoe": 4, "exaone4": 4, "exaone_moe": 4, "laguna": 1, "mellum": 1,
    **dict.fromkeys(FULL_AT_LAST, 6), **dict.fromkeys(FULL_FIRST, 4),
}  # fmt: skip
"""Model type -> period of its layers where the config says nothing. The last layer of a period (in `FULL_FIRST`, the
first) is full; the others slide. The model's last layer is full, too, in `FULL_AT_LAST`."""
NEED_LAYER_TYPES = (
    "cohere2_moe", "granitemoehybrid", "mimo_v2_flash", "nemotron_h", "olmo_hybrid", "zamba2",
)  # fmt: skip
"""Model types whose layers differ by a rule that is not known here, where the config says nothing."""
ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba", "rwkv")
"""Model types whose layers all are state layers, though their configs do not say so."""


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
    if group := whole(text, "layer_group_size"):  # Ling V2.5 and V3: last layers beyond whole groups are full
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
    """Return, for a model type in `SLIDING_AND_FULL`, whether each layer slides."""
    letters = text.get("sliding_window_pattern")
    if isinstance(letters, str) and letters and {*letters} <= {"L", "G"}:  # EXAONE 4, whose last layer is full
        return [letters[i % len(letters)] == "L" for i in range(number - 1)] + [False]
    period = whole(text, "sliding_window_pattern", "global_attn_every_n_layers") or SLIDING_AND_FULL[kind]
    full = 0 if kind in FULL_FIRST else period - 1
    slides = [i % period != full for i in range(number)]
    return [*slides[:-1], False] if kind in FULL_AT_LAST else slides
