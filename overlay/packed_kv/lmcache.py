"""Packed vectors in the storage of LMCache's multiprocess server: a serializer, `packed_kv`, for its L2 adapters.

    python -m packed_kv.lmcache server --l2-adapter '{"type": "fs", "base_path": "/cache", "serde":
        {"type": "packed_kv", "dtype": "tq4", "head_dim": 128}}' ...

is the command `lmcache` with the serializer in its registry. vLLM need not be patched: it keeps its cache in 16 bits.
Only data that leave the server's memory for disk or a remote store are packed, without calibration and without a recent
window.

Serialized bytes are

    | digest of dtype, channels and shapes, 28 bytes | CRC-32 of what follows, 4 bytes, little-endian |
    | K and V of each group of layers, [layers, tokens, KV heads, vector_bytes], as `Codec.encode` packs them |

Bytes with another digest or checksum are refused, which LMCache counts as a miss.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj

from .codecs import get_codec
from .codecs.codec import Codec
from .formats import FORMAT_VERSION

NAME = "packed_kv"
DIGEST_BYTES = 28
HEAD_BYTES = DIGEST_BYTES + 4
"""Bytes in front of the vectors: a digest and a checksum."""
TILE = 1 << 16
"""Vectors that are packed at a time, through fp32."""
OPTIONS = {"dtype", "head_dim", "device", "max_workers"}


class PackedVectors:
    """K and V of chunks [2, layers, tokens, KV heads * head_dim], packed.

    Args:
        dtype: of `FORMATS`.
        head_dim: channels of a head, which LMCache's shapes do not tell.
        device: packs and unpacks; a GPU gets the chunk over the bus.

    Raises ValueError for another name or number of channels.
    """

    def __init__(self, dtype: str, head_dim: int, device: torch.device | str) -> None:
        self.dtype, self.head_dim, self.device = dtype, head_dim, torch.device(device)
        self.codecs = [get_codec(dtype, head_dim, role, device=self.device) for role in ("key", "value")]

    def size(self, shapes: Sequence[torch.Size]) -> int:
        """Return the bytes of chunks of these shapes. Raises ValueError for shapes that cannot be packed."""
        vectors = sum(self._vectors(shape) for shape in shapes)
        return HEAD_BYTES + vectors * self.codecs[0].vector_bytes

    def digest(self, shapes: Sequence[torch.Size]) -> bytes:
        """Return the digest that bytes of these shapes begin with."""
        written = ("with a checksum", FORMAT_VERSION, self.dtype, self.head_dim, [tuple(shape) for shape in shapes])
        return hashlib.sha256(repr(written).encode()).digest()[:DIGEST_BYTES]

    def pack(self, chunks: Sequence[torch.Tensor], target: torch.Tensor) -> int:
        """Fill `target`, uint8 [bytes], from the groups' chunks. Returns the bytes written. Raises ValueError."""
        shapes = self._shapes(chunks)
        end = self.size(shapes)
        if len(target) < end:
            raise ValueError(f"{NAME}: {end} bytes do not fit into a buffer of {len(target)}")
        for codec, packed, vectors in self._tiles(target, [chunk.reshape(2, -1, self.head_dim) for chunk in chunks]):
            packed.copy_(codec.encode(vectors.to(self.device)))
        head = self.digest(shapes) + _checksum(target[HEAD_BYTES:end])
        target[:HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return end

    def unpack(self, source: torch.Tensor, chunks: Sequence[torch.Tensor]) -> None:
        """Fill the groups' chunks from `source`, uint8 [bytes]. Raises ValueError if it holds something else or is
        damaged, before a chunk is changed."""
        shapes = self._shapes(chunks)
        end = self.size(shapes)
        head = bytes(source[:HEAD_BYTES].tolist())
        if len(source) < end or head[:DIGEST_BYTES] != self.digest(shapes):
            raise ValueError(
                f"{NAME}: not {self.dtype} of {[tuple(shape) for shape in shapes]} and {self.head_dim} channels; give "
                "each dtype a folder of its own"
            )
        if head[DIGEST_BYTES:] != _checksum(source[HEAD_BYTES:end]):
            raise ValueError(
                f"{NAME}: a chunk of {end} bytes is damaged (its checksum is another); delete it, as LMCache does not "
                "write it again"
            )
        for codec, packed, vectors in self._tiles(source, [chunk.view(2, -1, self.head_dim) for chunk in chunks]):
            vectors.copy_(codec.decode(packed.to(self.device)))

    def _tiles(
        self, buffer: torch.Tensor, chunks: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Codec, torch.Tensor, torch.Tensor]]:
        """Codec, bytes in `buffer` [vectors, bytes] and vectors [vectors, head_dim] of up to `TILE` vectors at a time,
        of chunks [2, vectors, head_dim] in order."""
        at = HEAD_BYTES
        for chunk in chunks:
            for codec, vectors in zip(self.codecs, chunk, strict=True):
                packed = buffer[at : at + len(vectors) * codec.vector_bytes].view(-1, codec.vector_bytes)
                for rows, part in zip(packed.split(TILE), vectors.split(TILE), strict=True):
                    yield codec, rows, part
                at += packed.numel()

    @staticmethod
    def _shapes(chunks: Sequence[torch.Tensor]) -> list[torch.Size]:
        """Shapes of chunks whose memory is contiguous. Raises ValueError for other chunks."""
        for chunk in chunks:
            if not chunk.is_floating_point():
                raise ValueError(
                    f"{NAME}: a chunk of {chunk.dtype} holds codes, as an fp8 or packed KV cache has them, and no "
                    'numbers to pack; leave out "serde", or serve with --kv-cache-dtype auto'
                )
            if not chunk.is_contiguous():
                raise ValueError(
                    f"{NAME}: a chunk of shape {tuple(chunk.shape)} has strides {chunk.stride()}; it must be contiguous"
                )
        return [chunk.shape for chunk in chunks]

    def _vectors(self, shape: torch.Size) -> int:
        if len(shape) != 4 or shape[0] != 2 or shape[3] % self.head_dim:
            raise ValueError(
                f"{NAME}: a chunk of shape {tuple(shape)} is not [2, layers, tokens, heads * {self.head_dim}]; set "
                "head_dim, or use another serde for latent attention, which has one plane"
            )
        return shape.numel() // self.head_dim


def _checksum(content: torch.Tensor) -> bytes:
    """CRC-32 of bytes, uint8, as 4 bytes."""
    return zlib.crc32(content.cpu().numpy().data).to_bytes(4, "little")


class PackedSerializer(Serializer):
    """Packs chunks; see LMCache's base class."""

    def __init__(self, vectors: PackedVectors) -> None:
        self.vectors = vectors

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        return self.vectors.pack(_tensors(src), _bytes(dst))

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        return self.vectors.size(layout_desc.shapes)


class PackedDeserializer(Deserializer):
    """Unpacks chunks; see LMCache's base class."""

    def __init__(self, vectors: PackedVectors) -> None:
        self.vectors = vectors

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        self.vectors.unpack(_bytes(src), _tensors(dst))


def _tensors(chunk: MemoryObj) -> list[torch.Tensor]:
    """One codec per group of layers of equal shape."""
    tensors = [chunk.get_tensor(group) for group in range(len(chunk.get_shapes()))]
    if any(tensor is None for tensor in tensors):
        raise ValueError(f"{NAME}: a chunk without memory")
    return tensors


def _bytes(buffer: MemoryObj) -> torch.Tensor:
    tensor = buffer.tensor
    if tensor is None:
        raise ValueError(f"{NAME}: a buffer without memory")
    return tensor.view(torch.uint8).flatten()


def create(options: dict[str, Any]) -> SerdeProcessor:
    """Return the serializer for a `"serde"` of LMCache's configuration, without its type.

    Args:
        options: `dtype` and `head_dim`; `device`, by default a GPU where there is one; `max_workers`, chunks at a time
            (1).

    Raises ValueError for other options, and for invalid values.
    """
    if unknown := set(options) - OPTIONS:
        raise ValueError(f"{NAME}: unknown option {min(unknown)!r}; known: {', '.join(sorted(OPTIONS))}")
    if missing := {"dtype", "head_dim"} - set(options):
        raise ValueError(f'{NAME}: {min(missing)} is missing; for example "dtype": "tq4", "head_dim": 128')
    numbers = {"head_dim": options["head_dim"], "max_workers": options.get("max_workers", 1)}
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{NAME}: {name} is {number!r}; use a whole number from 1 on")
    device = options.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    vectors = PackedVectors(str(options["dtype"]), numbers["head_dim"], device)
    return AsyncSerdeProcessor(PackedSerializer(vectors), PackedDeserializer(vectors), numbers["max_workers"])


def register() -> None:
    """Add the serializer to LMCache's registry, once per process."""
    register_serde_factory(NAME, create)


if __name__ == "__main__":
    from lmcache.cli.main import main

    register()
    main(sys.argv[1:])
