"""Join the sums of tensor-parallel ranks into sums of the whole model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .errors import UserError
from .sums import LayerSums, Sums

OF_KEYS_AND_VALUES = ("key", "key_before_rope", "key_squares", "first_key", "value_squares", "key_max", "value_max",
                      "value", "first_value", "first_value_squares")  # fmt: skip
OF_ATTENTION = (
    "attention", "attended_key", "attended_before_rope", "attended_squares", "attending_squares",
    "attending_before_rope",
)  # fmt: skip
OF_QUERIES = ("query_squares", "query_before_rope")


def join_ranks(sums: Iterable[tuple[int, Sums]], kv_heads: int) -> Sums:
    """Join the sums of all heads from (tensor-parallel rank, its sums) of every process.

    `kv_heads`: of the model, as its configuration says; some layers may have another number. Raises UserError if no
    layer has that many: ranks that share a head are recognized by equal sums.

    Pipeline stages have different layers. vLLM splits KV heads as `calibration_file.heads_of_rank` does: consecutive
    heads per rank, one head shared by several consecutive ranks, or all heads of a layer that is not split.
    """
    by_layer: dict[int, dict[int, LayerSums]] = {}
    whole = Sums()
    for rank, seen in sums:
        whole.has_latents |= seen.has_latents
        for layer, layer_sums in seen.layers.items():
            by_layer.setdefault(layer, {})[rank] = layer_sums
    whole.layers = {layer: _join_heads([parts[rank] for rank in sorted(parts)]) for layer, parts in by_layer.items()}
    found = sorted({len(layer.key) for layer in whole.layers.values()})
    if found and kv_heads not in found:
        raise UserError(
            f"the ranks' sums come to {', '.join(map(str, found))} KV heads per layer, but the model has {kv_heads}; "
            "calibrate with --tensor-parallel-size 1"
        )
    return whole


def _join_heads(ranks: list[LayerSums]) -> LayerSums:
    first = ranks[0]
    if all(torch.equal(rank.value_weight, first.value_weight) for rank in ranks):  # all have all heads
        return first
    copies = sum(torch.allclose(rank.key_squares, first.key_squares) for rank in ranks)  # layers may differ in heads
    sharing = [ranks[at : at + copies] for at in range(0, len(ranks), copies)]  # ranks with the same KV heads
    # Query heads are split among these ranks: take means and sums over them.
    columns = torch.cat([_stack(same, "value_weight").sum(0) for same in sharing])
    whole = LayerSums(len(columns), (first.key.shape[1], first.value_weight.shape[1]), columns, first.ropes)
    for name in OF_QUERIES:
        setattr(whole, name, torch.cat([_stack(same, name).mean(0) for same in sharing]))
    for name in OF_ATTENTION:
        setattr(whole, name, torch.cat([_stack(same, name).sum(0) for same in sharing]))
    for name in OF_KEYS_AND_VALUES:
        setattr(whole, name, torch.cat([getattr(same[0], name) for same in sharing]))
    for name in ("tokens", "first_tokens", "sampled_queries"):
        setattr(whole, name, getattr(first, name))
    return whole


def _stack(ranks: list[LayerSums], name: str) -> torch.Tensor:
    return torch.stack([getattr(rank, name) for rank in ranks])
