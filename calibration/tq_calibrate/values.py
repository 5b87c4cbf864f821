"""Judge whether V is better stored minus its mean (at position 0, minus a mean of its own).

A rotation spreads the error of a section evenly, so the error of outputs is a dtype's noise times the energy of what is
stored times the squared norms of the output projection's columns, `sum(E) * sum(W)`. Subtracting a mean lowers E by the
mean's square; on a text other than its own, it may lower E by less, or raise it.
"""

from __future__ import annotations

import torch

from .choose import LayerChoice
from .judge import error
from .sums import Sums

LEAST_GAIN = 0.95
"""Error with means over the error without; from this ratio on, they are not worth a file that older releases refuse."""


def held_out_gain(held: Sums, choices: dict[int, LayerChoice]) -> float:
    """Return the geometric mean over layers of the outputs' error with the choices' means of V over the error without,
    on sums over another text than the choices were made from."""
    ratios = []
    for number, choice in choices.items():
        sums = held.layers[number]
        mean, one = choice.value.mean, torch.ones_like(sums.value_weight)
        less_mean, whole = (sums.value_squares_about(x) for x in (mean, torch.zeros_like(one)))
        ratios.append(error(less_mean, sums.value_weight, one) / error(whole, sums.value_weight, one))
    return float(torch.tensor(ratios, dtype=torch.float64).log().mean().exp())
