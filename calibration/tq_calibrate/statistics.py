"""What is known about a model's keys, values and queries: the input of `transforms` and `choose`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from packed_kv.formats import GROUP_SIZE, HEAD_DIM_STEP

from .errors import UserError


@dataclass
class LayerStatistics:
    """One layer, by KV head and channel; all float64 [KV heads, head_size].

    `key_energy`, `value_energy`: mean square of K (after norm and RoPE) and V. `key_variance`: mean square of K less
    its mean. `key_weight`: mean square of the queries that meet this channel of K. `value_weight`: squared norm of the
    column of the output projection that reads this channel of V. `key_max`, `value_max`: largest magnitudes.
    `key_mean`: mean of K. All of K and of the queries are without the tokens of position 0; `key_first_mean`: mean of
    K at position 0.

    Where only weights were seen the largest magnitudes are zeros and the means None, and `key_variance` is the energy.
    """

    key_energy: torch.Tensor
    key_variance: torch.Tensor
    value_energy: torch.Tensor
    key_weight: torch.Tensor
    value_weight: torch.Tensor
    key_max: torch.Tensor
    value_max: torch.Tensor
    key_mean: torch.Tensor | None = None
    key_first_mean: torch.Tensor | None = None


@dataclass
class Statistics:
    """A model's layers that have a KV cache of their own, by number; all have one shape. `tokens` is 0 for weights."""

    layers: dict[int, LayerStatistics]
    tokens: int = 0
    source: dict[str, str | int] = field(default_factory=dict)
    """Fields of `calibration` in the file: where the statistics come from."""

    @property
    def shape(self) -> tuple[int, int]:
        """(KV heads, head_size) of every layer."""
        heads, head_size = next(iter(self.layers.values())).key_energy.shape
        return heads, head_size


def check_head_size(head_size: int) -> None:
    """Raise UserError for a head that no format stores, or in which there is nothing to choose."""
    if head_size % GROUP_SIZE or head_size <= GROUP_SIZE:
        dtype = "auto" if head_size % HEAD_DIM_STEP else "tq4"
        raise UserError(
            f"heads of {head_size} channels cannot be calibrated: channels are chosen for whole groups of "
            f"{GROUP_SIZE}, two or more; run this model with --kv-cache-dtype {dtype}"
        )


def check_one_shape(shapes: dict[int, tuple[int, ...]]) -> None:
    """Raise UserError if layers differ in (KV heads, head_size): the file holds one head_size."""
    first_layer, first = next(iter(shapes.items()))
    check_head_size(first[1])
    for layer, shape in shapes.items():
        if shape != first:
            raise UserError(
                f"layers differ in shape (layer {first_layer}: {first[0]} KV heads of {first[1]} channels, layer "
                f"{layer}: {shape[0]} of {shape[1]}); a calibration file holds one shape; use tq4, which needs no file"
            )


def check_finite(statistics: Statistics) -> None:
    """Raise UserError if a layer overflowed."""
    for layer, seen in statistics.layers.items():
        for name in ("key_energy", "value_energy", "key_weight", "value_weight"):
            if not getattr(seen, name).isfinite().all():
                raise UserError(
                    f"layer {layer}: {name} is not finite, so the model overflows; try --dtype bfloat16 or float32"
                )
