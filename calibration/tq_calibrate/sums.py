"""Sums over the queries, keys and values of a model's layers, whichever engine runs it: the input of `statistics`.

Only sums are kept, so memory does not grow with tokens. They are float64: a variance is exact to about 1e-16 of the
mean's square, so a mean of 10^4 standard deviations still leaves eight digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .attended import STRIDE, Scores, attention_from_afar
from .latents import of_latents
from .ropes import (
    ModelRope,
    before_rope,
    rope_of_layer,
    squares_of_other_mean,
    stored_squares,
    sums_before_rope,
    turned_squares,
)
from .statistics import LayerStatistics, Statistics, check_finite, check_head_sizes

EVEN = 0.5
"""Share of the weights of K's mean and variance that is equal for all keys; the rest follows attention."""


class Sums:
    """Sums per layer number. With tensor parallelism, each rank has the sums of its own heads.

    `ropes`: the RoPEs that a layer may have; its keys tell which one it has. `has_latents`: keys are latents and RoPE
    channels, values are latents.
    """

    def __init__(self, ropes: Sequence[ModelRope] = ()) -> None:
        self.layers: dict[int, LayerSums] = {}
        self.ropes = ropes
        self.has_latents = False

    def add(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        scores: Scores,
        output_columns: Callable[[], torch.Tensor],
    ) -> None:
        """Add tokens of one layer.

        Args:
            layer: the layer's number.
            query: float [tokens, heads, head_dim], after norm and RoPE.
            key, value: float [tokens, KV heads, head_dim] and [tokens, KV heads, value_dim], as the cache holds them.
            positions: int [tokens], of each token in its own sequence, from 0. Sequences must begin as a server's do.
            scores: scale, window, soft cap and sinks of the layer.
            output_columns: returns squared norms of the output projection's columns, [heads * value_dim]; called once a
                layer.
        """
        if layer not in self.layers:
            head_sizes = key.shape[2], value.shape[2]
            self.layers[layer] = LayerSums(key.shape[1], head_sizes, output_columns(), self.ropes)
        self.layers[layer].add(query, key, value, positions, scores)

    def begin_anew(self) -> Sums:
        """Return the sums so far, and begin new ones here."""
        before = Sums(self.ropes)
        before.layers, before.has_latents, self.layers = self.layers, self.has_latents, {}
        return before

    def statistics(self, even: float = EVEN) -> Statistics:
        """The means so far, of at least one layer. Raises UserError if a file cannot hold them.

        even: share of the weights of K's mean and variance that is equal for all keys.
        """
        layers = {layer: sums.statistics(even) for layer, sums in sorted(self.layers.items())}
        if self.has_latents:
            layers = {layer: of_latents(found) for layer, found in layers.items()}
        check_head_sizes(layers)
        statistics = Statistics(layers, max(sums.tokens for sums in self.layers.values()))
        check_finite(statistics)
        return statistics


class LayerSums:
    """Sums of one layer, float64 [KV heads, head_size]; `head_sizes` are K's and V's. Sums before RoPE
    (`sums_before_rope`) are float64 [KV heads, ropes, 5 / 2 head_size]; every eighth query is in them.

    Keys of position 0 are summed separately: they are stored minus a mean of their own and differ from all others
    (small, and heavily attended); so are values, except in `value_squares` and `value_max`. Queries of position 0 are
    left out, as they see only one key. `attended_*` are weighed by the attention that each key gets, `attending_*` by
    the attention that each query gives (`attended.py`).
    """

    def __init__(
        self,
        kv_heads: int,
        head_sizes: tuple[int, int],
        output_columns: torch.Tensor,
        ropes: Sequence[ModelRope] = (),
    ) -> None:
        self.ropes = [rope for rope in ropes if 2 * len(rope.rope.frequencies) <= head_sizes[0]]  # of its kind of layer
        self.value_weight = output_columns.double().view(kv_heads, -1, head_sizes[1]).sum(1)
        zeros = torch.zeros(8, kv_heads, head_sizes[0], dtype=torch.float64, device=self.value_weight.device)
        self.key, self.key_squares, self.first_key, self.query_squares, self.key_max = zeros[:5]
        self.attended_key, self.attended_squares, self.attending_squares = zeros[5:]
        before_rope = zeros.new_zeros(4, kv_heads, len(self.ropes), head_sizes[0] * 5 // 2)
        self.key_before_rope, self.attended_before_rope = before_rope[:2]
        self.query_before_rope, self.attending_before_rope = before_rope[2:]
        self.attention = zeros.new_zeros(kv_heads, 1)
        of_values = zeros.new_zeros(5, kv_heads, head_sizes[1])
        self.value_squares, self.value_max, self.value, self.first_value, self.first_value_squares = of_values
        self.tokens = self.first_tokens = self.sampled_queries = 0

    def add(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, scores: Scores
    ) -> None:
        """Add tokens; shapes as for `Sums.add`."""
        first = positions == 0
        self.tokens += len(first)
        self.first_tokens += int(first.sum())
        self.first_key += key[first].sum(0, dtype=torch.float64)
        later = key[~first].double()
        self.key += later.sum(0)
        self.key_squares += later.square().sum(0)
        far = attention_from_afar(query, key, positions, scores)
        attention = far.of_keys[~first].double().unsqueeze(-1)
        self.attention += attention.sum(0)
        self.attended_key += (attention * later).sum(0)
        self.attended_squares += (attention * later.square()).sum(0)
        attending = far.of_queries.any(-1)
        of_queries, queries = far.of_queries[attending].double(), query[attending].double()
        self.attending_squares += self._of_kv_heads((of_queries.unsqueeze(-1) * queries.square()).sum(0)).sum(1)
        asked = positions % STRIDE == 1
        self.sampled_queries += int(asked.sum())
        for at, (rope, *_) in enumerate(self.ropes):
            before = before_rope(later, positions[~first], rope)
            self.key_before_rope[:, at] += sums_before_rope(before, rope)
            self.attended_before_rope[:, at] += sums_before_rope(before, rope, attention[..., 0])
            sampled = sums_before_rope(before_rope(query[asked].double(), positions[asked], rope), rope)
            self.query_before_rope[:, at] += self._of_kv_heads(sampled).mean(1)
            weighed = sums_before_rope(before_rope(queries, positions[attending], rope), rope, of_queries)
            self.attending_before_rope[:, at] += self._of_kv_heads(weighed).sum(1)
        self.query_squares += self._of_kv_heads(_squares(query[~first])).mean(1)
        self.value_squares += _squares(value)
        self.value += value[~first].sum(0, dtype=torch.float64)
        self.first_value += value[first].sum(0, dtype=torch.float64)
        self.first_value_squares += _squares(value[first])
        for largest, seen in ((self.key_max, key), (self.value_max, value)):
            torch.maximum(largest, seen.abs().amax(0).double(), out=largest)

    def statistics(self, even: float = EVEN) -> LayerStatistics:
        """The means so far. even: share of the weights that is equal for all keys."""
        later = max(1, self.tokens - self.first_tokens)
        energy = self.key_squares / later
        at = rope_of_layer(self.ropes, self.key_before_rope[..., : self.key.shape[1]], self.key)
        if at is None:
            rope, mean = None, self._weighed(self.key / later, self.attended_key, even)
            squares = self._weighed(energy, self.attended_squares, even)
            variance = (squares - mean.square()).clamp_min(0.0)
            weight = self.query_squares / later
            far_weight = self._weighed(weight, self.attending_squares, 0.0)
        else:
            rope = self.ropes[at]
            means = self._weighed(self.key_before_rope[:, at] / later, self.attended_before_rope[:, at], even)
            mean, variance = means[:, : self.key.shape[1]], stored_squares(means, rope)
            sampled = self.query_before_rope[:, at] / max(1, self.sampled_queries)
            far = self._weighed(sampled, self.attending_before_rope[:, at], 0.0)
            weight, far_weight = turned_squares(sampled, rope), turned_squares(far, rope)
        return LayerStatistics(
            key_energy=energy,
            key_variance=variance,
            value_energy=self.value_squares / self.tokens,
            key_weight=weight,
            far_key_weight=far_weight,
            value_weight=self.value_weight,
            key_max=self.key_max,
            value_max=self.value_max,
            key_mean=mean,
            key_first_mean=self.first_key / self.first_tokens if self.first_tokens else None,
            rope=rope,
            value_mean=self.value / later,
            value_first_mean=self.first_value / self.first_tokens if self.first_tokens else None,
            value_variance=self.value_squares_about(self.value / later),
        )

    def squares_about(self, mean: torch.Tensor | None, rope: ModelRope | None, even: float = EVEN) -> torch.Tensor:
        """Mean squares of K minus another text's mean, float64 [KV heads, head_size], weighed as in `statistics`.
        `rope`: the RoPE that turns `mean`; `mean` None: nothing is subtracted."""
        later = max(1, self.tokens - self.first_tokens)
        if mean is None or rope is None:
            squares = self._weighed(self.key_squares / later, self.attended_squares, even)
            own = self._weighed(self.key / later, self.attended_key, even)
            return squares if mean is None else squares - 2 * mean * own + mean.square()
        at = self.ropes.index(rope)
        means = self._weighed(self.key_before_rope[:, at] / later, self.attended_before_rope[:, at], even)
        own = means[:, : self.key.shape[1]]
        return stored_squares(means, rope) + squares_of_other_mean(own - mean, rope)

    def value_squares_about(self, mean: torch.Tensor) -> torch.Tensor:
        """Mean squares of V after position 0 minus another text's mean, if any, float64 [KV heads, V's head_size]."""
        later = max(1, self.tokens - self.first_tokens)
        squares, own = (self.value_squares - self.first_value_squares) / later, self.value / later
        return (squares - 2 * mean * own + mean.square()).clamp_min(0.0)

    def _of_kv_heads(self, of_heads: torch.Tensor) -> torch.Tensor:
        """[heads, n] -> [KV heads, query heads of each, n]."""
        return of_heads.unflatten(0, (len(self.key), -1))

    def _weighed(self, alike: torch.Tensor, attended: torch.Tensor, even: float) -> torch.Tensor:
        """Mix the plain mean `alike` with the attention-weighted one (sum `attended`) where there is attention."""
        by_attention = attended / self.attention.clamp_min(torch.finfo(torch.float64).tiny)
        return torch.where(self.attention > 0, even * alike + (1 - even) * by_attention, alike)


def _squares(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] -> sums over tokens, float64 [heads, head_dim]."""
    return x.float().square().sum(0, dtype=torch.float64)
