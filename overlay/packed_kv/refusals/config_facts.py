"""Facts about a model from its config.json, for the rules of `refusals/table.py`. No torch."""

from __future__ import annotations

from ..json_file import printable
from ..model.architectures import (
    ALIBI,
    DRAFTS_WITHOUT_A_CACHE,
    ENCODER_DECODERS,
    ENCODER_TYPES,
    ENCODERS,
    ENCODERS_UNLESS_DECODERS,
    IMAGE_PREFIXES,
    LATENT_SINKS,
)
from ..model.cache_scheme import asked_cache
from ..model.config_defaults import Config
from ..model.config_fields import all_pick, listed, nested, reads_latents, text_config, whole, word
from .facts import Architecture, Attention, Cache, Facts, Latents, Layer, Pages


def facts_of_config(config: Config) -> Facts:
    """Facts from a config.json about a model's architecture. Raises BadInput."""
    text, kind = text_config(config), word(config, "model_type")
    names = listed(config, "architectures", of=str) or listed(text, "architectures", of=str)
    kinds = {kind, word(text, "model_type")}
    name = names[0] if names else ""
    is_encoder = bool(kinds & {*ENCODER_TYPES}) or name.startswith(ENCODERS) or text.get("is_causal") is False
    is_encoder |= text.get("use_bidirectional_attention") is True
    is_encoder |= text.get("is_decoder") is False and name.startswith(ENCODERS_UNLESS_DECODERS)
    attention = "encoder_only" if is_encoder else "decoder"
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder") or name.startswith(ENCODER_DECODERS):
        attention = "encoder_decoder"
    drafts = sorted(kinds & {*DRAFTS_WITHOUT_A_CACHE})
    has_latents = reads_latents(text)
    has_sinks = name.startswith(LATENT_SINKS) or (has_latents and bool(text.get("learnable_sink")))
    return Facts(
        Cache(auto=asked_cache(nested(text, "quantization_config"))),
        Architecture(name=printable(name, 60) or None),
        Latents(
            is_mla=has_latents,
            is_sparse=has_latents and text.get("index_topk") is not None,
            has_dense_layers=has_sinks and not (text.get("index_topk") and all_pick(text.get("layer_types"))),
            rank=whole(text, "kv_lora_rank") if has_latents else None,
            rope_size=whole(text, "qk_rope_head_dim") if has_latents else None,
        ),
        Attention(
            kind=attention,
            has_alibi=bool(kinds & {*ALIBI} or text.get("alibi") or nested(text, "attn_config").get("alibi")),
            has_image_prefix=bool(kind in IMAGE_PREFIXES and config.get("vision_config"))
            or text.get("use_bidirectional_attention") == "vision",
            has_static_sinks=bool(text.get("param_sink_number")),
        ),
        Layer(
            name=drafts[0] if drafts else None,
            options=("dual_chunk_attention_config",) if text.get("dual_chunk_attention_config") else None,
        ),
        Pages(
            kind="RSWASpec" if whole(config, "rswa_window") or whole(text, "rswa_window") else None,
            owner="the model" if drafts else None,
        ),
    )
