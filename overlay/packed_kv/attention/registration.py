"""Registers the dtypes and backends with vLLM, and answers which backend serves a layer.

Runs when plugins load, in the API server too: heavy modules are imported only when a layer asks for its backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm.config.cache as cache_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVQuantMode

from ..formats import FORMATS, Format

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.packed_kv")


def register_formats() -> None:
    """Register all of `FORMATS`; without the selector patch, log the command that applies it and register nothing."""
    if not is_patched():
        logger.error("packed-kv is installed, but this vLLM is not patched for it, so --kv-cache-dtype %s are unknown; "
                     "run: packed-kv-patch apply", ", ".join(FORMATS))
        return
    for fmt in FORMATS.values():
        if fmt.name not in cache_config.KV_CACHE_DTYPES:
            register_format(fmt)


def register_format(fmt: Format) -> None:
    """Register one dtype and its backend."""
    handler = type(f"{fmt.name.capitalize()}Handler", (PackedDTypeHandler,), {"name": fmt.name})
    cache_config.register_kv_cache_dtype(fmt.name)(handler)
    _register_backend(fmt)


def is_patched() -> bool:
    """Whether this vLLM lets a registered dtype bring its own backend (see vllm_patches/)."""
    return hasattr(cache_config, "KVCacheDTypeBackendHandler")


class PackedDTypeHandler:
    """What vLLM asks a registered `--kv-cache-dtype`."""

    name: str

    def torch_dtype(self) -> torch.dtype:
        """Pages are bytes."""
        return torch.uint8

    def quant_mode(self) -> KVQuantMode:
        """NONE: no generic quantisation path of vLLM applies (CUSTOM reads as OCTAVE_K3V4 in 0.33.0)."""
        return KVQuantMode.NONE

    def attn_backend(self, config: AttentionSelectorConfig) -> type[AttentionBackend]:
        """The backend of a layer. Raises ValueError, in one line, for what is not supported."""
        from .backend import backend_of

        backend = backend_of(self.name)
        reasons = _unsupported_by_platform()
        reasons += backend.validate_configuration(
            device_capability=current_platform.get_device_capability(), **config._asdict()
        )
        if reasons:
            raise ValueError(f"--kv-cache-dtype {self.name} cannot serve this model here: {'; '.join(reasons)} "
                             f"(head size {config.head_size}, attention type {config.attn_type}); "
                             "use --kv-cache-dtype auto, or --kv-cache-dtype-skip-layers for single layers")
        return backend


def _unsupported_by_platform() -> list[str]:
    if current_platform.is_cpu() or current_platform.is_cuda():
        return []
    return [f"platform {current_platform.device_name} not supported (CUDA and CPU are)"]


def _register_backend(fmt: Format) -> None:
    from vllm.v1.attention.backends.registry import register_backend

    name = fmt.name.capitalize()
    register_backend(f"PACKED_KV_{fmt.name.upper()}", f"{__package__}.backend.{name}Backend")
