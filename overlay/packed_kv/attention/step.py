"""Cache of a step: values that its layers share, made for the first layer and kept as long as the step's metadata."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from ..window.metadata import WindowMetadata

Made = TypeVar("Made")


class StepKey(NamedTuple):
    """Key of a value that all layers of one kind share within a step. Keys and kinds are tuples: with dataclasses a
    layer's mixed step took 7 us more of the host.

    `what`: name of the value. `kind`: kind of the layer's kernel; kernels of equal kinds make equal values. `first`:
    index of the first request that the value covers. `window`: the step's rings that the value is made for, or None;
    rings are equal to themselves alone, and the key keeps them alive.
    """

    what: str
    kind: Hashable = None
    first: int = 0
    window: WindowMetadata | None = None


class StepCache:
    """The values of one step, by key."""

    def __init__(self) -> None:
        self.made: dict[StepKey, Any] = {}

    def get(self, key: StepKey, make: Callable[[], Made]) -> Made:
        """Return the value of `key`, made by `make` on the first call."""
        try:
            return self.made[key]
        except KeyError:
            made = self.made[key] = make()
            return made
