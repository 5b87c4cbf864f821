"""KV-cache dtype that a checkpoint asks for, by the `quantization_config` of its config.json. Imports no torch."""

from __future__ import annotations

from collections import Counter

from ..json_file import printable
from .config_defaults import Config
from .config_fields import BadInput, nested, word
from .shape import FP8


def asked_cache(quantization: Config) -> str:
    """The KV-cache dtype that vLLM's `auto` takes from a config's `quantization_config`; "": the model's own dtype.

    Raises BadInput.
    """
    method = word(quantization, "quant_method")
    if method == "compressed-tensors":
        return FP8 if nested(quantization, "kv_cache_scheme") else ""
    if not method.startswith("modelopt"):
        return ""
    places = nested(quantization, "quantization"), quantization
    asked = [place.get(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo") for place in places]
    scheme = next(filter(None, asked), None)
    if isinstance(scheme, dict):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        return "nvfp4" if bits == 4 else FP8 if bits == 8 and scheme.get("dynamic") is False else ""
    algorithm = str(scheme).lower()
    return algorithm if algorithm in (FP8, "nvfp4") else ""


def describe_cache_scheme(quantization: Config) -> str:
    """One line for a checkpoint that asks for its own KV-cache dtype, or whose request cannot be read; "": it asks for
    none."""
    try:
        asked, layers = asked_cache(quantization), layers_asked(quantization)
    except BadInput as error:
        return f"what the checkpoint asks of the KV cache is not understood ({error}); packed dtypes set it aside"
    said = []
    if asked:
        said.append(
            f"the checkpoint asks for an {asked} KV cache, which --kv-cache-dtype auto would be (bfloat16 would be "
            "dense)"
        )
    if layers:
        numbers = ", ".join(f"{algorithm} in {number}" for algorithm, number in layers.items())
        dtype = f" ({asked} in all)" if asked else " (auto would be the model's own dtype)"
        said.append(
            f"the checkpoint fixes KV-cache dtypes of layers (kv_cache_quantized_layers: {numbers}), which vLLM does "
            f"not read{dtype}"
        )
    return "; ".join([*said, "packed dtypes set its scales aside"]) if said else ""


def layers_asked(quantization: Config) -> dict[str, int]:
    """KV-cache algorithms that Model-Optimizer sets per layer, and the numbers of their layers. Raises BadInput."""
    layers = nested(_inner(quantization), "kv_cache_quantized_layers")
    return Counter(printable(word(nested(layers, name), "quant_algo"), 40) or "none" for name in layers)


def _inner(quantization: Config) -> Config:
    inner = quantization.get("quantization")
    return inner if isinstance(inner, dict) else quantization
