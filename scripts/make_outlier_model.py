#!/usr/bin/env python3
"""Make a model with a few large channels in its keys and values out of one without: the same function, harder to store.

In every layer and KV head some pairs of key channels that RoPE rotates together become `--scale` times larger, and the
same channels of the queries as much smaller; some value channels become `--value-scale` times larger,
and the columns of the output projection that read them as much smaller. RoPE rotates a pair as a whole, so scores and
outputs stay the same: in fp32 the logits are equal up to rounding. Changed tensors are written in fp32.

`--offset` also adds a constant to keys, as the biases of real models do. That changes the function, and has to: for a
query q at position m, a constant b before RoPE adds to the score of the key at position n

    sum over pairs i of Re(conj(q_i) b_i exp(1j (n - m) w_i)),    q_i, b_i: pairs as complex numbers, w_i: frequencies

Softmax ignores it only if it is the same at all n. The w_i differ and lie in (0, pi), so exp(1j n w_i), exp(-1j n w_i)
and 1 are linearly independent functions of n: each conj(q_i) b_i would have to be 0, for every query. The change is
least where it varies slowest, so the offset goes to the pairs of the lowest frequencies, which are then the large ones.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
"""All rotate channels i and i + head_dim / 2 together and name their tensors alike."""
NORMS_KEYS = {"qwen3"}
"""Norms after the projections undo a scale of the projection, so the norms are scaled, alike for all heads."""
TAKES_OFFSET = {"llama", "qwen2"}
"""The projection has a bias, or can be given one."""

TENSOR = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.([qkvo]_proj|[qk]_norm)\.(weight|bias)")
INDEX = "model.safetensors.index.json"


class ModelError(ValueError):
    """A model that cannot be changed like this; the message is one line."""


@dataclass(frozen=True)
class Outliers:
    """Share of channels that are scaled, and by how much."""

    fraction: float = 0.04
    scale: float = 12.0
    value_scale: float = 12.0
    offset: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Attention:
    """The attention's shape, from config.json."""

    model_type: str
    query_heads: int
    kv_heads: int
    head_dim: int
    has_bias: bool

    @classmethod
    def of(cls, config: dict) -> Attention:
        """Read config.json's content. Raises ModelError for an unknown architecture."""
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ModelError(f"model_type {model_type!r} is not supported ({', '.join(sorted(MODEL_TYPES))} are)")
        if config.get("quantization_config"):
            raise ModelError("a quantized checkpoint cannot be scaled; use the original weights")
        rope = config.get("rope_parameters") or config
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            raise ModelError("partial_rotary_factor is not supported: other channels are pairs")
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        has_bias = model_type == "qwen2" or config.get("attention_bias", False)
        return cls(model_type, heads, config.get("num_key_value_heads") or heads, head_dim, has_bias)

    @property
    def norms_keys(self) -> bool:
        return self.model_type in NORMS_KEYS

    def large_keys(self, layer: int, outliers: Outliers) -> torch.Tensor:
        """bool [KV heads, head_dim]: the chosen pairs (i, i + head_dim / 2)."""
        half = self.head_dim // 2
        count = max(1, round(outliers.fraction * half))
        generator = torch.Generator().manual_seed(outliers.seed * 100003 + 2 * layer)
        large = torch.zeros(self.kv_heads, self.head_dim, dtype=torch.bool)
        for head in large[:1] if self.norms_keys else large:
            pairs = torch.randperm(half, generator=generator)[:count]
            if outliers.offset:
                pairs = torch.arange(half - count, half)
            head[pairs] = head[pairs + half] = True
        return large[:1].expand_as(large) if self.norms_keys else large

    def key_factors(self, layer: int, outliers: Outliers) -> torch.Tensor:
        """[KV heads, head_dim]: `scale` for large keys, else 1."""
        return torch.where(self.large_keys(layer, outliers), outliers.scale, 1.0)

    def value_factors(self, layer: int, outliers: Outliers) -> torch.Tensor:
        """[KV heads, head_dim]: `value_scale` at the chosen channels, else 1."""
        generator = torch.Generator().manual_seed(outliers.seed * 100003 + 2 * layer + 1)
        factors = torch.ones(self.kv_heads, self.head_dim)
        for head in factors:
            head[torch.randperm(self.head_dim, generator=generator)[: self.value_count(outliers)]] = (
                outliers.value_scale
            )
        return factors

    def value_count(self, outliers: Outliers) -> int:
        return max(1, round(outliers.fraction * self.head_dim))

    def to_queries(self, factors: torch.Tensor) -> torch.Tensor:
        """[KV heads, head_dim] -> the reciprocals for all query heads, [query heads * head_dim]."""
        return (1 / factors).repeat_interleave(self.query_heads // self.kv_heads, dim=0).flatten()

    def changed(self, name: str, tensor: torch.Tensor, outliers: Outliers) -> dict[str, torch.Tensor]:
        """The output's tensors for one of the model: the same, or scaled in fp32, with biases if they were missing."""
        match = TENSOR.fullmatch(name)
        if match is None:
            return {name: tensor}
        layer, module, kind = int(match[1]), match[2], match[3]
        keys, values = self.key_factors(layer, outliers), self.value_factors(layer, outliers)
        large = self.large_keys(layer, outliers)
        factor = {
            "k_proj": None if self.norms_keys else keys.flatten(),
            "q_proj": None if self.norms_keys else self.to_queries(keys),
            "k_norm": keys[0],
            "q_norm": 1 / keys[0],
            "v_proj": values.flatten(),
            "o_proj": None if kind == "bias" else self.to_queries(values),
        }[module]
        scaled = tensor
        if factor is not None:
            columns = tensor.ndim == 1 or module == "o_proj"
            scaled = tensor.float() * (factor if columns else factor[:, None])
        if not outliers.offset:
            return {name: scaled}
        if kind == "weight" and not self.has_bias:
            bias = torch.zeros(len(tensor))
            return {name: scaled, name.removesuffix("weight") + "bias": self._shifted(module, bias, large, outliers)}
        return {name: self._shifted(module, scaled, large, outliers) if kind == "bias" else scaled}

    @staticmethod
    def _shifted(module: str, bias: torch.Tensor, large: torch.Tensor, outliers: Outliers) -> torch.Tensor:
        return bias + outliers.offset * large.flatten() if module == "k_proj" else bias


def make(source: Path, target: Path, outliers: Outliers) -> Attention:
    """Write the model with outliers of the model in folder `source` into the new folder `target`.

    Shard by shard, so that memory holds one. Raises ModelError.
    """
    shards = sorted(source.glob("*.safetensors"))
    if not (source / "config.json").is_file() or not shards:
        raise ModelError(f"{source} is no folder with a config.json and *.safetensors")
    config = json.loads((source / "config.json").read_text())
    attention = Attention.of(config)
    if outliers.offset and attention.model_type not in TAKES_OFFSET:
        raise ModelError(f"keys of model_type {attention.model_type} have no bias that could hold an offset")
    keys = {name for shard in shards for name in _names(shard) if name.endswith("k_proj.weight")}
    if len(keys) != config["num_hidden_layers"] or not all(map(TENSOR.fullmatch, keys)):
        raise ModelError(f"{source} has {len(keys)} tensors *.k_proj.weight, not one a layer")
    if target.exists():
        raise ModelError(f"{target} exists already")
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix not in {".safetensors", ".bin"} and path.name != "turboquant_kv.json":
            shutil.copyfile(path, target / path.name)
    if outliers.offset and not attention.has_bias:
        (target / "config.json").write_text(json.dumps(config | {"attention_bias": True}, indent=2) + "\n")
    weight_map: dict[str, str] = {}
    size = 0
    for shard in shards:
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(shard, framework="pt") as file:
            for name in _names(shard):
                tensors |= attention.changed(name, file.get_tensor(name), outliers)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, target / shard.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return attention


def _names(shard: Path) -> list[str]:
    with safe_open(shard, framework="pt") as file:
        return list(file.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--fraction", type=float, default=0.04, help="of the channels (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=12.0, help="of key channels (default: %(default)s)")
    parser.add_argument("--value-scale", type=float, help="of value channels (default: as --scale)")
    parser.add_argument("--offset", type=float, default=0.0, help="added to large key channels; changes the function")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not 0 < given.fraction < 1 or given.scale <= 0 or (given.value_scale or 1) <= 0:
        parser.error("--fraction must lie between 0 and 1, scales above 0")
    value_scale = given.scale if given.value_scale is None else given.value_scale
    outliers = Outliers(given.fraction, given.scale, value_scale, given.offset, given.seed)
    try:
        attention = make(given.model, given.out, outliers)
    except ModelError as error:
        sys.exit(f"make_outlier_model: {error}")
    large = int(attention.large_keys(0, outliers)[0].sum())
    print(
        f"{given.out}: in each layer and KV head, {large} of {attention.head_dim} key channels x {outliers.scale:g} "
        f"and {attention.value_count(outliers)} value channels x {outliers.value_scale:g}"
    )


if __name__ == "__main__":
    main()
