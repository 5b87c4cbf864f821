"""A Hugging Face model: its configuration, its shape, and the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packed_kv.model.config_fields import BadInput
from packed_kv.planning import config_file

from .errors import UnsupportedError, UserError, differ, first_line
from .latents import rank_of

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError)
"""Errors that transformers raises for a folder without a model, a damaged file, or a missing quantization library."""

CONFIGS = ("config.json", "params.json")
"""Configuration files of a model's folder, of Hugging Face or Mistral."""

SEQUENCE_LENGTH = 2048
"""Tokens of a sequence, unless the model's context is shorter."""


@dataclass(frozen=True)
class Shape:
    """Layers, KV heads and channels of a head, from the configuration.

    `every_layer`: whether each layer has a KV cache of its own.
    """

    layers: int
    kv_heads: int
    head_size: int
    value_head_size: int
    every_layer: bool


def load_config(model: str) -> PretrainedConfig:
    """The configuration of a model. Raises UserError, also for an architecture without per-head K and V."""
    from transformers import AutoConfig

    check_reachable(model)
    try:
        config = AutoConfig.from_pretrained(model)
    except LOAD_ERRORS as error:
        path = Path(model)
        known = path.is_file() or any((path / name).is_file() for name in CONFIGS)  # a file is a GGUF
        if not path.exists():
            known = not isinstance(error, OSError)  # of the Hub, and there
        fault = UnsupportedError if known else UserError
        raise fault(f"{model} is not a model that transformers can read ({first_line(error)})") from error
    text = config.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        raise UserError(f"{model}: {config.model_type} is an encoder-decoder; only causal LMs can be calibrated")
    if getattr(text, "kv_lora_rank", None) and not rank_of(text):
        raise UserError(
            f"{model}: vLLM expands the latent vectors of {config.model_type} to K and V of every head, which "
            "calibration does not know; serve it without a calibration file"
        )
    if text.model_type == "llama4_text":
        raise UserError(
            f"{model}: vLLM orders the channels of {config.model_type}'s keys otherwise than transformers, by which a "
            "calibration file would be made; serve it without one"
        )
    if not getattr(text, "num_attention_heads", None):
        raise UserError(f"{model}: {config.model_type} has no attention, so no K and V to calibrate")
    return config


def check_reachable(model: str) -> None:
    """Raise UserError for a model of a Hub that does not answer: transformers would try for half a minute, vLLM for
    two. A model with a file in the Hub's cache may need no Hub."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    cached = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}", "snapshots")
    if not Path(model).exists() and not any(cached.glob("*/*")):
        try:
            config_file.load(model)
        except BadInput as error:
            if isinstance(error.__cause__, LocalEntryNotFoundError):  # the engine reports other errors
                raise UserError(str(error)) from error


def model_folder(model: str) -> Path:
    """The folder of a model's files: the model's folder, a GGUF file's folder, or a snapshot of the Hub. Raises
    UserError."""
    from transformers.utils import cached_file

    if Path(model).exists():
        return Path(model) if Path(model).is_dir() else Path(model).parent
    try:
        return Path(cached_file(model, "config.json")).parent
    except OSError as error:
        raise UserError(
            f"{model} has no folder for a calibration file ({first_line(error)}); name one by --out"
        ) from error


def text_of_layer(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model; where layers differ, the first layer's. Raises UserError where heads
    have several sizes, as a file holds one size."""
    text = config.get_text_config()
    if not getattr(text, "is_heterogeneous", False):
        return text
    layers = list(text.per_layer_config)
    sizes = {layer: _sizes(found) for layer, found in enumerate(layers)}
    for layer, (heads, *size) in sizes.items():
        if size != list(sizes[0][1:]):
            raise UserError(differ(0, *sizes[0], layer, heads, *size))
    return layers[0]


def _sizes(text: PretrainedConfig) -> tuple[int, int, int]:
    """KV heads, and channels of K and of V."""
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return getattr(text, "num_key_value_heads", None) or heads, size, getattr(text, "v_head_dim", None) or size


def shape_of(config: PretrainedConfig) -> Shape:
    """The shape of a model's KV cache, from its configuration. Raises UserError for heads of several sizes."""
    text = text_of_layer(config)
    if rank := rank_of(text):  # a latent is K and V of one head
        return Shape(text.num_hidden_layers, 1, rank, rank, every_layer=True)
    kv_heads, head_size, value_head_size = _sizes(text)
    kinds = getattr(text, "layer_types", None) or []
    return Shape(
        layers=text.num_hidden_layers,
        kv_heads=kv_heads,
        head_size=head_size,
        value_head_size=value_head_size,
        every_layer=all("attention" in kind and "linear" not in kind for kind in kinds)
        and not getattr(text, "num_kv_shared_layers", 0),
    )


def context_length(config: PretrainedConfig, limit: int) -> int:
    """Tokens of a sequence: the model's context, at most `limit`."""
    return min(getattr(config.get_text_config(), "max_position_embeddings", None) or limit, limit)


def load_model(model: str, attention: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """A causal LM with a registered attention implementation, on a device.

    Raises UserError, UnsupportedError if the model is packed or of a class that transformers lacks.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import is_accelerate_available

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if is_accelerate_available():
        options["device_map"] = {"": device}  # reads the weights straight to the device
    try:
        try:
            loaded = AutoModelForCausalLM.from_pretrained(model, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            loaded = AutoModelForImageTextToText.from_pretrained(model, **options)
        return loaded.eval().to(device) if "device_map" not in options else loaded.eval()
    except LOAD_ERRORS as error:
        packed = getattr(load_config(model), "quantization_config", None)
        unknown = "Unrecognized configuration class" in str(error)
        fault = UnsupportedError if packed or unknown else UserError
        raise fault(f"{model} cannot be loaded ({first_line(error)})") from error
