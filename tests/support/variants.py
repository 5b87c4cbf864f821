"""Variants of compiled kernels that CI looks at."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

EVERY = bool(os.environ.get("PACKED_KV_ALL_VARIANTS"))


def half(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every second combination of parameters; all with PACKED_KV_ALL_VARIANTS. Of three parameters or more, every two
    values still meet."""
    return one_in(2, *parameters)


def one_in(count: int, *parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """One in `count` combinations of parameters, by the sum of their places in their lists; all with
    PACKED_KV_ALL_VARIANTS. Two values meet wherever another parameter has at least `count` values."""
    found = []
    for places in itertools.product(*(range(len(values)) for values in parameters)):
        if EVERY or sum(places) % count == 1:
            found.append(tuple(values[place] for values, place in zip(parameters, places, strict=True)))
    return found
