"""Ways to store a vector that `tried.py` compares: the dtypes, and alternatives of others and our own.

A code turns K or V of one layer into what a reader gets back, fp32 [batch, tokens, KV heads, head_dim] in and out, and
gives the bytes of a vector. Nothing is packed: only the error matters here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from packed_kv import FORMATS, get_codec
from packed_kv.codecs import Codec, scalar
from packed_kv.codecs.rotations import Hadamard
from packed_kv.formats import CODES, GROUP_SIZE

FP16_BYTES, E4M3_MAX = 2, 448.0


@dataclass(frozen=True)
class Site:
    """Where a vector is stored: the layer's number, "key" or "value", the outlier channels and the channel order that
    `tq-calibrate` chooses there (of what is stored, so behind centring and scaling), RoPE's cos and sin, [tokens,
    head_dim] each, and what errors cost: that of e is e^T `weight` e, with `weight` [KV heads, head_dim, head_dim]."""

    layer: int
    role: str
    outliers: torch.Tensor | None = None
    order: torch.Tensor | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    weight: torch.Tensor | None = None


class Code(Protocol):
    """`vector_bytes` of a head of `head_dim` channels, and what comes back of `x`."""

    def vector_bytes(self, head_dim: int) -> float: ...

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor: ...


@cache
def hadamard(size: int) -> Hadamard:
    return Hadamard(size, torch.device("cpu"))


@dataclass(frozen=True)
class Raw:
    """16 bits. fp16, rotated as the recent window holds it."""

    def vector_bytes(self, head_dim: int) -> float:
        return FP16_BYTES * head_dim

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        rotation = hadamard(x.shape[-1])
        return rotation.inverse(rotation.forward(x).half().float())


@dataclass(frozen=True)
class Float8:
    """fp8 e4m3 with scale 1, as vLLM's `fp8`; `rotated` by a Hadamard or not."""

    rotated: bool = False

    def vector_bytes(self, head_dim: int) -> float:
        return head_dim

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        rotation = hadamard(x.shape[-1])
        y = rotation.forward(x) if self.rotated else x
        y = y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
        return rotation.inverse(y) if self.rotated else y


@dataclass(frozen=True)
class Int8:
    """Rotated int8 with an e5m3 scale, absmax / 127 rounded up, for every 32 channels."""

    def vector_bytes(self, head_dim: int) -> float:
        return head_dim + head_dim / GROUP_SIZE

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        rotation = hadamard(x.shape[-1])
        groups = rotation.forward(x).unflatten(-1, (-1, GROUP_SIZE))
        scale = e5m3_ceiling(groups.abs().amax(-1, keepdim=True) / 127)
        codes = (groups / scale).nan_to_num().round().clamp(-127, 127)
        return rotation.inverse((codes * scale).flatten(-2))


def e5m3_ceiling(x: torch.Tensor) -> torch.Tensor:
    """The least e5m3 number that is not below `x`, fp32, at least 0 and at most 40960."""
    bits = x.half().view(torch.int16) >> 7
    bits += scalar.decode_scale(bits.to(torch.uint8)) < x
    return scalar.decode_scale(bits.to(torch.uint8))


@dataclass(frozen=True)
class Dtype:
    """A dtype of packed-kv, with the channels that `tq-calibrate` chooses if `calibrated`. V is read as it is
    coded, or times `Code.value_gain` (as the dtypes do) if `longer`."""

    name: str
    calibrated: bool = False
    longer: bool = False

    @property
    def has_outliers(self) -> bool:
        return FORMATS[self.name].outlier_bits is not None

    def vector_bytes(self, head_dim: int) -> float:
        return FORMATS[self.name].vector_bytes(head_dim)

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        codec = self.codec(x.shape[-1], site)
        return codec.unrotate(codec.dequantize(*codec.quantize(x)))

    def codec(self, head_dim: int, site: Site) -> Codec:
        channels: dict[str, Any] = {}
        if self.calibrated and self.has_outliers:
            channels["outliers"] = site.outliers
        elif self.calibrated:
            channels["channel_order"] = site.order
        return get_codec(self.name, head_dim, site.role if self.longer else "key", **channels)


@dataclass(frozen=True)
class Grouped:
    """The code of `tq3` and `tq4` with another number of channels to a scale byte, or other bits."""

    bits: int
    group: int = GROUP_SIZE

    def vector_bytes(self, head_dim: int) -> float:
        return head_dim * self.bits / 8 + head_dim / self.group

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        rotation = hadamard(x.shape[-1])
        return rotation.inverse(grouped(rotation.forward(x), self.bits, self.group))


def grouped(y: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Rotated vectors, fp32 [..., head_dim], quantised and read back."""
    codes, scales = scalar.quantize(y.unflatten(-1, (-1, group)), bits)
    levels = torch.tensor(CODES[bits].magnitudes)
    decoded = torch.cat((levels, -levels))[codes.int()] * scalar.decode_scale(scales).unsqueeze(-1)
    return decoded.flatten(-2)


@dataclass(frozen=True)
class Widths:
    """`Grouped` with bits of its own at each layer and role; its bytes are the mean. Where it names no bits, vectors
    stay as they are."""

    bits: Mapping[tuple[int, str], int]
    role: str

    def vector_bytes(self, head_dim: int) -> float:
        mine = [Grouped(bits).vector_bytes(head_dim) for (_, role), bits in self.bits.items() if role == self.role]
        return sum(mine) / len(mine)

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        bits = self.bits.get((site.layer, site.role))
        return x if bits is None else Grouped(bits).read_back(x, site)


@dataclass(frozen=True)
class Qjl:
    """`bits` - 1 by the code of `tq3` and `tq4`, then the signs of a sketch of the residual and its fp16 norm: QJL,
    arXiv:2406.03482, in TurboQuant's inner-product code, arXiv:2504.19874.

    With a Gaussian sketch, inner products are unbiased. `least_squares` is as favourable as can be: an orthonormal
    sketch and the factor of least squared error, fitted to the very vectors.
    """

    bits: int
    least_squares: bool = False

    def vector_bytes(self, head_dim: int) -> float:
        return Grouped(self.bits).vector_bytes(head_dim) + FP16_BYTES

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        size = x.shape[-1]
        base = Grouped(self.bits - 1).read_back(x, site)
        residual = x - base
        sketch = torch.randn(size, size, generator=torch.Generator().manual_seed(1))
        if self.least_squares:
            sketch = torch.linalg.qr(sketch).Q
        norm = residual.norm(dim=-1, keepdim=True).half().float()
        back = norm * ((residual @ sketch.T).sign() @ sketch)
        factor = math.sqrt(math.pi / 2) / size
        if self.least_squares:
            factor = float((back * residual).sum() / back.square().sum())
        return base + factor * back


@dataclass(frozen=True)
class Spectral:
    """TriAttention of the package `aither-kvcache`: the `pairs` RoPE pairs of most energy of each vector, as indices
    of a byte and two coefficients of 4 or 8 bits under one fp16 scale.

    Keys are stored before RoPE, as the package wants them, and turned afterwards; a score is then the package's
    trigonometric series, with one rounding in another place. The package takes channels (2i, 2i + 1) for a pair, where
    transformers' Llama has (i, i + head_dim / 2).
    """

    pairs: int
    bits: int = 4

    def vector_bytes(self, head_dim: int) -> float:
        return (2 if self.bits == 4 else 3) * self.pairs + FP16_BYTES

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        encoder = spectral_encoder(x.shape[-1], self.pairs, self.bits)
        if site.role == "key":
            x = turn(x, site, -1)
        y = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        y = encoder.decode(encoder.encode(y)).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return turn(y, site, 1) if site.role == "key" else y


@cache
def spectral_encoder(head_dim: int, pairs: int, bits: int) -> Any:
    """The package's encoder. Raises ImportError without the package."""
    from aither_kvcache.triattention import SpectralKVEncoder, TriAttentionConfig  # type: ignore[import-not-found]

    config = TriAttentionConfig(head_dim=head_dim, num_freqs=pairs, coeff_bits=bits)
    assert bits == 8 or config.bytes_per_kv_token == Spectral(pairs, bits).vector_bytes(head_dim)
    return SpectralKVEncoder(config)


def turn(x: torch.Tensor, site: Site, direction: int) -> torch.Tensor:
    """RoPE of Llama's kind on [batch, tokens, heads, head_dim], forwards (1) or backwards (-1)."""
    assert site.rope is not None
    cosine, sine = (part[:, None] for part in site.rope)
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * (direction * sine)
