"""Compare calibration with no calibration, on tokens that the file was not made from: a text of one word makes a file
that is worse than none.

The error of scores, of queries with mean squares W and keys that are stored with mean squares E and scales s, is
`sum(E s^2) * sum(W / s^2)` (`scales`), times the noise of a dtype, which cancels in a quotient of two errors. So the
error with the file's means and scales over the error without them needs only the sums that a calibration takes in any
case. It predicts the KL divergence. On demo-7m it is 0.5 with a file from help topics and 3.0 with a file from one
word; tq4's KL divergence is then 0.71 and 2.3 times the KL divergence without a file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .choose import LayerChoice
from .errors import UserError
from .latents import of_latents
from .statistics import LayerStatistics
from .sums import LayerSums, Sums

WORST = 1.1
"""A file is refused from this ratio of errors with it to errors without it. A file of a random model, whose channels
are all alike, has 1.0."""
HARDLY_VARIES = 0.75
"""A warning follows below this ratio of the keys' variance in the text to their variance in the held-out text."""


class Verdict(NamedTuple):
    """Geometric means over layers. `keys`: error of scores with the file over the error without it. `values`: the same
    for outputs, for dtypes with outlier channels. `variety`: variance of the text's keys over the variance of held-out
    keys."""

    keys: float
    values: float
    variety: float


def judge(held: Sums, layers: dict[int, LayerStatistics], choices: dict[int, LayerChoice]) -> Verdict:
    """Compare the choices for `layers`, made from a text, with no calibration, on sums over another text."""
    of_layers = [
        _of_layer(held.layers[layer], layers[layer], choice, held.has_latents) for layer, choice in choices.items()
    ]
    return Verdict(*torch.tensor(of_layers, dtype=torch.float64).log().mean(0).exp().tolist())


def check(verdict: Verdict, text: str) -> str:
    """Return a warning for a file that is of little use, or "". Raises UserError for one that is worse than none.

    text: the options that name the text.
    """
    found = f"{verdict.keys:.2f} times the error of scores without a file, on help topics that are not in the text"
    remedy = f"give more varied text than {text}, or leave --text out" if text else "serve the model without a file"
    if verdict.keys > WORST:
        raise UserError(f"the file would be worse than none ({found}), so it was not written; {remedy}")
    if verdict.variety < HARDLY_VARIES:
        share = f"keys vary {verdict.variety:.2f} times as much as on other text"
        return f"channels hardly vary in this text ({share}; the file has {found}); {remedy}"
    return ""


def _of_layer(held: LayerSums, seen: LayerStatistics, choice: LayerChoice, has_latents: bool) -> list[float]:
    found = of_latents(held.statistics()) if has_latents else held.statistics()
    channels = found.key_energy.shape[1]  # of latents, less RoPE's
    plain, stored = (
        held.squares_about(mean, rope)[:, :channels]
        for mean, rope in ((None, None), (_wide(choice.key.mean, held), choice.rope))
    )
    own = held.squares_about(_wide(found.key_mean, held), found.rope)[:, :channels]
    one = torch.ones_like(plain)
    key_scale, value_scale = (one if scale is None else scale for scale in (choice.key.scale, choice.value.scale))
    return [
        error(stored, found.key_weight, key_scale) / error(plain, found.key_weight, one),
        error(found.value_energy, found.value_weight, value_scale)
        / error(found.value_energy, found.value_weight, torch.ones_like(value_scale)),
        float(seen.key_variance.sum() / own.sum().clamp_min(torch.finfo(own.dtype).tiny)),
    ]


def _wide(mean: torch.Tensor | None, held: LayerSums) -> torch.Tensor | None:
    """A mean of latents, with zeros for their RoPE channels."""
    return None if mean is None else torch.nn.functional.pad(mean, (0, held.key.shape[1] - mean.shape[1]))


def error(energy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> float:
    """Error of all heads without the factor of a dtype's noise; arguments [KV heads, head_size]."""
    squares = scale.square()
    error = ((energy * squares).sum(-1) * (weight / squares).sum(-1)).sum()
    return float(error.clamp_min(torch.finfo(error.dtype).tiny))
