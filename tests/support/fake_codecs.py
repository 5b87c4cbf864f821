"""Codecs that are not real ones: null codecs, which keep every bit, and a codec of noise.

They go through the same store, read and attend code as the real dtypes: a test registers a null format as an eighth
dtype and puts its codec in the place of `PagedCodec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from packed_kv.attention import impl
from packed_kv.attention.latent import impl as latent_impl
from packed_kv.attention.sparse import impl as sparse_impl
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.latent import LatentCodec
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.codecs.pages import PagedCodec
from packed_kv.engine import backend, registration
from packed_kv.formats import FORMATS, Format
from packed_kv.layout import MICRO_BLOCK

NULL_DTYPES = {"null_bf16": torch.bfloat16, "null_fp32": torch.float32}


@dataclass(frozen=True)
class NullFormat(Format):
    """Pages of plain numbers: K, then V, of each token."""

    def slot_bytes(self, head_dim: int) -> int:
        return 2 * head_dim * NULL_DTYPES[self.name].itemsize

    def latent_bytes(self, rank: int, rope_dim: int, rope_bits: int = 16) -> int:
        return (rank + rope_dim) * NULL_DTYPES[self.name].itemsize


class ExactLatentCodec(LatentCodec):
    """Latents as a format stores them, rotated, centred and scaled, but not coded: fp32 numbers."""

    def __init__(self, fmt: Format, rank: int, rope_dim: int, device: object = "cpu", *_unused: object) -> None:
        random = torch.Generator().manual_seed(7)
        mean, scale = torch.randn(2, rank, generator=random).mul(0.5)
        channels = ChannelCalibration(mean=mean, scale=scale.exp())
        super().__init__(FORMATS["tq4"], rank, rope_dim, device, channels)
        self.slot_bytes = fmt.latent_bytes(rank, rope_dim)

    def write(self, cache, slots, latent, rope):
        stored = slots >= 0
        rows = torch.cat((self.latent.prepare(latent), rope.float()), dim=-1)[stored].contiguous().view(torch.uint8)
        cache[slots[stored] // cache.shape[1], slots[stored] % cache.shape[1]] = rows

    def read(self, cache, micro_blocks):
        tokens = (micro_blocks[:, None] * MICRO_BLOCK + torch.arange(MICRO_BLOCK)).flatten()
        rows = cache[tokens // cache.shape[1], tokens % cache.shape[1]].contiguous().view(torch.float32)
        return rows.split([self.rank, self.rope_dim], dim=-1)

    def value_gain(self):
        return torch.ones(self.rank)


class ExactLatentRowCodec(LatentRowCodec):
    """The same of latent rows."""

    def __init__(self, fmt: Format, rank: int, rope_dim: int, *_unused: object) -> None:
        exact = ExactLatentCodec(fmt, rank, rope_dim)
        super().__init__(FORMATS["tq4"], rank, rope_dim)
        self.latent, self.slot_bytes = exact.latent, exact.slot_bytes

    write = ExactLatentCodec.write

    def read_slots(self, cache, slots):
        rows = cache[slots // cache.shape[1], slots % cache.shape[1]].contiguous().view(torch.float32)
        return rows.split([self.rank, self.rope_dim], dim=-1)

    value_gain = ExactLatentCodec.value_gain


class NullCodec:
    """The interface of `PagedCodec` without rotation or quantisation."""

    def __init__(self, fmt: Format, head_dim: int, *_unused: object) -> None:
        self.dtype, self.slot_bytes = NULL_DTYPES[fmt.name], fmt.slot_bytes(head_dim)
        self.key = self.value = SimpleNamespace(fmt=fmt, head_dim=head_dim)

    def write(self, cache, slots, key, value, positions=None):
        stored = slots >= 0
        vectors = torch.cat((key, value), dim=-1)[stored].to(self.dtype).contiguous().view(torch.uint8)
        block_size = cache.shape[2]
        cache[slots[stored] // block_size, :, slots[stored] % block_size] = vectors

    def read(self, cache, micro_blocks, positions=None):
        tokens = (micro_blocks[:, None] * MICRO_BLOCK + torch.arange(MICRO_BLOCK, device=micro_blocks.device)).flatten()
        block_size = cache.shape[2]
        vectors = cache[tokens // block_size, :, tokens % block_size].contiguous().view(self.dtype).float()
        return vectors.transpose(0, 1).chunk(2, dim=-1)

    def rotate_query(self, query):
        return query

    def unrotate_output(self, output):
        return output


class NoiseCodec(PagedCodec):
    """Right sizes, right statistics, and nothing of the input."""

    def read(self, cache, micro_blocks, positions=None):
        return tuple(torch.randn_like(x) * x.std() for x in super().read(cache, micro_blocks, positions))


def register_null_format(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make a name of `NULL_DTYPES` a KV-cache dtype of this process."""
    register_format(monkeypatch, NullFormat(name, rotation="none", bits=0))
    monkeypatch.setattr(impl, "PagedCodec", NullCodec)
    monkeypatch.setattr(latent_impl, "LatentCodec", ExactLatentCodec)
    monkeypatch.setattr(sparse_impl, "LatentRowCodec", ExactLatentRowCodec)


def register_format(monkeypatch: pytest.MonkeyPatch, fmt: Format) -> None:
    """Make a format a KV-cache dtype of this process."""
    monkeypatch.setitem(FORMATS, fmt.name, fmt)
    backend.backend_of(fmt.name)
    if registration.cache_config.get_kv_cache_dtype_handler(fmt.name) is None:
        registration.register_format(fmt)


class Float64Codec(PagedCodec):
    """The same bytes; attention over them runs in float64, which hides how a matmul rounds at each shape."""

    def read(self, cache, micro_blocks, positions=None):
        return tuple(x.double() for x in super().read(cache, micro_blocks, positions))

    def rotate_query(self, query):
        return super().rotate_query(query).double()

    def unrotate_output(self, output):
        return super().unrotate_output(output.float())
