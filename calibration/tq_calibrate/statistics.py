"""Statistics of a model's keys, values and queries: the input of `scales` and `choose`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from packed_kv.calibration_content import RECIPES
from packed_kv.formats import FORMATS, GROUP_SIZE, HEAD_DIM_MULTIPLE

from .errors import UserError, differ
from .ropes import ModelRope


@dataclass
class LayerStatistics:
    """One layer, by KV head and channel; all float64 [KV heads, head_size], with V's head_size for V.

    key_energy, value_energy: mean square of K (after norm and RoPE) and V.
    key_mean, key_variance: mean of K and mean square of K minus it, half over all keys equally, half by attention.
    key_weight: mean square of the queries in this channel.
    far_key_weight: the same, each query weighed by its attention to distant keys (`attended.py`) where there are any;
    None if only weights were seen, and for latents.
    rope: the RoPE of K; `key_mean` is then K's mean before RoPE, and the runtime subtracts that mean as turned to a
    token's position, averaged over a block of positions. `key_variance` and `key_weight` are then over all positions of
    the model, whatever the sequences' length.
    value_weight: squared norm of the column of the output projection that reads this channel of V.
    key_max, value_max: largest magnitudes.
    key_first_mean: mean of K at position 0, which all other statistics of K and of queries leave out.
    value_mean, value_variance: mean of V behind position 0, and mean square of V minus it there.
    value_first_mean: mean of V at position 0.

    From weights alone, the largest magnitudes are 0, the means None, and `key_variance` is the energy.
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
    rope: ModelRope | None = None
    far_key_weight: torch.Tensor | None = None
    value_mean: torch.Tensor | None = None
    value_first_mean: torch.Tensor | None = None
    value_variance: torch.Tensor | None = None


@dataclass
class Statistics:
    """Statistics of the layers that have a KV cache of their own, by number.

    All layers have one head size for K and one for V. `tokens` is 0 if only weights were seen.
    """

    layers: dict[int, LayerStatistics]
    tokens: int = 0
    source: dict[str, str | int] = field(default_factory=dict)
    """Fields of `calibration` in the file: the origin of the statistics."""

    @property
    def kv_heads(self) -> list[int]:
        """The different numbers of KV heads of layers, ascending."""
        return sorted({len(layer.key_energy) for layer in self.layers.values()})

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Channels of a head of K and of V."""
        layer = next(iter(self.layers.values()))
        return layer.key_energy.shape[1], layer.value_energy.shape[1]


def check_head_size(head_size: int) -> None:
    """Raise UserError for a head size that no format stores or that has only one group."""
    if head_size % GROUP_SIZE or head_size <= GROUP_SIZE:
        dtype = "auto" if head_size % HEAD_DIM_MULTIPLE else "tq4"
        raise UserError(
            f"heads of {head_size} channels cannot be calibrated: channels are chosen for whole groups of "
            f"{GROUP_SIZE}, two or more; run this model with --kv-cache-dtype {dtype}"
        )


def check_head_sizes(layers: dict[int, LayerStatistics]) -> None:
    """Raise UserError if head sizes differ between layers (the file holds one for K and one for V) or cannot be
    calibrated."""
    shapes = {layer: (*seen.key_energy.shape, seen.value_energy.shape[1]) for layer, seen in layers.items()}
    first_layer, (heads, size, value_size) = next(iter(shapes.items()))
    check_head_size(size)
    if value_size != size:
        check_head_size(value_size)
    if value_size > size or value_size <= FORMATS[RECIPES[0]].outlier_channels(size):
        raise UserError(
            f"heads of {size} channels of K and {value_size} of V cannot be calibrated: V must have at most as many "
            "channels as K, and more than its outlier channels; use tq4, which needs no file"
        )
    for layer, (more_heads, *sizes) in shapes.items():
        if sizes != [size, value_size]:
            raise UserError(differ(first_layer, heads, size, value_size, layer, more_heads, *sizes))


def check_finite(statistics: Statistics) -> None:
    """Raise UserError if a layer overflowed."""
    for layer, seen in statistics.layers.items():
        for name in ("key_energy", "value_energy", "key_weight", "value_weight"):
            if not getattr(seen, name).isfinite().all():
                raise UserError(
                    f"layer {layer}: {name} is not finite, so the model overflows; try --dtype bfloat16 or float32"
                )
