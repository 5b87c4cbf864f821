"""Registers the dtypes and backends with vLLM, and answers which backend serves a layer.

Runs when plugins load, in the API server too: heavy modules are imported only when a layer asks for its backend.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import vllm
import vllm.config.cache as cache_config
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import register_backend
from vllm.v1.kv_cache_interface import KVQuantMode

from ..formats import FORMATS, HEAD_DIM_STEP, Format
from ..layout import MICRO_BLOCK
from ..settings.connectors import Connector, connectors
from ..vllm_compat import is_patched
from .names import class_name, registry_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.packed_kv")

RULES = {
    "head_size not supported": f"head size must be a multiple of {HEAD_DIM_STEP}",
    "block_size not supported": f"block size must be a multiple of {MICRO_BLOCK}",
    "compute capability not supported": "compute capability must be 8.0 or later",
    "partial multimodal token full attention not supported": (
        "images whose tokens attend to each other in both directions not supported"
    ),
}
"""What vLLM says of a refused configuration -> the rule behind it."""

CONNECTORS = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "DecodeBenchConnector",
)
"""KV connectors of vLLM that find pages by its block hashes, shake hands by its compatibility hash, or share none."""

IGNORES_KV_CACHE_DTYPE = ("FalconForCausalLM", "RWForCausalLM")
"""Architectures whose models do not tell their attention layers of --kv-cache-dtype (`falcon.py` of all versions): vLLM
would serve them with dense pages, whatever was asked for."""


def register_formats() -> None:
    """Register all of `FORMATS`; without the patches, say which command applies them and register nothing.

    Raises SystemExit where the command line asks for one of the dtypes: argparse would print 300 lines of usage after
    the log.
    """
    if not is_patched():
        message = (
            f"packed-kv is installed, but this vLLM ({vllm.__version__}) is not patched for it, so that "
            f"--kv-cache-dtype {', '.join(FORMATS)} fail; run: packed-kv-patch apply"
        )
        if any(argument.removeprefix("--kv-cache-dtype=") in FORMATS for argument in sys.argv):
            raise SystemExit(message)
        logger.error(message)
        return
    for fmt in FORMATS.values():
        if fmt.name not in cache_config.KV_CACHE_DTYPES:
            register_format(fmt)


def register_format(fmt: Format) -> None:
    """Register one dtype and its backend."""
    handler = type(f"{fmt.name.capitalize()}Handler", (PackedDTypeHandler,), {"name": fmt.name})
    cache_config.register_kv_cache_dtype(fmt.name)(handler)
    register_backend(registry_name(fmt), f"{__package__}.backend.{class_name(fmt)}")


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
        from ..attention.context_parallel import refuse
        from .backend import backend_of

        refuse(get_current_vllm_config(), self.name)
        backend = backend_of(self.name)
        refused = backend.validate_configuration(
            device_capability=current_platform.get_device_capability(), **config._asdict()
        )
        reasons = [*_unsupported_here(), *_unsupported_in(get_current_vllm_config())]
        reasons += [RULES.get(reason, reason) for reason in refused]
        if reasons:
            remedy = "use --kv-cache-dtype auto, or --kv-cache-dtype-skip-layers for single layers"
            if refused == ["block_size not supported"]:
                remedy = f"use --block-size {MICRO_BLOCK}, or --kv-cache-dtype auto"
            if config.use_mm_prefix:
                remedy = "use --language-model-only, or --kv-cache-dtype auto"
            raise ValueError(
                f"--kv-cache-dtype {self.name} cannot serve this model here: {'; '.join(reasons)} "
                f"(head size {config.head_size}, block size {config.block_size or 'not set'}, {config.dtype}); {remedy}"
            )
        return backend

    def check_layer(self, layer_name: str, layer: AttentionLayerBase) -> None:
        """Have the layer make its codec: vLLM calls this once the model is loaded, before it profiles its memory.

        Raises ValueError, in one line, if a layer got its backend from its model and not from `attn_backend`, or if its
        implementation was not told the size of V's heads; and CalibrationError.
        """
        from .backend import backend_of

        backend = layer.get_attn_backend()
        if not issubclass(backend, backend_of(self.name)):
            raise ValueError(
                f"--kv-cache-dtype {self.name} cannot serve layer {layer_name} ({type(layer).__name__}): its model "
                f"chooses the attention backend {backend.get_name()}, which cannot read packed pages; "
                "use --kv-cache-dtype auto for this model"
            )
        impl = getattr(layer, "impl", None)
        value_dim, told = (getattr(part, "head_size_v", None) for part in (layer, impl))
        if value_dim != told:
            raise ValueError(
                f"--kv-cache-dtype {self.name} cannot serve layer {layer_name} ({type(layer).__name__}): its V has "
                f"{value_dim} channels, and this vLLM ({vllm.__version__}) tells no backend of V's head size; "
                "use --kv-cache-dtype auto for this model"
            )
        if impl is not None:
            impl.build(layer_name)

    def before_engine(self, vllm_config: VllmConfig) -> None:
        """Have a calibration file made if that was asked for, then see to tiers on disk. Raises CalibrationError, and
        ValueError for tiers without a folder and for models that would not be packed."""
        from ..settings.self_calibration import resolve_auto
        from ..sharing.tiers import check_tiers

        architecture = vllm_config.model_config.architecture
        if architecture in IGNORES_KV_CACHE_DTYPE:  # by vLLM's own model, that is
            raise ValueError(
                f"--kv-cache-dtype {self.name} cannot serve {architecture}: vLLM's model does not pass the dtype to "
                "its attention layers, which would keep dense pages; use --kv-cache-dtype auto for this model"
            )
        resolve_auto(vllm_config)
        check_tiers(vllm_config, FORMATS[self.name])

    def page_format(self, vllm_config: VllmConfig) -> str:
        """Dtype and fingerprint, for the keys of pages that leave the process."""
        from ..sharing.fingerprint import page_format

        return page_format(vllm_config, FORMATS[self.name])


def _unsupported_here() -> list[str]:
    if current_platform.is_cpu() or current_platform.is_cuda():
        return []
    return [f"platform {current_platform.device_name} not supported (CUDA and CPU are)"]


def _unsupported_connector(connector: Connector) -> str | None:
    """Why pages must not leave the engine, or come to it, this way."""
    name = connector.name
    if name == "LMCacheConnectorV1":
        return f"KV connector {name} not supported (it assumes two numbers a channel)"
    if name not in CONNECTORS:
        return f"KV connector {name} not supported (its pages' keys do not name their format)"
    if not connector.options.get("enforce_handshake_compat", True):
        return f"KV connector {name} with enforce_handshake_compat false not supported (a peer's pages may differ)"
    return None


def _unsupported_in(config: VllmConfig) -> list[str]:
    """What would read or write the pages behind our back."""
    if config.speculative_config and config.speculative_config.method == "extract_hidden_states":  # has a connector
        return ["speculative method extract_hidden_states not supported (it stores hidden states as KV)"]
    found = [_unsupported_connector(connector) for connector in connectors(config.kv_transfer_config)]
    reasons = [reason for reason in found if reason]
    if config.cache_config.kv_sharing_fast_prefill:
        reasons.append("--kv-sharing-fast-prefill not supported (the host learns of its batches too late)")
    if config.parallel_config.use_ubatching:
        reasons.append("--enable-dbo and --ubatch-size not supported (two batches would share a layer's plan)")
    return reasons
