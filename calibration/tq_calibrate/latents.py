"""Latent attention (MLA): a token's latent vector, which is K and V at once, is calibrated as one KV head.

With weights of a head W_UK and W_UV, its score is (W_UK^T q) . c + q_rope . k_rope, and its part of the layer's output
is W_O W_UV c. So W_UK^T q replaces the query, and the columns of W_O W_UV replace the output projection. A stored
latent serves as K and as V, so a channel's weight is the mean of both weights, each divided by its own mean. RoPE
channels stay unchanged; they only tell which latents are attended to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from packed_kv.model.config_fields import BadInput, reads_latents
from transformers import PretrainedConfig

from .errors import UserError
from .statistics import LayerStatistics

UP_PROJECTION = "kv_b_proj"


def rank_of(text: PretrainedConfig) -> int:
    """Channels of a latent vector of a model of this text configuration; 0: vLLM serves it without latents. Raises
    UserError."""
    try:
        return text.kv_lora_rank if reads_latents(text.to_dict()) else 0
    except BadInput as error:
        raise UserError(str(error)) from error


class Latents:
    """Keeps the latents that the layers of a transformers model expand."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.latest: dict[torch.nn.Module, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == UP_PROJECTION:
                module.register_forward_pre_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.latest[module] = inputs[0]

    def as_one_head(
        self, module: Any, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`as_one_head` for a layer's attention, with the latest latents.

        query, key: float [batch, heads, tokens, nope_dim + rope_dim].
        """
        latent = self.latest.pop(getattr(module, UP_PROJECTION)).reshape(-1, 1, module.kv_lora_rank)
        rope_key = key[:, :1, :, module.qk_nope_head_dim :].transpose(1, 2).flatten(0, 1)
        return as_one_head(query.transpose(1, 2).flatten(0, 1), latent, rope_key, up_projections(module)[0])


def as_one_head(
    query: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor, key_up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of latents and RoPE channels.

    Args:
        query: float [tokens, heads, nope_dim + rope_dim].
        latent, rope_key: float [tokens, 1, rank] and [tokens, 1, rope_dim].
        key_up: W_UK, [heads, nope_dim, rank].

    Returns:
        float [tokens, heads, rank + rope_dim], [tokens, 1, rank + rope_dim] and [tokens, 1, rank].
    """
    nope, rope = query.split([key_up.shape[1], rope_key.shape[-1]], dim=-1)
    absorbed = torch.einsum("thp,hpr->thr", nope, key_up.to(nope.dtype))
    return torch.cat((absorbed, rope), dim=-1), torch.cat((latent, rope_key), dim=-1), latent


def up_projections(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK [heads, nope_dim, rank] and W_UV [heads, value_dim, rank] of a layer. Raises UserError for packed ones."""
    weight = getattr(module, UP_PROJECTION).weight
    if weight.dtype.itemsize < 2 or weight.shape[-1] != module.kv_lora_rank:
        raise UserError(
            f"{type(module).__name__} has packed weights in {UP_PROJECTION}, so its latents cannot be calibrated; "
            "calibrate the checkpoint in bfloat16"
        )
    by_head = weight.detach().unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    return by_head[:, : module.qk_nope_head_dim], by_head[:, module.qk_nope_head_dim :]


def output_weight_of_latents(module: Any) -> torch.Tensor:
    """Squared norms of the columns of W_O W_UV, summed over heads, float64 [rank]."""
    by_head = up_projections(module)[1].float()
    outputs = module.o_proj.weight.detach().float().unflatten(1, (len(by_head), -1)).transpose(0, 1)
    return torch.stack([(one @ up).square().sum(0).double() for one, up in zip(outputs, by_head, strict=True)]).sum(0)


def of_latents(layer: LayerStatistics) -> LayerStatistics:
    """Statistics of a layer's latents alone, from statistics of K = latents and RoPE channels, and V = latents."""
    rank = layer.value_energy.shape[1]
    keys = {name: getattr(layer, name)[:, :rank] for name in ("key_energy", "key_variance", "key_weight", "key_max")}
    both = (keys["key_weight"], layer.value_weight)
    weight = torch.stack([x / x.mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) for x in both]).mean(0)
    mean = None if layer.key_mean is None else layer.key_mean[:, :rank]
    keys |= {"key_weight": weight, "key_mean": mean, "key_first_mean": None, "far_key_weight": None}
    return replace(layer, **keys, value_weight=weight, value_mean=None, value_first_mean=None)
