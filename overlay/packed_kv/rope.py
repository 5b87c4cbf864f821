"""What rotary position embedding (RoPE) does to the channels of a key. Imports no torch and no vLLM."""

from __future__ import annotations

from typing import NamedTuple


class Rope(NamedTuple):
    """At position p the pair of channels (i, j) number c turns by `frequencies[c]` * p radians; channels beyond the
    pairs stay.

    `frequencies`: of the pairs, each from 0 to pi, scaled as the model scales them (YaRN, Llama 3). `interleaved`:
    whether pair c is the channels (2c, 2c + 1); else it is (c, c + n), with n pairs.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False

    def pairs(self) -> list[tuple[int, int]]:
        """The channels of each pair."""
        n = len(self.frequencies)
        return [(2 * c, 2 * c + 1) if self.interleaved else (c, c + n) for c in range(n)]
