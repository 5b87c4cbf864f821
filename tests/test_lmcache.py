"""The serializer for LMCache: bytes, round trips, and what it refuses. Its base classes are LMCache's if installed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import lmcache_interface
import pytest
import torch
from packed_kv import FORMATS, get_codec

lmcache_interface.install()

from packed_kv import lmcache  # noqa: E402

SHAPE = torch.Size([2, 3, 20, 128])


class Memory:
    """Stand-in for LMCache's `MemoryObj`: a flat buffer, cut into groups of layers of equal shape."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors, self.tensor = tensors, tensors[0]

    def get_shapes(self) -> list[torch.Size]:
        return [tensor.shape for tensor in self.tensors]

    def get_tensor(self, group: int) -> torch.Tensor:
        return self.tensors[group]


def chunk(*shapes: torch.Size, dtype: torch.dtype = torch.bfloat16) -> Memory:
    generator = torch.Generator().manual_seed(0)
    return Memory(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))


def serve(source: Memory, dtype: str, head_dim: int = 64) -> tuple[torch.Tensor, Memory]:
    """The chunk's bytes, and what they are read back as."""
    serde = lmcache.create({"dtype": dtype, "head_dim": head_dim, "device": "cpu"})
    size = serde.estimate_serialized_size(SimpleNamespace(shapes=source.get_shapes()))
    packed = torch.full((size,), 0xFF, dtype=torch.uint8)
    result = Memory(*(torch.full_like(x, float("nan")) for x in source.tensors))
    assert serde._serializer.serialize(source, Memory(packed), None) == size
    serde._deserializer.deserialize(Memory(packed), result, None)
    serde.close()
    return packed, result


@pytest.mark.parametrize("name", FORMATS)
def test_vectors_are_those_of_the_codec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache, "TILE", 7)  # the last tile is shorter
    source = chunk(SHAPE)
    packed, result = serve(source, name)
    vectors = [x.reshape(-1, 64) for x in source.tensor]
    codecs = [get_codec(name, 64, role) for role in ("key", "value")]
    expected = torch.cat([codec.encode(x).flatten() for codec, x in zip(codecs, vectors, strict=True)])
    assert torch.equal(packed[lmcache.HEAD_BYTES :], expected)
    assert len(packed) == lmcache.HEAD_BYTES + SHAPE.numel() // 64 * FORMATS[name].vector_bytes(64)
    decoded = [codec.decode(codec.encode(x)) for codec, x in zip(codecs, vectors, strict=True)]
    assert torch.equal(result.tensor, torch.stack(decoded).view(SHAPE).bfloat16())


def test_groups_of_layers_lie_one_behind_the_other() -> None:
    both = chunk(SHAPE, torch.Size([2, 1, 20, 256]), dtype=torch.float16)
    _, result = serve(both, "tq4")
    for x, alone in zip(result.tensors, both.tensors, strict=True):
        assert torch.equal(x, serve(Memory(alone), "tq4")[1].tensor) and x.dtype == torch.float16


@pytest.mark.parametrize(
    ("dtype", "shape", "damaged"),
    [("isoquant4", SHAPE, 0), ("turboquant25", SHAPE, 0), ("tq4", torch.Size([2, 3, 40, 64]), 0), ("tq4", SHAPE, 1)],
    ids=["another rotation", "another width", "another shape", "damaged"],
)
def test_other_bytes_are_refused(dtype: str, shape: torch.Size, damaged: int) -> None:
    """Which LMCache counts as a miss; it stores no name of a serializer in its keys."""
    packed, _ = serve(chunk(SHAPE), "tq4")
    packed[0] ^= damaged
    reader = lmcache.create({"dtype": dtype, "head_dim": 64, "device": "cpu"})
    result = Memory(torch.zeros(shape))
    with pytest.raises(ValueError, match=f"packed_kv: not {dtype} of "):
        reader._deserializer.deserialize(Memory(packed), result, None)
    assert not result.tensor.any()
    reader.close()


def zeros_behind_the_head(packed: torch.Tensor) -> None:
    """Zeros of a file system that lost the end of a write."""
    packed[lmcache.HEAD_BYTES :] = 0


def half(packed: torch.Tensor) -> None:
    packed[len(packed) // 2 :] = 0


def one_bit(packed: torch.Tensor) -> None:
    packed[-1] ^= 1


def checksum(packed: torch.Tensor) -> None:
    packed[lmcache.DIGEST_BYTES] ^= 1


@pytest.mark.parametrize("damage", [zeros_behind_the_head, half, one_bit, checksum], ids=lambda f: f.__name__)
def test_damaged_bytes_are_refused(damage: Callable[[torch.Tensor], None]) -> None:
    """Wherever the damage is, before a chunk is changed."""
    packed, _ = serve(chunk(SHAPE), "tq4")
    damage(packed)
    reader = lmcache.create({"dtype": "tq4", "head_dim": 64, "device": "cpu"})
    result = Memory(torch.zeros(SHAPE))
    with pytest.raises(ValueError, match=f"a chunk of {len(packed)} bytes is damaged"):
        reader._deserializer.deserialize(Memory(packed), result, None)
    assert not result.tensor.any()
    reader.close()


def test_what_lies_behind_a_chunk_does_not_count() -> None:
    """LMCache's buffers may be longer than what is written."""
    vectors, source = lmcache.PackedVectors("tq4", 64, "cpu"), chunk(SHAPE).tensor
    end = vectors.size([SHAPE])
    buffer, result = torch.zeros(end + 100, dtype=torch.uint8), torch.empty_like(source)
    assert vectors.pack([source], buffer) == end
    buffer[end:] = 7
    vectors.unpack(buffer, [result])
    assert result.any()


@pytest.mark.parametrize("shape", [(3, 20, 128), (1, 3, 20, 128), (2, 3, 20, 96)], ids=str)
def test_shapes_that_are_refused(shape: tuple[int, ...]) -> None:
    serde = lmcache.create({"dtype": "tq4", "head_dim": 64})
    with pytest.raises(ValueError, match="set head_dim, or use another serde"):
        serde.estimate_serialized_size(SimpleNamespace(shapes=[torch.Size(shape)]))
    serde.close()


@pytest.mark.parametrize(
    ("shape", "head_dim"),
    [((2, 3, 0, 128), 64), ((2, 0, 20, 128), 64), ((2, 1, 1, 64), 64), ((2, 3, 5, 160), 80), ((2, 3, 5, 576), 576)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_odd_shapes_and_dtypes(shape: tuple[int, ...], head_dim: int, dtype: torch.dtype) -> None:
    """No token, no layer, one vector, padded and large heads; numbers of 32 and 8 bits."""
    source = chunk(torch.Size(shape), dtype=dtype)
    packed, result = serve(source, "tq4", head_dim)
    codecs = [get_codec("tq4", head_dim, role) for role in ("key", "value")]
    vectors = [x.reshape(-1, head_dim) for x in source.tensor]
    assert len(packed) == lmcache.HEAD_BYTES + sum(map(len, vectors)) * codecs[0].vector_bytes
    decoded = [codec.decode(codec.encode(x)).to(dtype) for codec, x in zip(codecs, vectors, strict=True)]
    assert torch.equal(result.tensor.float(), torch.stack(decoded).view(shape).float())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(SHAPE, dtype=torch.uint8), "a chunk of torch.uint8 holds codes"),
        (torch.ones(SHAPE, dtype=torch.int8), "a chunk of torch.int8 holds codes"),
        (torch.ones(2, 20, 3, 128).transpose(1, 2), "it must be contiguous"),
    ],
    ids=["an fp8 cache", "int8", "strides"],
)
def test_chunks_that_are_refused(tensor: torch.Tensor, message: str) -> None:
    """Before a byte is written: the bytes of an fp8 cache are no numbers, and what is not contiguous has no view."""
    vectors = lmcache.PackedVectors("tq4", 64, "cpu")
    buffer, before = torch.zeros(vectors.size([SHAPE]), dtype=torch.uint8), tensor.clone()
    with pytest.raises(ValueError, match=message):
        vectors.pack([tensor], buffer)
    assert not buffer.any()
    with pytest.raises(ValueError, match=message):
        vectors.unpack(buffer, [tensor])
    assert torch.equal(tensor, before)


def test_a_buffer_that_is_too_small() -> None:
    vectors = lmcache.PackedVectors("tq4", 64, "cpu")
    with pytest.raises(ValueError, match="do not fit into a buffer of 99"):
        vectors.pack([chunk(SHAPE).tensor], torch.zeros(99, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 64}, "dtype is missing"),
        ({"dtype": "tq4"}, "head_dim is missing"),
        ({"dtype": "tq4", "head_dim": 0}, "head_dim is 0; use a whole number"),
        ({"dtype": "tq4", "head_dim": 64, "max_workers": "2"}, "max_workers is '2'"),
        ({"dtype": "tq5", "head_dim": 64}, "unknown KV-cache dtype 'tq5'"),
        ({"dtype": "tq4", "head_dim": 64, "bits": 4}, "unknown option 'bits'"),
    ],
    ids=lambda value: str(value),
)
def test_options_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lmcache.create(options)


def test_the_registry_takes_it_once() -> None:
    lmcache.register()
    with pytest.raises(ValueError, match="already registered"):
        lmcache.register()
