"""Fingerprint of everything besides tokens that decides a page's bytes, for the keys of pages that leave the engine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from .. import formats
from ..formats import ROPE_BITS
from ..layout import MICRO_BLOCK
from ..settings.calibration import transforms_of_model
from ..settings.facts import picks_tokens
from ..settings.options import read_options
from .model_identity import model_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..formats import Format


def fingerprint(config: VllmConfig, fmt: Format) -> str:
    """16 hexadecimal digits, equal for engines that may read each other's pages; the same in all processes of one.

    A digest of the version of the formats, of this format's rotation and bits, of the layout's units, of RoPE's bits
    beside latents, of whether latents lie in rows, of which layers are packed, of the calibration of the whole model,
    whichever heads are this rank's, and of the model's weights, wherever they lie. The number of ranks and the block
    size are in vLLM's own keys.
    """
    pages = {
        "version": formats.FORMAT_VERSION,
        "format": asdict(fmt),
        "layout": [formats.GROUP_SIZE, MICRO_BLOCK],
        "skipped": sorted(config.cache_config.kv_cache_dtype_skip_layers),
        "calibration": transforms_of_model(config, fmt),
        "model": model_identity(config),
    }
    rope_bits = read_options(config.additional_config).latent_rope_bits
    if rope_bits != ROPE_BITS[0] and config.model_config.use_mla:
        pages["latent_rope_bits"] = rope_bits
    if picks_tokens(config):
        pages["latent_rows"] = True
    return hashlib.sha256(json.dumps(pages, sort_keys=True).encode()).hexdigest()[:16]


def page_format(config: VllmConfig, fmt: Format) -> str:
    """Dtype and fingerprint, for the keys of pages that leave the process."""
    return f"{fmt.name}-{fingerprint(config, fmt)}"
