"""Centring and scaling of channels, before a vector is rotated (docs/formats.md, section 5).

A mean is subtracted from a key before it is stored, and the query's product with that mean is added to its score. A
mean is also subtracted from a value, and the mean of the values is added to the output. A channel of K may be
multiplied by s without changing scores if the query's is divided by s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..channel_calibration import SCALE_BOUNDS, ChannelCalibration
from ..formats import INPUT_LIMIT
from ..layout import MEAN_BLOCK
from ..model.rope import Rope
from .rope import partner, spectrum_of_blocks

Numbers = Sequence[float] | Sequence[Sequence[float]] | torch.Tensor


class ChannelTransform:
    """(x - mean of the position) * scale by channel: fp32, each operation rounded on its own.

    The mean of block b of positions is mean * spectrum[b, 0] + partner * spectrum[b, 1], both products and the sum
    rounded: see `codecs/rope.py`. Without RoPE there is one block, with the factors 1 and 0. Position 0 has
    `first_mean` instead. Vectors have `stored_dim` channels; those that pad a head have mean 0 and scale 1.

    Args:
        head_dim: channels of a head.
        stored_dim: stored channels of a head.
        channels: `mean`, `scale` and `first_mean` are finite numbers [head_dim] for all heads or [heads, head_dim] for
            inputs [..., heads, head_dim], in the model's order of channels; None: 0, 1, and the mean of its block.
            Rounded to fp32. With `rope`, `mean` is the mean of the keys before RoPE.
        device: where they live; inputs must be on it.
        positions: most positions of a sequence; those beyond have the mean of the last block. None: there is no bound,
            and `spectrum` grows with the positions that come.

    Attributes:
        spectrum: fp32 [blocks, 2, stored_dim], contiguous, in the model's order; one tensor for all layers of a RoPE.

    Raises:
        ValueError: another shape, a mean beyond +-32768, a scale outside 1/1024 .. 1024, a `rope` without a mean, or
            one that does not fit heads of head_dim channels.
    """

    def __init__(
        self,
        head_dim: int,
        stored_dim: int,
        channels: ChannelCalibration,
        device: torch.device,
        positions: int | None = None,
    ) -> None:
        rope = channels.rope
        self.head_dim, self.stored_dim, self.device, self.rope = head_dim, stored_dim, device, rope
        self.mean = self._numbers(channels.mean, "mean", -INPUT_LIMIT, INPUT_LIMIT, padding=0.0)
        self.scale = self._numbers(channels.scale, "scale", *SCALE_BOUNDS, padding=1.0)
        self.first_mean = self._numbers(channels.first_mean, "first_mean", -INPUT_LIMIT, INPUT_LIMIT, padding=0.0)
        if rope is None:
            self.spectrum = torch.tensor([[[1.0], [0.0]]], device=device).expand(1, 2, stored_dim).contiguous()
        elif self.mean is None:
            raise ValueError("rope is given without the mean that it turns; give the mean of keys before RoPE, too")
        else:
            self.spectrum = self._spectrum(rope, -(-(positions or 1) // MEAN_BLOCK))
        self.partner = None if rope is None or self.mean is None else partner(rope, self.mean)
        self.grows = rope is not None and positions is None

    @property
    def centres(self) -> bool:
        return self.mean is not None or self.first_mean is not None

    @property
    def changes(self) -> bool:
        return self.centres or self.scale is not None

    @property
    def needs_positions(self) -> bool:
        """True if the means depend on a token's position."""
        return self.first_mean is not None or self.rope is not None

    @property
    def mean_blocks(self) -> int:
        """Number of blocks of positions; each block has a mean."""
        return len(self.spectrum)

    @property
    def block_tokens(self) -> int:
        """Positions of a block; 0 without RoPE: one block has all positions."""
        return 0 if self.rope is None else MEAN_BLOCK

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [..., stored_dim] -> the same; `positions`: int, broadcastable to [...], of each vector in its sequence,
        may be None where `needs_positions` is false. Raises ValueError."""
        if self.centres:
            x = x - self.means(positions)
        return x if self.scale is None else x * self.scale

    def inverse(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Undo `forward`, but for rounding."""
        x = self.unscale(x)
        return x + self.means(positions) if self.centres else x

    def unscale(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [..., stored_dim] divided by the scale."""
        return x if self.scale is None else x / self.scale

    def means(self, positions: torch.Tensor | None) -> torch.Tensor:
        """Means that `forward` subtracts from vectors at `positions`: fp32, broadcastable to [..., stored_dim]."""
        if not self.needs_positions:
            return self._mean_or_zero()
        if positions is None:
            raise ValueError("means depend on a token's position in its sequence: pass the tokens' positions")
        means = self._of_blocks(positions // MEAN_BLOCK)
        if self.first_mean is None:
            return means
        return torch.where((positions == 0).unsqueeze(-1), self.first_mean, means)

    def mean_rows(self) -> torch.Tensor | None:
        """Return, for kernels, the mean, its partner and the mean of position 0, fp32 [1 or heads, 3, stored_dim],
        contiguous, in the model's order. None if `forward` subtracts nothing."""
        if not self.centres:
            return None
        return self._stacked(self._rows())

    def table(self, order: torch.Tensor) -> torch.Tensor:
        """Return, for kernels, the rows of `mean_rows` and the scale of the channels in packing order, fp32 [1 or
        heads, 4, stored_dim], contiguous. order: int64 [stored_dim] or [heads, stored_dim]."""
        scale = torch.ones(self.stored_dim, device=self.device) if self.scale is None else self.scale
        *rows, order = torch.broadcast_tensors(*self._rows(), scale, order)
        return self._stacked([row.gather(-1, order) for row in rows])

    def _rows(self) -> list[torch.Tensor]:
        mean = self._mean_or_zero()
        first = self._of_blocks(torch.zeros((), dtype=torch.int64, device=self.device))
        first = first if self.first_mean is None else self.first_mean
        return [mean, torch.zeros_like(mean) if self.partner is None else self.partner, first]

    @staticmethod
    def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(torch.broadcast_tensors(*rows), dim=-2)
        return (stacked if stacked.ndim == 3 else stacked.unsqueeze(0)).contiguous()

    def _of_blocks(self, block: torch.Tensor) -> torch.Tensor:
        """The mean of each block of positions, int [...] -> fp32, broadcastable to [..., stored_dim]."""
        mean = self._mean_or_zero()
        if self.rope is None or self.partner is None:
            return mean
        if self.grows and block.numel() and (last := int(block.max())) >= self.mean_blocks:
            self.spectrum = self._spectrum(self.rope, 1 << last.bit_length())
        cosine, sine = self.spectrum[block.long().clamp(0, self.mean_blocks - 1)].unbind(-2)
        return mean * cosine + self.partner * sine

    def _spectrum(self, rope: Rope, blocks: int) -> torch.Tensor:
        return spectrum_of_blocks(rope, self.head_dim, blocks, self.stored_dim, self.device)

    def _mean_or_zero(self) -> torch.Tensor:
        return torch.zeros(self.stored_dim, device=self.device) if self.mean is None else self.mean

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
