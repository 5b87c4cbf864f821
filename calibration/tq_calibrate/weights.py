"""Statistics estimated from weights alone, for models too large to run.

Hidden states are taken to be white behind the norm before the attention: then a channel of K has the mean square of its
row of the projection, times the norm's weights. A norm of K divides by the root mean square of the head; RoPE turns
pairs of channels through all angles, so both get the mean of the two. Real hidden states are not white;
`docs/calibration.md` says how much worse the choice measures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import UserError, first_line
from .statistics import LayerStatistics, Statistics, check_finite, check_one_shape

TENSOR = re.compile(r"(.*\blayers\.(\d+))\.self_attn\.(?:k_proj|qkv_proj)\.(weight|qweight|weight_packed)")
OTHER_TOWERS = {"audio_tower", "encoder", "mtp", "vision_model", "vision_tower", "visual"}
"""Parts of the names of layers that are not the language model's."""
INTERLEAVED = {"cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text"}
"""Model types whose RoPE turns channels (2i, 2i + 1); in all others, i and i + half of those that it turns."""
NORMS_FROM_ONE = {"gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5_text", "qwen3_next", "vaultgemma"}
"""Model types whose norms multiply by 1 + weight."""
SCALES = ("weight_scale_inv", "weight_scale")


class Weights:
    """Tensors of a checkpoint by name, read from its safetensors one at a time."""

    def __init__(self, folder: Path) -> None:
        self.files = {}
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise UserError(f"{folder} has no *.safetensors; --weights-only reads nothing else")
        try:
            for shard in shards:
                file = safe_open(shard, framework="pt")
                self.files.update(dict.fromkeys(file.keys(), file))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{shard} cannot be read ({first_line(error)})") from error

    def get(self, name: str) -> torch.Tensor | None:
        """A tensor in fp32, or None if there is none. An FP8 weight is multiplied by its scales."""
        if name not in self.files:
            return None
        weight = self.files[name].get_tensor(name).float()
        for suffix in SCALES if name.endswith(".weight") else ():
            scale = self.get(name.removesuffix("weight") + suffix)
            if scale is not None:
                return weight * _expanded(scale, weight)
        return weight


def estimate(config: Any, folder: Path) -> Statistics:
    """Statistics of a checkpoint in a folder. Raises UserError for an architecture that is not known here."""
    text, weights = config.get_text_config(), Weights(folder)
    own_caches = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    prefixes = _layers(weights.files, own_caches, folder)
    layers = {layer: _Layer(weights, prefix, text).statistics() for layer, prefix in sorted(prefixes.items())}
    check_one_shape({layer: tuple(seen.key_energy.shape) for layer, seen in layers.items()})
    source: dict[str, str | int] = {"method": "packed_kv_weights_v1", "objective": "score_and_output_error"}
    statistics = Statistics(layers, 0, source)
    check_finite(statistics)
    return statistics


class _Layer:
    """The attention of one layer of a checkpoint: `prefix` is what its tensors' names begin with."""

    def __init__(self, weights: Weights, prefix: str, text: Any) -> None:
        self.weights, self.prefix, self.text = weights, prefix, text
        self.heads = text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_size = getattr(text, "head_dim", None) or text.hidden_size // self.heads
        self.norm_offset = 1.0 if text.model_type in NORMS_FROM_ONE else 0.0

    def statistics(self) -> LayerStatistics:
        queries = self._rope(self._normed("q", self._projected("q", self.heads)))
        keys = self._rope(self._normed("k", self._projected("k", self.kv_heads)))
        output = self._tensor("self_attn.o_proj.weight")
        columns = torch.ones(self.heads * self.head_size) if output is None else output.square().sum(0)
        zero = torch.zeros(self.kv_heads, self.head_size)
        return LayerStatistics(
            key_energy=keys.double(),
            value_energy=self._projected("v", self.kv_heads).double(),
            key_weight=queries.view(self.kv_heads, -1, self.head_size).mean(1).double(),
            value_weight=columns.view(self.kv_heads, -1, self.head_size).sum(1).double(),
            key_max=zero,
            value_max=zero,
        )

    def _projected(self, role: str, heads: int) -> torch.Tensor:
        """Mean squares of the projection's outputs, [heads, head_size]."""
        norm = self._tensor("input_layernorm.weight")
        weight, bias = (self._rows(role, heads, kind) for kind in ("weight", "bias"))
        if weight is None or weight.shape[0] != heads * self.head_size:
            found = "missing" if weight is None else f"{weight.shape[0]} rows"
            raise UserError(
                f"{self.prefix}.self_attn.{role}_proj.weight: {found}, expected {heads} heads of {self.head_size} "
                "channels; this architecture needs a run without --weights-only"
            )
        if norm is not None:
            weight = weight * (norm + self.norm_offset)
        energy = weight.square().sum(1)
        return (energy if bias is None else energy + bias.square()).view(heads, self.head_size)

    def _rows(self, role: str, heads: int, kind: str) -> torch.Tensor | None:
        """The rows of q, k or v in their own projection, or in one for all three."""
        own = self._tensor(f"self_attn.{role}_proj.{kind}")
        fused = self._tensor(f"self_attn.qkv_proj.{kind}") if own is None else None
        if fused is not None:
            sizes = [self.heads * self.head_size, self.kv_heads * self.head_size, self.kv_heads * self.head_size]
            return fused.split(sizes)["qkv".index(role)] if len(fused) == sum(sizes) else fused
        if own is not None and role == "q" and len(own) == 2 * heads * self.head_size:
            return own.view(heads, 2, self.head_size, *own.shape[1:])[:, 0].flatten(0, 1)  # the rest is a gate
        return own

    def _normed(self, role: str, energy: torch.Tensor) -> torch.Tensor:
        """Mean squares behind the norm of q or k, if there is one: of each head, or of all heads together."""
        weight = self._tensor(f"self_attn.{role}_norm.weight")
        if weight is None:
            return energy
        factor = (weight + self.norm_offset).square()
        if factor.numel() == self.head_size:
            return energy / energy.mean(-1, keepdim=True) * factor
        return energy / energy.mean() * factor.view_as(energy)

    def _rope(self, energy: torch.Tensor) -> torch.Tensor:
        """Mean squares behind RoPE."""
        rope = getattr(self.text, "rope_parameters", None)
        if not rope:
            return energy
        part = rope.get("partial_rotary_factor") or getattr(self.text, "partial_rotary_factor", None) or 1.0
        turned = int(self.head_size * part)
        rest = energy[:, turned:]
        if self.text.model_type in INTERLEAVED:
            pairs = energy[:, :turned].unflatten(-1, (-1, 2))
            means = pairs.mean(-1, keepdim=True).expand_as(pairs)
        else:
            pairs = energy[:, :turned].unflatten(-1, (2, -1))
            means = pairs.mean(-2, keepdim=True).expand_as(pairs)
        return torch.cat((means.flatten(1), rest), dim=-1)

    def _tensor(self, name: str) -> torch.Tensor | None:
        return self.weights.get(f"{self.prefix}.{name}")


def _layers(names: Iterable[str], count: int, folder: Path) -> dict[int, str]:
    """Layer -> what its tensors' names begin with, for the layers of the language model that have a K projection."""
    prefixes: dict[int, str] = {}
    for name in names:
        match = TENSOR.fullmatch(name)
        if match is None or OTHER_TOWERS & {*name.split(".")} or int(match[2]) >= count:
            continue
        if match[3] != "weight":
            raise UserError(f"{folder}: {name} is packed (AWQ, GPTQ); run it without --weights-only")
        if prefixes.setdefault(int(match[2]), match[1]) != match[1]:
            raise UserError(
                f"{folder} has layer {match[2]} twice ({prefixes[int(match[2])]}, {match[1]}); run it without "
                "--weights-only"
            )
    if not prefixes:
        raise UserError(
            f"{folder} has no tensors named layers.N.self_attn.k_proj.weight or qkv_proj; run it without --weights-only"
        )
    return prefixes


def _expanded(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scales of a whole tensor, of rows, or of blocks, so that they multiply `weight` [rows, columns]."""
    if scale.numel() == 1 or scale.ndim < 2:
        return scale.view(-1, 1)
    for axis in (0, 1):
        block = -(-weight.shape[axis] // scale.shape[axis])
        block = 1 << (block - 1).bit_length() if scale.shape[axis] > 1 else block  # the last block may be cut off
        scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, weight.shape[axis])
    return scale
