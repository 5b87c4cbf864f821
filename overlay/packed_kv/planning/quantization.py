"""Bits of a number in each linear layer, by a config's `quantization_config`, as vLLM's quantization layers read it.

Each method becomes rules over layer names; the first matching rule counts. Unknown settings are refused by name, as a
figure could be wrong by a factor of four.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..json_file import printable, shown
from ..model.cache_scheme import layers_asked
from ..model.config_defaults import Config
from ..model.config_fields import MODEL_BYTES, BadInput, listed, nested, whole, word

PLAIN = 8 * MODEL_BYTES
"""Bits of a number that is not quantized."""
ALGORITHMS = {
    "FP8": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "FP8_PB_WO": 8, "FP8_BLOCK_SCALES": 8, "MXFP8": 8, "INT8_SQ": 8,
    "NVFP4": 4, "W4A16_NVFP4": 4, "W4A16_AWQ": 4, "W4A8_AWQ": 4, "MXFP4": 4,
}  # fmt: skip
"""Algorithms of ModelOpt -> bits of a weight."""
DTYPES = {"fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "uint8": 8, "int4": 4, "uint4": 4, "fp4": 4, "mxfp4": 4}
"""Dtypes of Quark -> bits of a weight."""
FIXED = {"fp8": 8, "fbgemm_fp8": 8, "mxfp8": 8, "experts_int8": 8, "fp_quant": 4}
"""Methods whose weights have one width."""
BY_BITS = ("gptq", "gptq_marlin", "auto_gptq", "awq", "awq_marlin", "auto_awq", "moe_wna16")
SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules", "skip_modules",
           "llm_int8_skip_modules")  # fmt: skip
"""Fields that list layers which stay as they are."""
MOST_STARS = 4
"""Most repetitions in an expression over names; with more, a search could take minutes."""


class NotKnown(BadInput):
    """A quantization whose bits are not known."""

    def __init__(self, what: str) -> None:
        super().__init__(f"quantization_config: {what}, so the bytes of the weights are not known; give --weights SIZE")


class Names:
    """Patterns over names of layers: parts of names between dots, globs, and expressions after `re:`."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises NotKnown for an expression that cannot be searched for quickly."""
        self.parts: set[str] = set()
        expressions: list[str] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                expressions.append(_checked(pattern.removeprefix("re:")))
            elif {*"*?["} & {*pattern}:
                _check_stars(pattern)
                expressions.append(fnmatch.translate(pattern))
            else:
                self.parts.add(pattern)
        self.expression = re.compile("|".join(f"(?:{one})" for one in expressions)) if expressions else None

    def fit(self, names: Iterable[str]) -> bool:
        """True if a pattern fits one of the names of a layer."""
        return any(self._fits(name) for name in names)

    def _fits(self, name: str) -> bool:
        words = name.split(".")
        ends = range(len(words) + 1)
        if self.parts and any(".".join(words[a:b]) in self.parts for a in ends for b in ends[a + 1 :]):
            return True
        return self.expression is not None and self.expression.match(name) is not None


def _checked(expression: str) -> str:
    _check_stars(expression)
    try:
        re.compile(expression)
    except re.error as error:
        raise NotKnown(f"{printable(expression, 60)} is no regular expression ({error})") from error
    return expression


def _check_stars(pattern: str) -> None:
    if len(re.findall(r"[*+{]", pattern)) > MOST_STARS or re.search(r"\)[*+{]", pattern):
        raise NotKnown(f"{printable(pattern, 60)} is an expression that is not read here")


@dataclass(frozen=True)
class Rule:
    names: Names
    bits: int


@dataclass(frozen=True)
class Scheme:
    """`method`: its name, "": none. `rules`: the first rule that matches a layer has its bits; `default`: bits of other
    layers."""

    method: str
    rules: tuple[Rule, ...]
    default: int = PLAIN

    def bits(self, names: Iterable[str]) -> tuple[int, Rule | None]:
        """Bits of a number in a layer, and the rule that says so."""
        rule = next((rule for rule in self.rules if rule.names.fit(names)), None)
        return (rule.bits if rule else self.default), rule


def scheme_of(quantization: Config) -> Scheme:
    """The scheme of a `quantization_config`; {}: the model has none. Raises BadInput: NotKnown, or bad fields."""
    if not quantization:
        return Scheme("", ())
    method = word(quantization, "quant_method").lower()
    skipped = _rule([entry for field in SKIPPED for entry in listed(quantization, field, of=str)], PLAIN)
    if method == "compressed-tensors":
        return _compressed_tensors(quantization, skipped)
    if method.startswith("modelopt"):
        return _modelopt(quantization, skipped)
    if method == "quark":
        return _quark(quantization, skipped)
    if method == "torchao":
        return _torchao(quantization, skipped)
    if method in ("mxfp4", "gpt_oss_mxfp4"):  # vLLM leaves other layers as they are
        return Scheme(method, (*skipped, *_rule(["experts"], 4)))
    if method in FIXED:
        return Scheme(method, skipped, FIXED[method])
    if method in BY_BITS:
        return _by_bits(quantization, skipped)
    if method in ("auto-round", "inc"):
        own = nested(quantization, "extra_config")
        rules = [rule for name in own for rule in _rule([name], whole(own[name], "bits", default=PLAIN))]
        return Scheme(method, (*skipped, *rules), _known(whole(quantization, "bits"), method))
    if method == "hqq":
        settings = nested(nested(quantization, "quant_config"), "weight_quant_params")
        return Scheme(method, skipped, _known(whole(settings, "nbits"), method))
    if method == "bitsandbytes":
        bits = 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else 0
        return Scheme(method, skipped, _known(bits, method))
    raise NotKnown(f"quant_method {printable(method, 60)!r} is not read here")


def _rule(patterns: list[str], bits: int) -> tuple[Rule, ...]:
    return (Rule(Names(patterns), bits),) if patterns else ()


def _known(bits: int, method: str) -> int:
    if not 1 <= bits <= PLAIN:
        raise NotKnown(f"{method} does not say with how many bits")
    return bits


def _compressed_tensors(quantization: Config, skipped: tuple[Rule, ...]) -> Scheme:
    """Groups of layers with weights; `Linear` is the class of all linear layers. Groups of attention alone are about
    the KV cache."""
    groups, rules, default = nested(quantization, "config_groups"), list(skipped), PLAIN
    for name in groups:
        group = nested(groups, name)
        targets, settings = listed(group, "targets", of=str), nested(group, "weights")
        if not settings or (len(targets) == 1 and targets[0].endswith("Attention")):
            continue
        bits = _known(whole(settings, "num_bits"), f"{printable(name, 40)} of compressed-tensors")
        named = [target for target in targets if target != "Linear"]
        rules += _rule(named, bits)
        default = bits if len(named) < len(targets) and default == PLAIN else default
    return Scheme("compressed-tensors", tuple(rules), default)


def _modelopt(quantization: Config, skipped: tuple[Rule, ...]) -> Scheme:
    inner = nested(quantization, "quantization") or quantization
    skipped += _rule(listed(inner, "exclude_modules", of=str), PLAIN)
    if word(inner, "quant_algo").upper() != "MIXED_PRECISION":
        return Scheme("modelopt", skipped, _algorithm(word(inner, "quant_algo")))
    layers, by_bits = nested(inner, "quantized_layers"), dict[int, list[str]]()
    for name in layers:
        by_bits.setdefault(_algorithm(word(nested(layers, name), "quant_algo")), []).append(name)
    if not layers and layers_asked(quantization):
        return Scheme("modelopt", ())
    if not layers:
        raise NotKnown("modelopt's MIXED_PRECISION has no quantized_layers")
    rules = [rule for bits, names in by_bits.items() for rule in _rule(names, bits)]
    return Scheme("modelopt", (*skipped, *rules))


def _algorithm(name: str) -> int:
    if name and name.upper() not in ALGORITHMS:
        raise NotKnown(f"quant_algo {printable(name, 60)} is not read here")
    return ALGORITHMS[name.upper()] if name else PLAIN


def _quark(quantization: Config, skipped: tuple[Rule, ...]) -> Scheme:
    layers = nested(quantization, "layer_quant_config")
    rules = [rule for name in layers for rule in _rule([name], _quark_bits(nested(layers, name)))]
    return Scheme("quark", (*skipped, *rules), _quark_bits(nested(quantization, "global_quant_config")))


def _quark_bits(layer: Config) -> int:
    """Bits by Quark's settings of a layer; a list of successive roundings is not supported."""
    weight = layer.get("weight")
    if weight is None:
        return PLAIN
    dtype = weight.get("dtype") if isinstance(weight, dict) else weight
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise NotKnown(f"quark's weights of {shown(dtype)} are not read here")
    return DTYPES[dtype]


def _torchao(quantization: Config, skipped: tuple[Rule, ...]) -> Scheme:
    kinds = quantization.get("quant_type")
    default = kinds.get("default") if isinstance(kinds, dict) else kinds
    named = default.get("_data") if isinstance(default, dict) else None
    layers = nested(named, "module_fqn_to_config", "fqn_to_config") if isinstance(named, dict) else {}
    if not layers:
        return Scheme("torchao", skipped, _torchao_bits(default))
    rules = [rule for name in layers if name != "_default" for rule in _rule([name], _torchao_bits(layers[name]))]
    return Scheme("torchao", (*skipped, *rules), _torchao_bits(layers.get("_default")))


def _torchao_bits(kind: object) -> int:
    """Bits by torchao's class, as `Int8DynamicActivationInt4WeightConfig`, or by its older word, as `int4_weight_only`;
    None: the layer stays as it is."""
    if kind is None:
        return PLAIN
    name = str(kind.get("_type", "") if isinstance(kind, dict) else kind)
    data = kind.get("_data") if isinstance(kind, dict) else None
    if isinstance(data, dict) and "IntxWeight" in name and isinstance(dtype := data.get("weight_dtype"), dict):
        name = f"{dtype.get('_data')}_weight"
    found = re.search(r"(?:int|float|uint)(\d)_?(?:e\dm\d_)?weight", name.lower())
    if not found:
        raise NotKnown(f"torchao's {printable(name, 60) or 'quant_type'} is not read here")
    return int(found[1])


def _by_bits(quantization: Config, skipped: tuple[Rule, ...]) -> Scheme:
    """GPTQ and AWQ: one width, exceptions of `dynamic` (a leading `-:` leaves layers as they are), and layers within a
    block, where these are listed."""
    method, dynamic = word(quantization, "quant_method"), nested(quantization, "dynamic")
    bits = _known(whole(quantization, "bits", "w_bit"), method)
    rules = list(skipped)
    for pattern in dynamic:
        own = PLAIN if pattern.startswith("-:") else whole(nested(dynamic, pattern), "bits", default=bits)
        rules += _rule([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"], own)
    blocks = quantization.get("modules_in_block_to_quantize") or []
    if isinstance(blocks, list) and all(isinstance(block, list) for block in blocks):
        blocks = [name for block in blocks for name in block]
    if not isinstance(blocks, list) or not all(isinstance(name, str) for name in blocks):
        raise NotKnown("modules_in_block_to_quantize is no list of names")
    if blocks:
        return Scheme(method, (*rules, *_rule(blocks, bits)))
    return Scheme(method, tuple(rules), bits)
