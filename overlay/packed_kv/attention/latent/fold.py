"""Weights of a layer's latent attention, made to take latents as they are stored."""

from __future__ import annotations

from typing import Any

import torch

from ...codecs.latent import LatentCodec


class FoldedWeights:
    """`W_UK_T` and `W_UV` of vLLM's layer, folded in memory of their own: vLLM's are views of `kv_b_proj`, which
    prompts use as it is.

    The layer's `process_weights_after_loading`, which makes them, is wrapped: where weights are loaded again, they are
    folded again, into the same memory, as CUDA graphs have its address.

    Attributes:
        up: [heads, nope_dim + value_dim, rank]; a stored latent times this, and `lacking` added, is K, then V.
        lacking: [heads * (nope_dim + value_dim)] of `up`'s dtype, or None: nothing.
        constant: fp32 [rank], added to means of stored latents; or None: nothing.
    """

    def __init__(self, codec: LatentCodec, layer: Any) -> None:
        self.codec, self.layer = codec, layer
        self.load = layer.process_weights_after_loading
        self.nope_dim = layer.W_UK_T.shape[1]
        self.up = self._folded()
        self.constant = codec.output_constant()
        self.lacking = self._lacking()
        self._place()
        layer.process_weights_after_loading = self._load_and_fold

    def _folded(self) -> torch.Tensor:
        return self.codec.fold(self.layer.W_UK_T.data, self.layer.W_UV.data)

    def _lacking(self) -> torch.Tensor | None:
        lacking = self.codec.lacking(self.up, self.nope_dim)
        return None if lacking is None else lacking.flatten().to(self.up.dtype)

    def _place(self) -> None:
        """Let the layer's weights be parts of `up`."""
        for name, part in (
            ("W_UK_T", self.up[:, : self.nope_dim]),
            ("W_UV", self.up[:, self.nope_dim :].transpose(1, 2)),
        ):
            setattr(self.layer, name, torch.nn.Parameter(part, requires_grad=False))

    def _load_and_fold(self, act_dtype: torch.dtype) -> None:
        self.load(act_dtype)
        self.up.copy_(self._folded())
        lacking = self._lacking()
        if self.lacking is not None and lacking is not None:
            self.lacking.copy_(lacking)
        self._place()
