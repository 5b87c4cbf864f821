"""What the layers of a step share: made for the first of them, and kept as long as the step's metadata."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..window.metadata import WindowMetadata

Made = TypeVar("Made")


@dataclass(frozen=True)
class StepKey:
    """Names a thing that the layers of one kind share.

    `what`: the thing. `kind`: of the layer's kernel; kernels of equal kinds make equal things. `first`: the request
    from which on it is for. `window`: the step's rings that it is for, or None. They are equal to themselves alone, and
    the key keeps them alive.
    """

    what: str
    kind: Hashable = None
    first: int = 0
    window: WindowMetadata | None = None


class StepCache:
    """The things of one step, by key."""

    def __init__(self) -> None:
        self.made: dict[StepKey, Any] = {}

    def get(self, key: StepKey, make: Callable[[], Made]) -> Made:
        """Return what `make` returned when this was first asked for under `key`."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]
