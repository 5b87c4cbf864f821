"""The fp32 reference codec: what a packed vector means. Kernels are judged against it.

encode:  clean, pad -> centre, scale -> rotate -> quantise groups -> pack;  decode is the reverse. In a packed vector
the codes of all groups come first, in group order (`bitpack`), then one scale byte a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..channel_calibration import UNCALIBRATED, ChannelCalibration
from ..formats import CODES, GROUP_SIZE, INPUT_LIMIT, Format, runs, stored_dim
from ..layout import MEAN_BLOCK, VectorLayout, key_vector
from . import bitpack, scalar
from .rotations import ROTATIONS, Hadamard, Rotation
from .transform import ChannelTransform

Channels = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor


class Codec:
    """Encodes K or V vectors of one format and head_dim.

    A vector's `head_dim` channels are followed by zeros, so that `stored_dim` channels are whole groups. They come last
    in the packing order, too.

    Args:
        fmt: the format.
        head_dim: channels of a head, a multiple of 16.
        role: "key" or "value": the order of codes in a page, and V is decoded times `Code.value_gain`.
        channels: calibration of the channels, for all heads or for the heads of inputs [..., heads, head_dim].
            `outlier_channels` are strictly ascending, n = `fmt.outlier_channels(layout_dim)` of them (None: the first
            n), and None for a format without an outlier group. `channel_order` is for such a format: a permutation
            (None: as they come). With `group_bits`, of K alone, channels are packed by `ranking`. `encode` stores (x -
            mean) * scale, `decode` gives x back; see `ChannelTransform`.
        device: where the constants live; inputs must be on it.
        layout_dim: head_dim whose packed size these vectors take, at least `head_dim`: V of fewer channels than K takes
            K's. None: `head_dim`.
        positions: most positions of a sequence; see `ChannelTransform`.

    Raises:
        ValueError: unsupported head_dim, role, outliers, channel order, means, scales or RoPE.
    """

    def __init__(
        self,
        fmt: Format,
        head_dim: int,
        role: str = "key",
        channels: ChannelCalibration = UNCALIBRATED,
        device: torch.device | str = "cpu",
        layout_dim: int | None = None,
        positions: int | None = None,
    ) -> None:
        if role not in ("key", "value"):
            raise ValueError(f'role must be "key" or "value", got {role!r}')
        device = torch.device(device)
        self.fmt, self.head_dim, self.role, self.device = fmt, head_dim, role, device
        layout_dim = head_dim if layout_dim is None else layout_dim
        self.stored_dim = stored_dim(layout_dim)
        if stored_dim(head_dim) > self.stored_dim:
            raise ValueError(f"{fmt.name}: {role}s of {head_dim} channels do not fit vectors of {layout_dim}")
        self.vector_bytes = fmt.vector_bytes(layout_dim)
        self.outlier_count = fmt.outlier_channels(layout_dim)
        vector = VectorLayout(fmt.group_bits(layout_dim))
        # For kernels: the rotations' constants by packed channel. Sections that a file makes of K keep the format's own
        # constants, so that K and V have the same.
        self.rotations = self._rotations(vector)
        self.rotation_constants = torch.cat([rotation.constants for rotation in self.rotations])
        if channels.group_bits is not None:
            if role != "key" or fmt.rotation != "hadamard":
                raise ValueError(f"{fmt.name}: {role}s, rotated by {fmt.rotation}, have no groups of other bits")
            vector = key_vector(fmt, layout_dim, channels.group_bits)
            self.rotations = self._rotations(vector, self.rotation_constants)
        self.vector, self.group_bits = vector, vector.group_bits
        self.sections = [GROUP_SIZE * groups for _, groups in vector.sections]
        order = None
        if channels.outlier_channels is not None:
            order = self._outliers_first(channels.outlier_channels)
        if channels.channel_order is not None:
            if self.outlier_count:
                raise ValueError(f"{fmt.name} at head_dim {head_dim} has outlier channels; pass them as outliers")
            order = self._permutation(channels.channel_order, "channel_order")
        if channels.group_bits is not None and channels.ranking is not None:
            order = self._permutation(channels.ranking, "ranking")
        self.order = None if order is None else order.to(device)
        self.inverse_order = None if self.order is None else self.order.argsort(-1)
        self.transform = ChannelTransform(head_dim, self.stored_dim, channels, device, positions)
        self.heads = self._heads()
        # For kernels: the channels in packing order, [heads, stored_dim] or [stored_dim].
        self.channels = torch.arange(self.stored_dim, device=device) if self.order is None else self.order

    def encode(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Pack vectors: float [..., head_dim] -> uint8 [..., vector_bytes].

        positions: int, broadcastable to [...]: of each vector's token in its sequence; may be None where the codec has
            neither `first_mean` nor `rope`.

        Raises:
            ValueError: another shape; no positions where they are needed.
        """
        return self.pack(*self.quantize(x, positions))

    def decode(self, packed: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Unpack vectors: uint8 [..., vector_bytes] -> float32 [..., head_dim]. Raises ValueError as `encode`.

        positions: as they were given to `encode`.
        """
        return self.restore(self.dequantize(*self.unpack(packed)), positions)

    def quantize(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """float [..., head_dim] -> codes uint8 [..., stored_dim], scale bytes uint8 [..., stored_dim / 32].

        positions: see `encode`.
        """
        groups = self.prepare(x, positions).unflatten(-1, (-1, GROUP_SIZE))
        parts = [scalar.quantize(group, bits) for bits, group in split_runs(self.group_bits, groups, -2)]
        codes, scales = (torch.cat(tensors, dim=-2 + i) for i, tensors in enumerate(zip(*parts, strict=True)))
        return codes.flatten(-2), scales

    def prepare(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The input of quantisation: `x` float [..., head_dim], cleaned, padded, centred, scaled and rotated -> fp32
        [..., stored_dim]. NaN and infinities become 0, and numbers are clamped to +-INPUT_LIMIT before the rotation:
        neither reaches a neighbour."""
        if x.shape[-1:] != (self.head_dim,) or not x.dtype.is_floating_point:
            raise ValueError(
                f"{self.fmt.name}: expected a floating-point tensor [..., {self.head_dim}], "
                f"got {x.dtype} {tuple(x.shape)}"
            )
        self._check_heads(x)
        x = self.pad(x.to(torch.float32))
        x = self.transform.forward(torch.where(x.isfinite(), x, 0.0), positions).clamp(-INPUT_LIMIT, INPUT_LIMIT)
        return self.rotate(x)

    def gain(self, bits: int) -> float:
        """The factor on decoded values of a code width: V's gain, 1 for K."""
        return CODES[bits].value_gain if self.role == "value" else 1.0

    def restore(self, rotated: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Undo `prepare`, but for rounding: fp32 [..., stored_dim] -> [..., head_dim]. positions: see `decode`."""
        return self.transform.inverse(self.unrotate(rotated), positions)[..., : self.head_dim]

    def prepared_means(self, positions: torch.Tensor) -> torch.Tensor:
        """Means that `prepare` subtracts at `positions`, int [tokens], scaled and rotated like the vectors: fp32
        [tokens, heads or 1, stored_dim]. Stored vectors plus these means give the scores of the original vectors."""
        block = torch.where(positions == 0, -1, positions // MEAN_BLOCK)  # the tokens of a block share one mean
        blocks, of_token = torch.unique(block, return_inverse=True)
        some = torch.where(blocks < 0, 0, (blocks * MEAN_BLOCK).clamp(min=1))
        means = self.transform.means(some[:, None])
        means = means if self.transform.scale is None else means * self.transform.scale
        return self.rotate(means.expand(len(blocks), self.heads or 1, self.stored_dim))[of_token]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] -> [..., stored_dim], zeros behind."""
        padding = self.stored_dim - self.head_dim
        return torch.nn.functional.pad(x, (0, padding)) if padding else x

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """codes and scales of `quantize` -> the rotated vectors, float32 [..., stored_dim]."""
        groups = split_runs(self.group_bits, codes.unflatten(-1, (-1, GROUP_SIZE)), -2)
        group_scales = split_runs(self.group_bits, scales.unsqueeze(-1), -2)
        parts = [
            scalar.dequantize(code, scale.squeeze(-1), bits, self.gain(bits))
            for (bits, code), (_, scale) in zip(groups, group_scales, strict=True)
        ]
        return torch.cat(parts, dim=-2).flatten(-2)

    def pack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """codes and scales of `quantize` -> uint8 [..., vector_bytes]."""
        groups = split_runs(self.group_bits, codes.unflatten(-1, (-1, GROUP_SIZE)), -2)
        return torch.cat([*(bitpack.pack(group.flatten(-2), bits) for bits, group in groups), scales], dim=-1)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse of `pack`: uint8 [..., vector_bytes] -> codes uint8 [..., stored_dim] and scale bytes uint8 [...,
        groups]. Raises ValueError for other shapes and dtypes."""
        if packed.shape[-1:] != (self.vector_bytes,) or packed.dtype != torch.uint8:
            raise ValueError(
                f"{self.fmt.name} at head_dim {self.head_dim}: expected uint8 [..., {self.vector_bytes}], "
                f"got {packed.dtype} {tuple(packed.shape)}; was it packed by another format?"
            )
        self._check_heads(packed)
        lengths = runs(self.group_bits)
        sizes = [4 * bits * count for bits, count in lengths]
        *codes, scales = packed.split([*sizes, len(self.group_bits)], dim=-1)
        unpacked = [bitpack.unpack(part, bits) for (bits, _), part in zip(lengths, codes, strict=True)]
        return torch.cat(unpacked, dim=-1), scales

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Channels of `x` fp32 [..., stored_dim] in packing order, each section rotated. Preserves dot products."""
        if self.order is not None:
            x = x.gather(-1, self.order.expand(x.shape))
        parts = zip(self.rotations, x.split(self.sections, -1), strict=True)
        return torch.cat([rotation.forward(part) for rotation, part in parts], -1)

    def unrotate(self, y: torch.Tensor) -> torch.Tensor:
        """Undo `rotate`: fp32 [..., stored_dim] -> the same shape, channels in the model's order."""
        x = torch.cat([r.inverse(part) for r, part in zip(self.rotations, y.split(self.sections, -1), strict=True)], -1)
        return x if self.inverse_order is None else x.gather(-1, self.inverse_order.expand(x.shape))

    def _outliers_first(self, outliers: Channels) -> torch.Tensor:
        """Outlier channels first, then the rest ascending: int64 [stored_dim] or [heads, stored_dim]."""
        count = self.outlier_count
        if count == 0:
            raise ValueError(f"{self.fmt.name} at head_dim {self.head_dim} has no outlier channels; pass outliers=None")
        indices = self._indices(outliers, "outliers", count)
        if (indices[..., 1:] <= indices[..., :-1]).any() or indices.min() < 0 or indices.max() >= self.head_dim:
            raise ValueError(f"outliers must be strictly ascending and in [0, {self.head_dim}), got {indices.tolist()}")
        regular = torch.ones(*indices.shape[:-1], self.stored_dim, dtype=torch.bool).scatter_(-1, indices, False)
        rest = regular.nonzero()[:, -1].view(*indices.shape[:-1], -1)
        return torch.cat((indices, rest), dim=-1)

    def _rotations(self, vector: VectorLayout, constants: torch.Tensor | None = None) -> list[Rotation]:
        """The rotation of each section of a vector. constants: fp32 [stored_dim], the signs of Hadamard rotations;
        None: each section takes the default signs from the start."""
        sizes = [GROUP_SIZE * groups for _, groups in vector.sections]
        if constants is None:
            return [ROTATIONS[self.fmt.rotation](size, self.device) for size in sizes]
        return [Hadamard(len(signs), self.device, signs) for signs in constants.split(sizes)]

    def _permutation(self, channels: Channels, what: str) -> torch.Tensor:
        """Check an order of all channels and append the padding: int64 [stored_dim] or [heads, stored_dim]."""
        order = self._indices(channels, what, self.head_dim)
        if (order.sort(-1).values != torch.arange(self.head_dim)).any():
            raise ValueError(f"{what} must have each of {self.head_dim} channels once, got {order.tolist()}")
        padding = torch.arange(self.head_dim, self.stored_dim).expand(*order.shape[:-1], -1)
        return torch.cat((order, padding), dim=-1)

    def _indices(self, channels: Channels, what: str, count: int) -> torch.Tensor:
        """`channels` as int64 [count] or [heads, count]."""
        shapes = f"[{count}] or [heads, {count}]"
        expected = f"{self.fmt.name} at head_dim {self.head_dim}: expected integer {what} {shapes}"
        try:
            given = torch.as_tensor(channels, device="cpu")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{expected}, got {channels!r}") from error
        integers = given.dtype != torch.bool and not given.is_floating_point()
        if not integers or given.ndim not in (1, 2) or given.shape[-1] != count or not given.numel():
            raise ValueError(f"{expected}, got {given.dtype} {tuple(given.shape)}")
        return given.to(torch.int64)

    def _heads(self) -> int | None:
        """Number of heads of the parts that are given per head. Raises ValueError if the parts differ in it."""
        part = self.transform
        given = {"channels": self.order, "mean": part.mean, "scale": part.scale, "first_mean": part.first_mean}
        heads = {name: len(rows) for name, rows in given.items() if rows is not None and rows.ndim == 2}
        if len({*heads.values()}) > 1:
            differing = ", ".join(f"{name} for {count}" for name, count in heads.items())
            raise ValueError(f"{self.fmt.name}: arguments are of different numbers of heads: {differing}")
        return next(iter(heads.values()), None)

    def _check_heads(self, x: torch.Tensor) -> None:
        """Raises ValueError if `x` [..., heads, any] has another number of heads than the parts given per head."""
        if self.heads is not None and x.shape[-2:-1] != (self.heads,):
            raise ValueError(
                f"{self.fmt.name}: channels were given for {self.heads} heads; expected "
                f"[..., {self.heads}, {x.shape[-1]}], got {tuple(x.shape)}"
            )


def split_runs(group_bits: tuple[int, ...], groups: torch.Tensor, dim: int) -> list[tuple[int, torch.Tensor]]:
    """Split dimension `dim`, which counts groups, into runs of groups of equal bits; returns (bits, groups) of each."""
    lengths = runs(group_bits)
    parts = groups.split([count for _, count in lengths], dim=dim)
    return [(bits, part) for (bits, _), part in zip(lengths, parts, strict=True)]
