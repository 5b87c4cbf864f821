"""Packed keys or values of a layer outside of vLLM, for `PackedCache` (`transformers.py`), in tensors that grow by
tokens. On a CPU kernels in C++ pack and unpack (`kernels/cpu/vectors.py`), elsewhere, or without a compiler, PyTorch
does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .codecs import ring
from .kernels.cpu.vectors import CpuVectors

if TYPE_CHECKING:
    from .codecs import Codec

TILE = 1024
"""Tokens that are unpacked at a time in PyTorch, through fp32."""


class Tokens:
    """A tensor [sequences, KV heads, tokens, width]; tokens are appended at its end and removed at both ends.

    Its memory has room for up to an eighth more, so a token is copied about 8 times in all, however many follow it.
    """

    def __init__(self, held: torch.Tensor) -> None:
        self.memory, self.start, self.end = held, 0, held.shape[2]

    @property
    def held(self) -> torch.Tensor:
        return self.memory[:, :, self.start : self.end]

    def append(self, x: torch.Tensor) -> None:
        if self.end + x.shape[2] > self.memory.shape[2]:
            self._move(self.end - self.start + x.shape[2])
        self.memory[:, :, self.end : self.end + x.shape[2]] = x
        self.end += x.shape[2]

    def keep_last(self, count: int) -> None:
        self.start = max(self.start, self.end - count)
        self._give_back()

    def remove_last(self, count: int) -> None:
        self.end = max(self.start, self.end - count)
        self._give_back()

    def _give_back(self) -> None:
        """Move to smaller memory if this has more room than it should."""
        tokens = self.end - self.start
        if self.memory.shape[2] > _with_room(tokens):
            self._move(tokens)

    def _move(self, tokens: int) -> None:
        """Move the contents to memory for at least `tokens` tokens."""
        held = self.held
        sequences, heads, count, width = held.shape
        self.memory = held.new_empty((sequences, heads, _with_room(tokens), width))
        self.memory[:, :, :count] = held
        self.start, self.end = 0, count


def _with_room(tokens: int) -> int:
    return tokens + tokens // 8


class PackedVectors:
    """The keys or the values of a layer.

    `packed`: uint8 [sequences, KV heads, tokens, vector_bytes], all tokens. `codes`, `scales`: the newest ones in a
    ring's form, int8 [.., stored_dim] and uint8 [.., stored_dim / 32].
    """

    def __init__(self, codec: Codec, sequences: int, heads: int, kernel: CpuVectors | None) -> None:
        """`kernel`: of the layer; None: PyTorch packs and unpacks."""

        def empty(dtype: torch.dtype, width: int) -> Tokens:
            return Tokens(torch.empty((sequences, heads, 0, width), dtype=dtype, device=codec.device))

        self.codec, self.kernel, self.role = codec, kernel, int(codec.role == "value")
        self.packed = empty(torch.uint8, codec.vector_bytes)
        self.codes = empty(torch.int8, codec.stored_dim)
        self.scales = empty(torch.uint8, len(codec.group_bits))

    def append(self, x: torch.Tensor, positions: torch.Tensor, recent: int) -> None:
        """Tokens [sequences, KV heads, tokens, head_dim], the last `recent` twice; `positions`: see `read`."""
        newest: Sequence[torch.Tensor]
        if self.kernel is not None:
            packed, *newest = self.kernel.encode(self.role, x, positions.squeeze(-1), recent)
        else:
            x = x.transpose(1, 2)
            packed, newest = self.codec.encode(x, positions).transpose(1, 2), ()
            if recent:
                rotated = self.codec.prepare(x[:, -recent:], positions[:, -recent:])
                newest = tuple(part.transpose(1, 2) for part in ring.quantize(rotated))
        self.packed.append(packed)
        if recent:
            for kept, new in zip((self.codes, self.scales), newest, strict=True):
                kept.append(new)
                kept.keep_last(recent)

    def read(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """All tokens, [sequences, KV heads, tokens, head_dim]; `positions`: int64 [sequences, tokens, 1], of each in
        its sequence."""
        codec, packed = self.codec, self.packed.held
        if self.kernel is not None:
            newest = self.codes.held, self.scales.held
            return self.kernel.decode(self.role, packed, *newest, positions.squeeze(-1), dtype)
        older = self.tokens - self.codes.held.shape[2]
        found = torch.empty((*packed.shape[:3], codec.head_dim), dtype=dtype, device=codec.device)
        for start in range(0, older, TILE):
            part = slice(start, min(start + TILE, older))
            found[:, :, part] = codec.decode(packed[:, :, part].transpose(1, 2), positions[:, part]).transpose(1, 2)
        recent = ring.dequantize(self.codes.held, self.scales.held).transpose(1, 2)
        found[:, :, older:] = codec.restore(recent, positions[:, older:]).transpose(1, 2)
        return found

    @property
    def tokens(self) -> int:
        return self.packed.held.shape[2]

    def all(self) -> tuple[Tokens, ...]:
        return self.packed, self.codes, self.scales

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor by `change(tensor)`, in memory of its own."""
        self.packed, self.codes, self.scales = (Tokens(change(tokens.held)) for tokens in self.all())
