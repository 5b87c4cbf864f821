"""The rotary embeddings of a model (RoPE): undone, so that a key's mean is one at all positions, and told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from packed_kv.codecs.rope import block_table
from packed_kv.rope import VARYING, Rope, rope_parameters
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CLEARLY = 1.02
"""How many times a RoPE's energy the mean behind RoPE must have to be taken for a layer's without RoPE."""


class ModelRope(NamedTuple):
    """A RoPE that layers may have. `parameters`: as `packed_kv.rope.rope_parameters` gives them, for the file."""

    rope: Rope
    parameters: dict[str, Any]


def ropes_of(config: Any) -> list[ModelRope]:
    """Those that a language model's configuration names, each with channels (i, i + n) for pairs, and (2i, 2i + 1).

    None if there are none, or if `why_none` says why.
    """
    if why_none(config):
        return []
    found: list[ModelRope] = []
    for layer_type, parameters in rope_parameters(config).items():
        frequencies = tuple(_frequencies(config, layer_type, parameters).tolist())
        for interleaved in (False, True):
            rope = ModelRope(Rope(frequencies, interleaved), parameters)
            if rope not in found:
                found.append(rope)
    return found


def why_none(config: Any) -> str | None:
    """Why a model's keys get one mean for all positions, in words; None if its RoPEs are known."""
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


def over_all_angles(squares: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """Mean squares of channels, [.., head_dim], averaged over all angles by which RoPE turns them: each pair's mean.

    The average over the positions that a model serves differs where a pair turns slowly. It would need moments of
    pairs, and scales that follow it have the same error of scores (docs/calibration.md).
    """
    if rope is None:
        return squares
    first, second, rest = _pairs(squares, rope)
    mean = (first + second) / 2
    return _joined(mean, mean, rest, rope)


def squares_of_block_means(mean: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """Mean squares of what is taken off keys, [.., head_dim]: of `mean` before RoPE, averaged over a block of positions
    as the runtime does; without RoPE of `mean` itself."""
    if rope is None:
        return mean.square()
    cos, sin = block_table(rope, mean.shape[-1], 1)[0].to(mean)
    return over_all_angles(mean.square() * (cos.square() + sin.square()), rope)


def rope_of_layer(ropes: Sequence[ModelRope], before: torch.Tensor, behind: torch.Tensor) -> int | None:
    """Which RoPE a layer has, by the sums of its keys: before each of `ropes`, float64 [KV heads, ropes, head_dim], and
    behind, as the cache holds them, [KV heads, head_dim]. None: it has no RoPE, or its keys have no mean before it.

    Keys have a constant in them before RoPE, which another RoPE's frequencies or pairs would turn differently at every
    position, so that it vanishes from the mean. A mistake is safe: whatever the mean, the runtime gives scores back
    what it takes off keys, so that only its use is lost. Of a constant in slow pairs alone, both means keep all within
    few positions; it is taken for one that turns, as nearly all layers have RoPE.
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
