"""Registers the dtypes and backends with vLLM, and answers which backend serves a layer.

Runs when plugins load, in the API server too: heavy modules are imported only when a layer asks for its backend.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import vllm
import vllm.config.cache as cache_config
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVQuantMode

from ..formats import FORMATS, Format
from ..model.architectures import PLAIN_SPARSE_LATENTS
from ..model.cache_scheme import describe_cache_scheme
from ..refusals.facts import Attention, Cache, Drafts, Facts, Given, Latents, Layer, Parallel, Vllm
from ..refusals.table import refuse
from ..settings.facts import auto_cache, check_skipped_layers, engine_facts, given_facts, quantization_of
from ..settings.options import read_options
from ..vllm_compat import (
    forget_backends,
    is_patched,
    keep_rope_from_store,
    version_without_latents,
    version_without_rows,
)
from .names import LATENT, SPARSE, class_name, registry_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.packed_kv")

FLOAT32_PROMPTS = (
    ", and so do prompts, which read packed keys and values, their own among them; --dtype bfloat16 is faster, and "
    "a prompt in one chunk is as without packing"
)
FLOAT32_LATENTS = ", and so do writing pages and reading cached prefixes; --dtype bfloat16 is faster"


def register_formats() -> None:
    """Register all of `FORMATS`; without the patches, log the command that applies them and register nothing.

    Raises SystemExit where the command line asks for one of the dtypes: argparse would print 300 lines of usage after
    the log.
    """
    if not is_patched():
        message = (
            f"packed-kv is installed, but this vLLM ({vllm.__version__}) is not patched for it, so that "
            f"--kv-cache-dtype {', '.join(FORMATS)} fail; {_remedy(vllm.__version__)}"
        )
        if any(argument.removeprefix("--kv-cache-dtype=") in FORMATS for argument in sys.argv):
            raise SystemExit(message)
        logger.error(message)
        return
    for fmt in FORMATS.values():
        if fmt.name not in cache_config.KV_CACHE_DTYPES:
            register_format(fmt)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__package__}.cpu_backend.CPUBackend")


def _remedy(version: str) -> str:
    """The command that patches this version of vLLM so that it serves the dtypes."""
    try:
        pins = import_module("packed_kv_patches.pins")  # beside this package
    except ImportError as error:
        return f"reinstall packed-kv, whose patches are missing here ({error}), then run: packed-kv-patch apply"
    is_pinned = version.split("+")[0] in (table := pins.load())
    return "run: packed-kv-patch apply" if is_pinned else pins.choose(table, version)


def register_format(fmt: Format) -> None:
    """Register one dtype and its backend."""
    handler = type(f"{fmt.name.capitalize()}Handler", (PackedDTypeHandler,), {"name": fmt.name})
    cache_config.register_kv_cache_dtype(fmt.name)(handler)
    with _at_debug(logging.getLogger(register_backend.__module__)):  # vLLM logs a line for each name and process
        register_backend(registry_name(fmt), f"{__package__}.backend.{class_name(fmt)}")


@contextlib.contextmanager
def _at_debug(of_vllm: logging.Logger) -> Iterator[None]:
    """In this block, lower a logger's lines to debug level."""

    def demote(record: logging.LogRecord) -> bool:
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return of_vllm.isEnabledFor(logging.DEBUG)

    of_vllm.addFilter(demote)
    try:
        yield
    finally:
        of_vllm.removeFilter(demote)


def _warn_of_rotary_embedding(config: VllmConfig) -> None:
    """Log a warning if RoPE runs by an operator of vLLM's CPU platform that is wrong for queries of latent attention
    (docs/upstream.md)."""
    if config.compilation_config.is_custom_op_enabled("rotary_embedding"):
        logger.warning(
            "rotary_embedding of vLLM's CPU platform is wrong for latent attention, with any KV-cache dtype; start "
            'with --compilation-config \'{"custom_ops": ["none"]}\''
        )


class PackedDTypeHandler:
    """Handler that vLLM asks about a registered `--kv-cache-dtype`."""

    name: str

    def torch_dtype(self) -> torch.dtype:
        """Pages are bytes."""
        return torch.uint8

    def quant_mode(self) -> KVQuantMode:
        """NONE: no generic quantisation path of vLLM applies (CUSTOM reads as OCTAVE_K3V4 in 0.33.0)."""
        return KVQuantMode.NONE

    def attn_backend(self, config: AttentionSelectorConfig) -> type[AttentionBackend]:
        """The backend of a layer. Raises Refused."""
        from vllm.v1.attention.backend import AttentionType

        from .backend import backend_of

        if config.use_mla:
            return self._latent_backend(config)
        backend = backend_of(self.name)
        capability = current_platform.get_device_capability()
        vllm_config = get_current_vllm_config()
        reasons = tuple(backend.validate_configuration(device_capability=capability, **config._asdict()))
        facts = Facts(
            *engine_facts(vllm_config).records,
            Latents(is_mla=config.use_mla, is_sparse=config.use_sparse),
            Attention(kind=AttentionType(config.attn_type).value, has_image_prefix=config.use_mm_prefix),
            Layer(head_size=config.head_size),
            Vllm(backend_reasons=reasons),
        )
        refuse(facts, self.name)
        return backend

    def _latent_backend(self, config: AttentionSelectorConfig) -> type[AttentionBackend]:
        """The backend of a layer of latent attention, dense or sparse. Raises Refused."""
        vllm_config, is_sparse = get_current_vllm_config(), config.use_sparse
        text = vllm_config.model_config.hf_text_config
        rank, rope_dim = int(text.kv_lora_rank), int(text.qk_rope_head_dim)
        facts = Facts(
            *engine_facts(vllm_config).records,
            Latents(
                is_mla=True,
                is_sparse=is_sparse,
                rank=rank,
                rope_size=rope_dim,
                size=config.head_size,
                built_size=rank + rope_dim,
            ),
            Vllm(
                version_without_latents=version_without_latents(),
                version_without_rows=version_without_rows() if is_sparse and current_platform.is_cuda() else None,
            ),
        )
        refuse(facts, self.name)
        from .latent_backend import latent_backend_of, sparse_latent_backend_of

        rope_bits = read_options(vllm_config.additional_config).latent_rope_bits
        make = sparse_latent_backend_of if is_sparse else latent_backend_of
        backend = make(self.name, rank, rope_dim, rope_bits)
        capability = current_platform.get_device_capability()
        reasons = tuple(backend.validate_configuration(device_capability=capability, **config._asdict()))
        refuse(Facts(*facts.records, Vllm(backend_reasons=reasons)), self.name)
        return backend

    def check_layer(self, layer_name: str, layer: AttentionLayerBase) -> None:
        """Have the layer make its codec: vLLM calls this once the model is loaded, before it profiles its memory.

        Raises Refused if a layer got its backend from its model and not from `attn_backend`, or if its implementation
        does not know V's head size; raises CalibrationError.
        """
        from .backend import backend_of, unknown_wrapper

        backend, impl = layer.get_attn_backend(), getattr(layer, "impl", None)
        fmt = FORMATS[self.name]
        if backend.is_mla() and backend.get_name() in (registry_name(fmt, LATENT), registry_name(fmt, SPARSE)):
            self._check_latent_layer(layer_name, layer)
            return
        config = getattr(impl, "config", None) or get_current_vllm_config_or_none()
        own = unknown_wrapper(backend) if issubclass(backend, backend_of(self.name)) else backend.get_name()
        facts = Facts(
            Cache(auto=None if config is None else auto_cache(config)),
            Drafts(is_draft=getattr(impl, "is_draft", None)),
            Layer(
                name=f"{layer_name} ({type(layer).__name__})",
                own_backend=own,
                value_size=getattr(layer, "head_size_v", None),
                built_value_size=getattr(impl, "head_size_v", None),
            ),
        )
        refuse(facts, self.name)
        if config is not None:
            check_skipped_layers(config, self.name)
        if impl is not None:
            impl.build(layer_name)

    def _check_latent_layer(self, layer_name: str, layer: Any) -> None:
        """The same for a layer of latent attention, whose weights are folded. Raises Refused for a layer of a foreign
        class, except Kimi's and sparse attention's: such layers ask for the same backend and then write their pages
        themselves. Also raises Refused for a plain layer of sparse attention on CUDA, whose store may be in another
        CUDA graph than its attention, unless its model is known to keep both together."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        from ..attention.latent.kimi import adopt, is_kimi_layer

        kind = type(layer)
        if is_kimi_layer(layer):
            adopt(layer)
        else:
            is_sparse_layer = layer.impl.is_sparse and "hands_over_latents" in vars(kind)  # no subclass of it
            stores_apart = layer.impl.is_sparse and current_platform.is_cuda()
            if stores_apart:
                stores_apart = not layer.impl.config.model_config.architecture.startswith(PLAIN_SPARSE_LATENTS)
            is_plain = kind is MLAAttention and not stores_apart
            other = None if is_plain or is_sparse_layer else kind.__name__
            refuse(Facts(Layer(name=layer_name), Latents(layer_class=other)), self.name)
        layer.impl.build(layer_name, layer)

    def before_engine(self, vllm_config: VllmConfig) -> None:
        """Check the options, have a calibration file made if that was asked for, check it, and prepare tiers on disk.

        Raises Refused, OptionError, CalibrationError, and ValueError for tiers without a folder.
        """
        from ..settings.calibration import read_calibration
        from ..settings.model_options import keep_numbers
        from ..settings.options import check_files
        from ..settings.self_calibration import resolve_auto
        from ..sharing.tiers import check_tiers, replace_tiers
        from ..window.size import log_window
        from .capacity import check_planned_padding
        from .metrics import planned_kernel

        forget_backends()
        facts = Facts(*engine_facts(vllm_config).records, given_facts(vllm_config))
        refuse(facts, self.name)
        if facts.given.decode_kernel == "cuda":
            refuse(Facts(facts.given, Given(not_cuda=planned_kernel(vllm_config).reason)), self.name)
        check_planned_padding(vllm_config)
        if asked := describe_cache_scheme(quantization_of(vllm_config)):
            logger.info("KV cache dtype %s: %s", self.name, asked)
        if facts.given.is_fp32:
            on_gpu = FLOAT32_LATENTS if facts.engine.platform != "cpu" else ""
            read = on_gpu if facts.latents.is_mla else FLOAT32_PROMPTS
            logger.info("%s with float32 activations: decodes run in PyTorch%s", self.name, read)
        if facts.latents.is_mla and facts.engine.platform == "cpu":
            _warn_of_rotary_embedding(vllm_config)
        check_files(read_options(vllm_config.additional_config))
        check_tiers(vllm_config)
        keep_numbers(vllm_config)
        log_window(vllm_config)
        resolve_auto(vllm_config)
        file = read_calibration(vllm_config)
        has_mean_blocks = file is not None and bool(file.ropes) and not facts.latents.is_mla
        refuse(Facts(*facts.records, Parallel(has_mean_blocks=has_mean_blocks)), self.name)
        replace_tiers(vllm_config, FORMATS[self.name])
        if vllm_config.lora_config is not None:
            from ..sharing.adapters import name_adapters

            name_adapters()
        keep_rope_from_store(vllm_config)

    def page_format(self, vllm_config: VllmConfig) -> str:
        """Dtype and fingerprint, for the keys of pages that leave the process."""
        from ..sharing.fingerprint import page_format

        return page_format(vllm_config, FORMATS[self.name])
