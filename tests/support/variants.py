"""Variants of compiled kernels that CI looks at."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

EVERY = bool(os.environ.get("PACKED_KV_ALL_VARIANTS"))


def half(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every second combination of parameters, those whose places in their lists add up to an odd number; all with
    PACKED_KV_ALL_VARIANTS. Of three parameters or more, every two values still meet."""
    found = []
    for places in itertools.product(*(range(len(values)) for values in parameters)):
        if EVERY or sum(places) % 2:
            found.append(tuple(values[place] for values, place in zip(parameters, places, strict=True)))
    return found
