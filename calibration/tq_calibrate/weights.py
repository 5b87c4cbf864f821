"""Estimate statistics from weights alone, for models too large to run.

Hidden states are assumed to be white after the norm that precedes attention. A channel of K then has the mean square of
its projection row times the norm's weights. A norm of K divides by the RMS of the head; RoPE mixes two channels as far
as it rotates them within a sequence. Real hidden states are not white; docs/calibration.md says how much worse the
choice is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import UserError, first_line
from .model import SEQUENCE_LENGTH, context_length
from .statistics import LayerStatistics, Statistics, check_finite, check_head_sizes

TENSOR = re.compile(r"(.*\blayers\.(\d+))\.self_attn\.(?:k_proj|qkv_proj)\.(weight|qweight|weight_packed)")
OTHER_TOWERS = {"audio_tower", "encoder", "mtp", "vision_model", "vision_tower", "visual"}
"""Name parts of layers outside the language model."""
INTERLEAVED = {"cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text"}
"""Model types whose RoPE rotates channels (2i, 2i + 1). All others rotate (i, i + half of the rotated channels)."""
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


def estimate(config: Any, folder: Path, context: int = SEQUENCE_LENGTH) -> Statistics:
    """Estimate the statistics of a checkpoint for sequences of `context` tokens, at most the model's context.

    Raises UserError for an architecture that is not known here.
    """
    text, weights = config.get_text_config(), Weights(folder)
    own_caches = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    prefixes = _layers(weights.files, own_caches, folder)
    positions = context_length(config, context)
    differ = getattr(text, "is_heterogeneous", False)
    layers = {
        layer: _Layer(weights, layer, prefix, text.per_layer_config[layer] if differ else text, positions).statistics()
        for layer, prefix in sorted(prefixes.items())
    }
    check_head_sizes(layers)
    source: dict[str, str | int] = {"method": "packed_kv_weights_v1", "objective": "score_and_output_error"}
    statistics = Statistics(layers, 0, source)
    check_finite(statistics)
    return statistics


class _Layer:
    """The attention of one layer of a checkpoint; its tensors' names begin with `prefix`."""

    def __init__(self, weights: Weights, layer: int, prefix: str, text: Any, positions: int) -> None:
        self.weights, self.layer, self.prefix, self.text, self.positions = weights, layer, prefix, text, positions
        self.heads = text.num_attention_heads
        self.kv_heads = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_size = getattr(text, "head_dim", None) or text.hidden_size // self.heads
        self.norm_offset = 1.0 if text.model_type in NORMS_FROM_ONE else 0.0

    def statistics(self) -> LayerStatistics:
        queries = self._after_rope(self._normed("q", self._projected("q", self.heads)))
        keys = self._after_rope(self._normed("k", self._projected("k", self.kv_heads)))
        output = self._tensor("self_attn.o_proj.weight")
        if output is None:
            raise UserError(
                f"{self.prefix}.self_attn.o_proj.weight: missing; this architecture needs a run without --weights-only"
            )
        columns = output.square().sum(0)
        zero = torch.zeros(self.kv_heads, self.head_size)
        return LayerStatistics(
            key_energy=keys.double(),
            key_variance=keys.double(),
            value_energy=self._projected("v", self.kv_heads).square().sum(-1).double(),
            key_weight=queries.view(self.kv_heads, -1, self.head_size).mean(1).double(),
            value_weight=columns.view(self.kv_heads, -1, self.head_size).sum(1).double(),
            key_max=zero,
            value_max=zero,
        )

    def _projected(self, role: str, heads: int) -> torch.Tensor:
        """The projection of white hidden states, [heads, head_size, inputs + 1]: rows and, as last input, the bias.

        The mean of the product of two channels is the product of their rows.
        """
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
        constant = torch.zeros(len(weight)) if bias is None else bias
        return torch.cat((weight, constant[:, None]), dim=-1).unflatten(0, (heads, self.head_size))

    def _rows(self, role: str, heads: int, kind: str) -> torch.Tensor | None:
        """The rows of q, k or v, in a projection of their own or in one for all three."""
        own = self._tensor(f"self_attn.{role}_proj.{kind}")
        fused = self._tensor(f"self_attn.qkv_proj.{kind}") if own is None else None
        if fused is not None:
            sizes = [self.heads * self.head_size, self.kv_heads * self.head_size, self.kv_heads * self.head_size]
            return fused.split(sizes)["qkv".index(role)] if len(fused) == sum(sizes) else fused
        if own is not None and role == "q" and len(own) == 2 * heads * self.head_size:
            return own.view(heads, 2, self.head_size, *own.shape[1:])[:, 0].flatten(0, 1)  # the rest is a gate
        return own

    def _normed(self, role: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows after the norm of q or k, if any: per head, or over all heads."""
        weight = self._tensor(f"self_attn.{role}_norm.weight")
        if weight is None:
            return rows
        of_a_head = weight.numel() == self.head_size
        mean_square = rows.square().sum(-1, keepdim=True).mean(1 if of_a_head else (0, 1), keepdim=True)
        factor = (weight + self.norm_offset).view(1 if of_a_head else len(rows), self.head_size, 1)
        return rows * factor / mean_square.sqrt()

    def _after_rope(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean squares after RoPE, [heads, head_size], over angles from 0 to frequency * positions for each pair."""
        energy = rows.square().sum(-1)
        theta, turned = self._rope()
        if not turned:
            return energy
        in_pairs = (2, -1) if self.text.model_type not in INTERLEAVED else (-1, 2)
        at = in_pairs.index(2) - 2
        first, second = energy[:, :turned].unflatten(-1, in_pairs).unbind(at)
        product = rows[:, :turned].unflatten(1, in_pairs).prod(at - 1).sum(-1)
        angle = 2 * self.positions * theta ** (-torch.arange(0, turned, 2) / turned)
        cos_cos, cos_sin = 0.5 + angle.sin() / (2 * angle), (1 - angle.cos()) / (2 * angle)
        pairs = (
            cos_cos * first + (1 - cos_cos) * second - 2 * cos_sin * product,
            (1 - cos_cos) * first + cos_cos * second + 2 * cos_sin * product,
        )
        return torch.cat((torch.stack(pairs, dim=at).flatten(1), energy[:, turned:]), dim=-1)

    def _rope(self) -> tuple[float, int]:
        """(RoPE base, rotated channels); (0, 0) without RoPE."""
        rope = getattr(self.text, "rope_parameters", None) or {}
        kinds = getattr(self.text, "layer_types", None)
        if kinds and kinds[self.layer] in rope:  # sliding and full layers with RoPEs of their own
            rope = rope[kinds[self.layer]] or {}
        theta = rope.get("rope_theta") or getattr(self.text, "rope_theta", None)
        if not theta:
            return 0.0, 0
        part = rope.get("partial_rotary_factor") or getattr(self.text, "partial_rotary_factor", None) or 1.0
        return float(theta), int(self.head_size * part)

    def _tensor(self, name: str) -> torch.Tensor | None:
        return self.weights.get(f"{self.prefix}.{name}")


def _layers(names: Iterable[str], count: int, folder: Path) -> dict[int, str]:
    """Layer number -> prefix of its tensors' names, for language-model layers with a K projection."""
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
    """Scales per tensor, row or block, expanded to multiply `weight` [rows, columns]."""
    if scale.numel() == 1 or scale.ndim < 2:
        return scale.view(-1, 1)
    for axis in (0, 1):
        block = -(-weight.shape[axis] // scale.shape[axis])
        block = 1 << (block - 1).bit_length() if scale.shape[axis] > 1 else block  # the last block may be cut off
        scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, weight.shape[axis])
    return scale
