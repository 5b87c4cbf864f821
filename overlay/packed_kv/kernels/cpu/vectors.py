"""Pack and read vectors outside of pages on a CPU, as `Codec.encode` has them: the host side of `pages/vectors.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from ...codecs.pages import PagedCodec
from .build import Program
from .compiler import Target
from .layer import ELEMENT_TYPES, EXACT, Int, Layer, Pointer, function_of, layer_of, load_for


class _Tensor(ctypes.Structure):
    """`struct Tensor` of pages/vectors.cpp."""

    _fields_ = (("data", Pointer), ("stride", ctypes.c_int64 * 3))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        """tensor: [sequences, KV heads, tokens, any], the last dimension contiguous."""
        assert tensor.stride(3) == 1 or tensor.shape[3] == 1 or not tensor.numel(), tensor.stride()
        return cls(tensor.data_ptr(), tensor.stride()[:3])


class _Vectors(ctypes.Structure):
    """`struct Vectors` of pages/vectors.cpp."""

    _fields_ = (
        ("layer", ctypes.POINTER(Layer)),
        ("vectors", _Tensor),
        ("packed", _Tensor),
        ("codes", _Tensor),
        ("scales", _Tensor),
        ("positions", Pointer),
        ("positions_stride", ctypes.c_int64),
        ("sequences", Int),
        ("heads", Int),
        ("tokens", Int),
        ("recent", Int),
        ("role", Int),
        ("reads", Int),
        ("dtype", Int),
        ("threads", Int),
    )


PROGRAM = Program("pages/vectors.cpp", EXACT)


class CpuVectors:
    """Packs and reads keys (0) or values (1) of a layer: bytes equal to `Codec.encode` and `codecs.ring.quantize`,
    numbers equal to `Codec.decode` and `Codec.restore`, rounded once.

    Args:
        codec: of the layer.
        target: None: the best of this processor.

    Raises:
        BuildError: `pages/vectors.cpp` cannot be compiled.
        ValueError: the codec is not served: see `cpp_lacks`.
    """

    def __init__(self, codec: PagedCodec, *, target: Target | None = None) -> None:
        self.layer, self.codec, self.target = layer_of(codec), codec, target
        self.function = function_of(load_for(PROGRAM, codec, target), "pk_vectors", _Vectors)

    def __reduce__(self) -> tuple[Callable[[PagedCodec], CpuVectors], tuple[PagedCodec]]:
        """Copies and pickles are bound again: addresses in `layer` are those of this codec's tensors."""
        return partial(CpuVectors, target=self.target), (self.codec,)

    def encode(self, role: int, x: torch.Tensor, positions: torch.Tensor, recent: int) -> tuple[torch.Tensor, ...]:
        """Pack vectors.

        Args:
            role: 0: keys, 1: values.
            x: fp32, bf16 or fp16 [sequences, KV heads, tokens, head_dim].
            positions: int64 [sequences, tokens], of each in its sequence.
            recent: how many of the last tokens are packed at 8 bits as well.

        Returns:
            packed uint8 [sequences, KV heads, tokens, vector_bytes]; for the last `recent` tokens codes int8 [..,
            stored_dim] and scales uint8 [.., stored_dim / 32].
        """
        codec = self.codec.codecs[role]
        rows, (count, recent) = x.shape[:2], (x.shape[2], min(recent, x.shape[2]))
        packed = torch.empty((*rows, count, codec.vector_bytes), dtype=torch.uint8)
        codes = torch.empty((*rows, recent, codec.stored_dim), dtype=torch.int8)
        scales = torch.empty((*rows, recent, len(codec.group_bits)), dtype=torch.uint8)
        self._call(role, x if x.stride(3) == 1 else x.contiguous(), packed, codes, scales, positions, reads=False)
        return packed, codes, scales

    def decode(
        self, role: int, packed: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, positions: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Read vectors that `encode` returned, or any later tokens of them; the last tokens are read at 8 bits. Returns
        [sequences, KV heads, tokens, head_dim] of `dtype`: fp32, bf16 or fp16."""
        x = torch.empty((*packed.shape[:3], self.codec.codecs[role].head_dim), dtype=dtype)
        self._call(role, x, packed, codes, scales, positions, reads=True)
        return x

    def _call(
        self, role: int, x: torch.Tensor, packed: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor,
        positions: torch.Tensor, *, reads: bool,
    ) -> None:  # fmt: skip
        codec = self.codec.codecs[role]
        assert x.shape[:3] == packed.shape[:3] and x.shape[3] == codec.head_dim, (x.shape, packed.shape)
        assert codec.heads in (None, x.shape[1]), (codec.heads, x.shape)
        assert positions.shape == (x.shape[0], x.shape[2]) and positions.dtype == torch.int64, positions.shape
        if role == 0:
            self.layer.grow_means(self.codec, positions)
        positions = positions.contiguous()
        call = _Vectors(
            layer=ctypes.pointer(self.layer), vectors=_Tensor.of(x), packed=_Tensor.of(packed),
            codes=_Tensor.of(codes), scales=_Tensor.of(scales), positions=positions.data_ptr(),
            positions_stride=positions.shape[1], sequences=x.shape[0], heads=x.shape[1], tokens=x.shape[2],
            recent=codes.shape[2], role=role, reads=reads, dtype=ELEMENT_TYPES[x.dtype],
            threads=torch.get_num_threads(),
        )  # fmt: skip
        if x.numel():
            self.function(call)
