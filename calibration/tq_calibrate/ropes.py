"""The rotary embeddings (RoPE) of a model: undone, so that keys have one mean at all positions, and told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from packed_kv.codecs.rope import spectrum_of_blocks
from packed_kv.model.rope import VARYING, Rope, average_length, rope_parameters
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CONTEXT = 1 << 15
"""Context in tokens, if a model's configuration does not tell."""
CLEARLY = 1.02
"""A layer counts as one without RoPE from this ratio on: energy of keys' mean as stored, over energy of their mean with
a RoPE undone."""


class ModelRope(NamedTuple):
    """A RoPE that layers may have. `parameters`: as `packed_kv.model.rope.rope_parameters` gives them, for the file.
    `positions`: the model's context in tokens."""

    rope: Rope
    parameters: dict[str, Any]
    positions: int = CONTEXT


def ropes_of(config: Any) -> list[ModelRope]:
    """RoPEs that a language model's configuration names, each with channels (i, i + n) for pairs, and (2i, 2i + 1).

    None if there are none, or if `why_none` says why.
    """
    if why_none(config):
        return []
    found: list[ModelRope] = []
    positions = getattr(config, "max_position_embeddings", None) or CONTEXT
    for layer_type, parameters in rope_parameters(config).items():
        frequencies = tuple(_frequencies(config, layer_type, parameters).tolist())
        for interleaved in (False, True):
            rope = ModelRope(Rope(frequencies, interleaved), parameters, positions)
            if rope not in found:
                found.append(rope)
    return found


def why_none(config: Any) -> str | None:
    """Say why a model's keys get one mean for all positions; None if its RoPEs are known."""
    found = rope_parameters(config)
    if not found:
        return "its configuration names no RoPE"
    kinds = [str(parameters.get("rope_type", "default")) for parameters in found.values()]
    for kind in kinds:
        if kind in VARYING:
            return f"RoPE of the kind {kind} turns keys otherwise in longer sequences"
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            return f"RoPE of the kind {kind} is not known"
    return None


def _frequencies(config: Any, layer_type: str, parameters: dict[str, Any]) -> torch.Tensor:
    """Radians a position of each pair of channels, fp32 [pairs], as transformers and vLLM compute them."""
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type or None)[0]
    if getattr(config, "is_heterogeneous", False):  # head sizes differ between kinds of layers
        config = config.per_layer_config[layer_type]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_size * parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / parameters["rope_theta"] ** (torch.arange(0, rotated, 2).float() / rotated)


def before_rope(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Undo a RoPE: float64 [tokens, heads, head_dim] at `positions`, int [tokens]."""
    frequencies = torch.tensor(rope.frequencies, dtype=torch.float64, device=x.device)
    angle = positions.double()[:, None, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = _pairs(x, rope)
    return _joined(first * cos + second * sin, second * cos - first * sin, rest, rope)


def sums_before_rope(x: torch.Tensor, rope: Rope, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Sums over tokens of channels, of their squares, and of the products of pairs' two channels.

    Args:
        x: float64 [tokens, heads, head_dim], before RoPE.
        weights: of each token and head, float64 [tokens, heads]; None: 1.

    Returns:
        float64 [heads, 5 / 2 head_dim], zeros where there are fewer pairs than halves of channels.
    """
    first, second, _ = _pairs(x, rope)
    parts = (x, x.square(), first * second)
    sums = [part.sum(0) if weights is None else torch.einsum("th,thc->hc", weights, part) for part in parts]
    unused = x.shape[-1] // 2 - first.shape[-1]
    return torch.nn.functional.pad(torch.cat(sums, -1), (0, unused))


def stored_squares(means: torch.Tensor, found: ModelRope) -> torch.Tensor:
    """Mean squares of keys after RoPE minus their block's mean, over all positions of the model.

    `means`: means of the terms of `sums_before_rope`, float64 [heads, 5 / 2 head_dim]; gives [heads, head_dim].
    """
    mean, squares, products = _split(means)
    first, second, _ = _pairs(mean, found.rope)
    varying = torch.cat((mean, squares - mean.square(), products), -1)
    varying[..., 2 * mean.shape[-1] :][..., : first.shape[-1]] -= first * second
    cos, sin = spectrum_of_blocks(found.rope, mean.shape[-1], 1)[0].to(mean)
    turned = mean.square() * (1 - cos.square() - sin.square())  # the constant's distance from its block's average
    first, second, rest = _pairs(turned, found.rope)
    within = _joined((first + second) / 2, (first + second) / 2, rest, found.rope)
    return (turned_squares(varying, found) + within).clamp_min(0)


def squares_of_other_mean(difference: torch.Tensor, found: ModelRope) -> torch.Tensor:
    """Return the growth of stored keys' mean squares if another mean before RoPE than their own is subtracted. The
    argument is the difference of the means: float64 [heads, head_dim] -> [heads, head_dim]. Means are subtracted as
    their block's average, so fast pairs hardly count."""
    cos, sin = spectrum_of_blocks(found.rope, difference.shape[-1], 1)[0].to(difference)
    averaged = difference * (cos.square() + sin.square()).sqrt()
    first, second, _ = _pairs(averaged, found.rope)
    unused = difference.shape[-1] // 2 - first.shape[-1]
    products = torch.nn.functional.pad(first * second, (0, unused))
    return turned_squares(torch.cat((averaged, averaged.square(), products), -1), found)


def turned_squares(means: torch.Tensor, found: ModelRope) -> torch.Tensor:
    """Mean squares of channels after RoPE, over all positions of the model: like `stored_squares`, but without
    subtracting a mean."""
    _, squares, products = _split(means)
    first, second, rest = _pairs(squares, found.rope)
    cos, sin = _double_angles(found, means.device)
    product = products[..., : first.shape[-1]]
    half, difference = (first + second) / 2, (first - second) / 2 * cos - product * sin
    return _joined(half + difference, half - difference, rest, found.rope)


def _double_angles(found: ModelRope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of cos(2 w p) and sin(2 w p) over the model's positions p, float64 [pairs]."""
    frequencies, count = found.rope.frequencies, found.positions
    lengths = [average_length(2 * frequency, count) for frequency in frequencies]
    w, length = torch.tensor([frequencies, lengths], dtype=torch.float64, device=device)
    return length * ((count - 1) * w).cos(), length * ((count - 1) * w).sin()


def rope_of_layer(ropes: Sequence[ModelRope], before: torch.Tensor, behind: torch.Tensor) -> int | None:
    """Find a layer's RoPE by the sums of its keys: before each of `ropes`, float64 [KV heads, ropes, head_dim], and
    after it, as the cache holds them, [KV heads, head_dim]. None: it has no RoPE, or its keys have no mean before it.

    Keys have a constant in them before RoPE, which another RoPE's frequencies or pairs would turn differently at every
    position, so that it vanishes from the mean. A mistake is safe: for any mean, the runtime adds to scores what it
    subtracts from keys, so only the benefit is lost. A constant in slow pairs alone stays in both means over few
    positions; the layer then counts as one with RoPE, as nearly all layers have RoPE.
    """
    if not ropes:
        return None
    energies = before.square().sum((0, 2))
    best = int(energies.argmax())
    return None if behind.square().sum() > CLEARLY * energies[best] else best


def _pairs(x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First and second channels of the pairs, [.., n] each, and the channels that RoPE does not turn."""
    n = len(rope.frequencies)
    turned, rest = x[..., : 2 * n], x[..., 2 * n :]
    first, second = turned.unflatten(-1, (n, 2)).unbind(-1) if rope.interleaved else turned.split(n, -1)
    return first, second, rest


def _joined(first: torch.Tensor, second: torch.Tensor, rest: torch.Tensor, rope: Rope) -> torch.Tensor:
    turned = torch.stack((first, second), -1).flatten(-2) if rope.interleaved else torch.cat((first, second), -1)
    return torch.cat((turned, rest), -1)


def _split(means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split sums into sums of channels [.., head_dim], of their squares, and of products of pairs [.., head_dim /
    2]."""
    size = means.shape[-1] * 2 // 5
    mean, squares, products = means.split((size, size, size // 2), -1)
    return mean, squares, products
