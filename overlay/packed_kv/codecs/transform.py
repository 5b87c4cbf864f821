"""Centring and scaling of channels, before a vector is rotated (docs/formats.md, section 5).

A constant that is added to all keys of a query changes none of its attention weights, so the mean of a channel need
not be stored; and a channel times s, in K, leaves scores as they are where the query is divided by s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Numbers = Sequence[float] | Sequence[Sequence[float]] | torch.Tensor

INPUT_LIMIT = 32768.0
"""Bound of the magnitude of inputs and of means: 2^15."""
MAX_SCALE = 1024.0
"""Scales lie in [1/1024, 1024]: the kernels' fp16 matrices hold the rotation times 1 / scale."""


class ChannelTransform:
    """(x - mean) * scale by channel: fp32, each operation rounded on its own.

    Vectors have `stored_dim` channels; those that pad a head have mean 0 and scale 1.

    Args:
        head_dim: channels of a head.
        stored_dim: channels that are stored of it.
        mean, scale, first_mean: finite numbers [head_dim] for all heads or [heads, head_dim] for inputs
            [..., heads, head_dim], in the model's order of channels; None: 0, 1, and `mean`. `first_mean` takes the
            place of `mean` in the first token of a sequence. Rounded to fp32.
        device: where they live; inputs must be on it.

    Raises:
        ValueError: another shape, a mean beyond +-32768, a scale outside 1/1024 .. 1024.
    """

    def __init__(
        self,
        head_dim: int,
        stored_dim: int,
        mean: Numbers | None,
        scale: Numbers | None,
        first_mean: Numbers | None,
        device: torch.device,
    ) -> None:
        self.head_dim, self.stored_dim, self.device = head_dim, stored_dim, device
        self.mean = self._numbers(mean, "mean", -INPUT_LIMIT, INPUT_LIMIT, padding=0.0)
        self.scale = self._numbers(scale, "scale", 1 / MAX_SCALE, MAX_SCALE, padding=1.0)
        self.first_mean = self._numbers(first_mean, "first_mean", -INPUT_LIMIT, INPUT_LIMIT, padding=0.0)

    @property
    def centres(self) -> bool:
        return self.mean is not None or self.first_mean is not None

    @property
    def changes(self) -> bool:
        return self.centres or self.scale is not None

    def forward(self, x: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [..., stored_dim] -> the same; `first`: bool, broadcastable to [...], the first tokens of sequences."""
        if self.centres:
            x = x - self._means(first)
        return x if self.scale is None else x * self.scale

    def inverse(self, x: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
        """Undo `forward`, but for rounding."""
        x = self.unscale(x)
        return x + self._means(first) if self.centres else x

    def unscale(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [..., stored_dim] divided by the scale."""
        return x if self.scale is None else x / self.scale

    def mean_rows(self) -> torch.Tensor | None:
        """What `forward` takes off every vector, the mean, and what it takes off a sequence's first beyond that: fp32
        [1 or heads, 2, stored_dim], contiguous. None if it takes off nothing."""
        if not self.centres:
            return None
        mean, first_mean = self._mean_or_zero(), self._first_mean_or_mean()
        rows = torch.stack(torch.broadcast_tensors(mean, first_mean - mean), dim=-2)
        return rows if rows.ndim == 3 else rows.unsqueeze(0)

    def table(self, order: torch.Tensor) -> torch.Tensor:
        """For kernels: mean, mean of the first token and scale of the channels in packing order, fp32 [1 or heads, 3,
        stored_dim]. order: int64 [stored_dim] or [heads, stored_dim]."""
        scale = torch.ones(self.stored_dim, device=self.device) if self.scale is None else self.scale
        *rows, order = torch.broadcast_tensors(self._mean_or_zero(), self._first_mean_or_mean(), scale, order)
        table = torch.stack([row.gather(-1, order) for row in rows], dim=-2)
        return (table if table.ndim == 3 else table.unsqueeze(0)).contiguous()

    def _means(self, first: torch.Tensor | None) -> torch.Tensor:
        mean = self._mean_or_zero()
        return mean if first is None else torch.where(first.unsqueeze(-1), self._first_mean_or_mean(), mean)

    def _mean_or_zero(self) -> torch.Tensor:
        return torch.zeros(self.stored_dim, device=self.device) if self.mean is None else self.mean

    def _first_mean_or_mean(self) -> torch.Tensor:
        return self._mean_or_zero() if self.first_mean is None else self.first_mean

    def _numbers(
        self, given: Numbers | None, what: str, least: float, largest: float, padding: float
    ) -> torch.Tensor | None:
        if given is None:
            return None
        expected = f"{what} must be numbers [{self.head_dim}] or [heads, {self.head_dim}]"
        try:
            numbers = torch.as_tensor(given, dtype=torch.float32, device="cpu")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{expected}, got {given!r}") from error
        if numbers.ndim not in (1, 2) or numbers.shape[-1] != self.head_dim or not numbers.numel():
            raise ValueError(f"{expected}, got {tuple(numbers.shape)}")
        wrong = numbers[~((numbers >= least) & (numbers <= largest))]  # NaN is in no range
        if len(wrong):
            raise ValueError(f"{what} must be in [{least:g}, {largest:g}], got {wrong[0].item():g}")
        padded = torch.nn.functional.pad(numbers, (0, self.stored_dim - self.head_dim), value=padding)
        return padded.to(self.device).contiguous()
