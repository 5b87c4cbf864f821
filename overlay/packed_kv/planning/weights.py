"""Bytes of a model's weights, from its config: what lies on the cards, and what a decode step reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..json_file import read_json, shown
from ..model.config_defaults import Config
from ..model.config_fields import MODEL_BYTES, BadInput, nested, whole
from ..model.shape import Model
from .modules import experts, experts_per_token, modules
from .quantization import PLAIN, NotKnown, Rule, Scheme, scheme_of

BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.25}
"""`--weights` -> bits per number in a linear layer; with 4 bits, groups of 64 share a 16-bit scale."""
INDEX = "model.safetensors.index.json"
LARGEST = 1 << 50
"""The most bytes of weights that an index may name."""


@dataclass(frozen=True)
class Weights:
    """Bytes of the whole model, of the weights that every token reads, and of all experts, of which a token reads a
    share.

    `source`: where they are from, in words. `again`: bytes of `dense` read again by layers that run more than once.
    """

    total: float
    dense: float
    experts: float
    experts_share: float
    source: str
    again: float = 0

    def read(self, tokens: float) -> float:
        """Bytes that a step of `tokens` tokens reads, if experts are chosen at random."""
        return self.dense + self.again + self.experts * (1 - (1 - self.experts_share) ** tokens)


def weights(model: Model, form: str | float | None, folder: Path | None) -> Weights:
    """Weights of a model. form: one of `BITS`, or a number of bytes; None: from the model's config and folder.

    Raises BadInput for a quantization of unknown bits, where neither `form` nor an index gives the bytes.
    """
    count = parameters(model)
    share = min(1.0, experts_per_token(model.config) / max(1, experts(model.config)))
    known, source = _known(model, form, folder, count)
    if isinstance(form, str):
        linear, again, routed = (number * BITS[form] / 8 for number in (count.linear, count.again, count.experts))
        said = f"linear layers in {form}"
    else:
        try:
            linear, again, routed, said = _stored(model, scheme_of(nested(model.config, "quantization_config")))
        except NotKnown:
            if known is None:
                raise
            linear, again, routed, said = *(MODEL_BYTES * number for number in count[:3]), ""
    table = count.vocabulary * MODEL_BYTES
    dense = linear + table  # a step reads only a few rows of an input embedding
    total = dense + routed + (0 if _ties(model) else table)
    if known is not None:
        scale = known / total
        return Weights(known, scale * dense, scale * routed, share, source, scale * again)
    source = f"{count.total(model) / 1e9:.2f}e9 parameters by the config, {said}"
    return Weights(total, dense, routed, share, source, again)


class Parameters(NamedTuple):
    """Counts of numbers: in linear layers that every token reads; among these, in layers that run again (counted each
    time); in experts; and in an embedding or output layer."""

    linear: float
    again: float
    experts: float
    vocabulary: float

    def total(self, model: Model) -> float:
        return self.linear + self.experts + (1 if _ties(model) else 2) * self.vocabulary


def parameters(model: Model) -> Parameters:
    """Numbers of a model, on all ranks."""
    linear = again = routed = 0.0
    for module in modules(model):
        if module.is_routed:
            routed += module.numbers
        else:
            linear, again = linear + module.numbers, again + module.numbers * (module.runs - 1)
    vocabulary = whole(model.config, "vocab_size", "padded_vocab_size")
    return Parameters(linear, again, routed, vocabulary * model.config["hidden_size"])


def _ties(model: Model) -> bool:
    return bool(model.config.get("tie_word_embeddings", True))


def _stored(model: Model, scheme: Scheme) -> tuple[float, float, float, str]:
    """Bytes of linear layers, of the part that is read again, and of experts, and the scheme in words. Raises NotKnown
    where the scheme names layers that the model lacks, and leaves out some that it has."""
    linear = again = routed = 0.0
    numbers: dict[int, float] = {}
    used: list[Rule | None] = []
    for module in modules(model):
        bits, rule = scheme.bits(module.names)
        used.append(rule)
        size = module.numbers * (BITS["int4"] if bits == 4 else bits) / 8
        numbers[bits] = numbers.get(bits, 0) + module.numbers
        if module.is_routed:
            routed += size
        else:
            linear, again = linear + size, again + size * (module.runs - 1)
    if scheme.default == PLAIN and None in used and any(r.bits != PLAIN and r not in used for r in scheme.rules):
        raise NotKnown(f"{scheme.method} names layers by other names than are known here")
    return linear, again, routed, _in_words(scheme, numbers)


def _in_words(scheme: Scheme, numbers: dict[int, float]) -> str:
    widths = sorted(bits for bits in numbers if bits != PLAIN)
    if not widths:
        return "not quantized, except for the KV cache" if scheme.method else "not quantized"
    plain = numbers.get(PLAIN, 0) / sum(numbers.values())
    rest = f", {plain:.0%} of them not" if plain >= 0.005 else ""
    return f"linear layers quantized by {scheme.method} to {' and '.join(map(str, widths))} bits{rest}"


def _known(model: Model, form: str | float | None, folder: Path | None, count: Parameters) -> tuple[float | None, str]:
    """Bytes on the cards, as given or from a folder's index, and which of both; None: neither is there. Raises
    BadInput.

    For a model that is not quantized, vLLM keeps `MODEL_BYTES` per number, whatever the files have.
    """
    if isinstance(form, (int, float)):
        return form, "as given"
    metadata = {} if form or folder is None else _index(folder)
    size = metadata.get("total_size")
    if size is None:
        return None, ""
    if type(size) not in (int, float) or not 0 < size <= LARGEST or size % 1:
        raise BadInput(f"{folder}/{INDEX}: total_size is {shown(size)}, and no number of bytes; give --weights SIZE")
    wide = model.config.get("dtype", model.config.get("torch_dtype")) in (None, "float32")
    if not nested(model.config, "quantization_config") and wide and size > 3 * count.total(model):
        return float(size) / 2, f"by {INDEX}, which is of float32; served in bf16"
    return float(size), f"by {INDEX}"


def _index(folder: Path) -> Config:
    """Metadata of a folder's index of weights; {}: it has none. Raises BadInput."""
    if not (folder / INDEX).is_file():
        return {}
    try:
        index = read_json(folder / INDEX)
    except ValueError as error:
        raise BadInput(f"{folder / INDEX} {error}; give --weights SIZE") from error
    return nested(index, "metadata") if isinstance(index, dict) else {}
