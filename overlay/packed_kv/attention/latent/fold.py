"""Weights of a layer's latent attention, folded so that they apply to latents as stored."""

from __future__ import annotations

from typing import Any

import torch

from ...codecs.latent import LatentCodec

Pair = tuple[torch.Tensor, torch.Tensor]
"""K's and V's."""


class FoldedWeights:
    """`W_UK_T` and `W_UV` of vLLM's layer, folded in memory of their own: vLLM's weights are views of `kv_b_proj`,
    which prompts use unchanged.

    We wrap the layer's `process_weights_after_loading`, which makes them: weights that are loaded again are folded
    again, into the same memory, because CUDA graphs hold its address.

    Attributes:
        up: [heads * nope_dim, rank] and [heads * value_dim, rank]; a stored latent times these, plus `lacking`, is K
            and V of all heads.
        lacking: [heads * nope_dim] and [heads * value_dim] of `up`'s dtype; None: nothing is added.
        constant: fp32 [rank], added to means of stored latents; None: nothing is added.
    """

    def __init__(self, codec: LatentCodec, layer: Any) -> None:
        self.codec, self.layer = codec, layer
        self.load = layer.process_weights_after_loading
        self.heads, self.nope_dim, _ = layer.W_UK_T.shape
        self.up, self.lacking = self._folded()
        self.constant = codec.output_constant()
        self._place()
        layer.process_weights_after_loading = self._load_and_fold

    def _folded(self) -> tuple[Pair, Pair | None]:
        """Compute `up` and `lacking` from the layer's current weights."""
        folded = self.codec.fold(self.layer.W_UK_T.data, self.layer.W_UV.data)
        lacking = self.codec.lacking(folded, self.nope_dim)
        return self._apart(folded), None if lacking is None else self._apart(lacking.to(folded.dtype))

    def _apart(self, rows: torch.Tensor) -> Pair:
        """[heads, nope_dim + value_dim, ..] -> K's and V's."""
        return rows[:, : self.nope_dim].flatten(0, 1).clone(), rows[:, self.nope_dim :].flatten(0, 1).clone()

    def _place(self) -> None:
        """Let the layer's weights be views of `up`."""
        key, value = (part.unflatten(0, (self.heads, -1)) for part in self.up)
        for name, weights in (("W_UK_T", key), ("W_UV", value.transpose(1, 2))):
            setattr(self.layer, name, torch.nn.Parameter(weights, requires_grad=False))

    def _load_and_fold(self, act_dtype: torch.dtype) -> None:
        self.load(act_dtype)
        up, lacking = self._folded()
        for kept, made in zip((*self.up, *(self.lacking or ())), (*up, *(lacking or ())), strict=True):
            kept.copy_(made)
        self._place()
