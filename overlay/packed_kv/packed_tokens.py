"""The tokens of one layer of a batch of sequences, packed as in the engine's pages: memory of `transformers.py`.

A micro-block of 16 tokens is a page of its own, and a sequence's micro-blocks follow one another. The newest tokens lie
once more in a ring (`codecs/ring.py`). On a CPU the C++ library stores and reads (`kernels/cpu`); on other devices, and
where it cannot, PyTorch does (`codecs/pages.py`): the same bytes.

A batch's tokens are columns. A sequence begins at a column of its own, behind padding, which is not stored and read as
zeros; positions count from there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from .codecs import ring
from .codecs.pages import PagedCodec
from .kernels.cpu import gather, store, tables
from .kernels.cpu.compiler import BuildError
from .layout import MICRO_BLOCK, ring_slot_bytes

TILE = 1024
"""Tokens that PyTorch unpacks at a time, through fp32; a multiple of 16."""

logger = logging.getLogger(__name__)


class Library:
    """The C++ library's functions for the layer of a codec. Raises BuildError."""

    def __init__(self, codec: PagedCodec) -> None:
        self.codec, self.store, self.gather = codec, store.CpuStore(codec), gather.CpuGather(codec)

    def __reduce__(self) -> tuple[Callable[[PagedCodec], Library | None], tuple[PagedCodec]]:
        """Copies are made anew: what is held here has addresses."""
        return library_for, (self.codec,)


def library_for(codec: PagedCodec) -> Library | None:
    """Return the library for a layer, or None where PyTorch is to store and read; on a CPU the log says why."""
    if codec.key.device.type != "cpu":
        return None
    fmt, head_dim = codec.key.fmt, codec.key.head_dim
    if refused := tables.refusal(fmt, head_dim):
        warn_of_pytorch(f"{fmt.name}: the C++ library does not serve {refused}")
    elif (reason := reason_against_libraries()) is not None:
        warn_of_pytorch(reason)
    else:
        return Library(codec)
    return None


@functools.cache
def reason_against_libraries() -> str | None:
    """Compile the library unless that was done; return why it cannot be, or None. Asked once a process."""
    try:
        store.load()
        gather.load()
    except BuildError as error:
        return str(error)
    return None


@functools.cache
def warn_of_pytorch(reason: str) -> None:
    """Log, once a process, that PyTorch stores and reads."""
    logger.warning("PackedCache stores and reads in PyTorch, a decode step takes about 4 times as long: %s", reason)


class Blocks:
    """Memory uint8 [sequences, blocks, KV heads, tokens of a block, bytes] whose blocks come at the end and go at both
    ends. `first`: the number of the block that it begins with.

    It has room for up to an eighth more, so a block is copied about 8 times in all, however many follow it.
    """

    def __init__(self, sequences: int, heads: int, tokens: int, width: int, device: torch.device) -> None:
        self.memory = torch.zeros((sequences, 0, heads, tokens, width), dtype=torch.uint8, device=device)
        self.first = 0

    @property
    def pages(self) -> torch.Tensor:
        """All as pages, [sequences * blocks, KV heads, tokens of a block, bytes]."""
        return self.memory.flatten(0, 1)

    def reserve(self, first: int, end: int, most: int | None = None) -> None:
        """Hold the blocks `first` .. `end` - 1 in memory for `most` at most: move if this is too small, or larger than
        it should be by more than one block, as a window may need one more or less."""
        room = self.memory.shape[1]
        if end - self.first <= room <= max(end - first, _with_room(end - first + 1)):
            return
        size = _with_room(end - first)
        held = self.memory[:, first - self.first :]
        sequences, count = held.shape[:2]
        self.memory = held.new_zeros((sequences, size if most is None else min(size, most), *held.shape[2:]))
        count = min(count, self.memory.shape[1])
        self.memory[:, :count] = held[:, :count]
        self.first = first


def _with_room(count: int) -> int:
    return count + count // 8


class PackedTokens:
    """Keys and values of one layer.

    Args:
        codec: of the layer.
        heads: KV heads.
        starts: int64 [sequences], the column of each one's first token.
        recent: newest tokens of a sequence that are read at 8 bits.
    """

    def __init__(self, codec: PagedCodec, heads: int, starts: torch.Tensor, recent: int) -> None:
        self.codec, self.recent, self.library = codec, recent, library_for(codec)
        self.slot_bytes, self.recent_bytes = codec.slot_bytes, ring_slot_bytes(codec.key.head_dim)
        device = starts.device
        self.pages = Blocks(len(starts), heads, MICRO_BLOCK, self.slot_bytes, device)
        self.ring = Blocks(len(starts), heads, 1, self.recent_bytes, device)
        """A token's block is its position modulo `recent`."""
        self.first = self.first_recent = self.end = 0
        """Columns: the first one held, the first one in the ring, and that behind the last one."""
        self._set_starts(starts)

    def _set_starts(self, starts: torch.Tensor) -> None:
        self.starts, self.start_of = starts[:, None], starts.tolist()
        self.is_padded = any(self.start_of)
        self.shift_of = [-(-start // MICRO_BLOCK) * MICRO_BLOCK for start in self.start_of]
        """Slot of position 0, so that a micro-block's positions begin at a multiple of 16."""
        self.lead = max((shift - start for shift, start in zip(self.shift_of, self.start_of, strict=True)), default=0)
        self.shifts = torch.tensor(self.shift_of, device=starts.device)[:, None]
        self.rows = torch.arange(len(starts), device=starts.device)[:, None]

    @property
    def held(self) -> int:
        """Columns that are held."""
        return self.end - self.first

    @property
    def nbytes(self) -> int:
        """Bytes of all packed tokens and of the recent ones, padding included."""
        sequences, _, heads, *_ = self.pages.memory.shape
        recent = self.end - self.first_recent
        return sequences * heads * (self.held * self.slot_bytes + recent * self.recent_bytes)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store tokens [sequences, KV heads, tokens, head_dim]."""
        start, self.end = self.end, self.end + key.shape[2]
        self.first_recent = max(self.first_recent, self.end - self.recent)
        self._reserve()
        self._reserve_means()
        positions = self._positions(start, self.end)
        slots = positions + (self.shifts - MICRO_BLOCK * self.pages.first)
        slots = slots + self.rows * (MICRO_BLOCK * self.pages.memory.shape[1])
        ring_slots = None
        if self.recent:
            ring_slots = (positions % self.recent + self.rows * self.ring.memory.shape[1]).to(torch.int32)
            ring_slots[:, : max(0, self.first_recent - start)] = -1
        if self.is_padded:
            slots = torch.where(positions < 0, -1, slots)
            ring_slots = None if ring_slots is None else torch.where(positions < 0, -1, ring_slots)
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        flat_ring_slots = None if ring_slots is None else ring_slots.flatten()
        self._write(key, value, slots.flatten(), positions.flatten(), flat_ring_slots)

    def _write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        ring_slots: torch.Tensor | None,
    ) -> None:
        """Store tokens [tokens, KV heads, head_dim] at slots of `Blocks.pages`; those below 0 are skipped."""
        if self.library is None:
            self.codec.write(self.pages.pages, slots, key, value, positions)
            if ring_slots is not None:
                kept = ring_slots >= 0
                recent = self.codec.prepare(key[kept], value[kept], positions[kept])
                ring.write(self.ring.pages, ring_slots[kept], *recent)
            return
        if key.dtype != value.dtype or key.dtype not in tables.ELEMENT_TYPES:
            key, value = key.float(), value.float()
        key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
        held = None if ring_slots is None else self.ring.pages
        self.library.store(self.pages.pages, key, value, slots, positions, held, ring_slots)

    def read(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is held, [sequences, KV heads, tokens, head_dim] of K and V."""
        if self.library is None:
            return self._read_by_torch(dtype)
        if dtype not in tables.ELEMENT_TYPES:
            key, value = self._read_by(self.library, torch.float32)
            return key.to(dtype), value.to(dtype)
        return self._read_by(self.library, dtype)

    def _read_by(self, library: Library, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """From the beginning of the first token's micro-block on, of which the tokens before it are cut off."""
        left = max(0, self.first - (MICRO_BLOCK - 1))
        key, value = self._empty(self.end - left, dtype)
        blocks = torch.arange(-(-self.end // MICRO_BLOCK), dtype=torch.int32) - self.pages.first
        recent_at = torch.arange(self.end, dtype=torch.int32)[None] % self.recent if self.recent else None
        for row, (start, shift) in enumerate(zip(self.start_of, self.shift_of, strict=True)):
            first = max(0, self.first - start) // MICRO_BLOCK * MICRO_BLOCK
            for x in (key, value):
                x[row, :, : max(0, start - left)] = 0
            if first + start >= self.end:
                continue
            recent, recent_from = None, max(0, self.first_recent - start)
            if recent_at is not None:
                held = torch.tensor([recent_from], dtype=torch.int32)
                recent = ring.Ring(self.ring.memory[row], recent_at, held, self.recent)
            table = blocks + shift // MICRO_BLOCK if shift else blocks
            to_key, to_value = (x[row, :, first + start - left :].transpose(0, 1) for x in (key, value))
            page = self.pages.memory[row]
            library.gather(page, table, first, self.end - start, to_key, to_value, recent, recent_from)
        return key[:, :, self.first - left :], value[:, :, self.first - left :]

    def _read_by_torch(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._empty(self.held, dtype)
        for start in range(self.first, self.first_recent, TILE):
            self._restore(found, start, *self._stored(start, min(start + TILE, self.first_recent)))
        if self.first_recent < self.end:
            positions = self._positions(self.first_recent, self.end)
            slots = positions.clamp(min=0) % self.recent + self.rows * self.ring.memory.shape[1]
            rotated = ring.read(self.ring.pages, slots.flatten())
            self._restore(found, self.first_recent, *(x.unflatten(0, slots.shape) for x in rotated))
        if self.is_padded:
            padding = (self._positions(self.first, self.end) < 0)[:, None, :, None]
            for x in found:
                x.masked_fill_(padding, 0)
        return found

    def _stored(self, start: int, end: int) -> list[torch.Tensor]:
        """Columns `start` .. `end` - 1, rotated, fp32 [sequences, tokens, KV heads, stored_dim] of K and V."""
        first, last = start // MICRO_BLOCK, -(-(end + self.lead) // MICRO_BLOCK)
        blocks = torch.arange(first, last, device=self.starts.device) - self.pages.first
        numbers = blocks + self.rows * self.pages.memory.shape[1]
        rotated = self.codec.read(self.pages.pages, numbers.flatten())
        whole = [x.unflatten(1, (len(self.rows), -1)).permute(1, 2, 0, 3) for x in rotated]
        if not self.is_padded:
            return [x[:, start - first * MICRO_BLOCK : end - first * MICRO_BLOCK] for x in whole]
        at = self._positions(start, end) + (self.shifts - first * MICRO_BLOCK)
        return [x[self.rows, at] for x in whole]

    def _restore(self, found: tuple[torch.Tensor, ...], column: int, *rotated: torch.Tensor) -> None:
        """Fill in tokens from `column` on, as the model made them."""
        for to, x, codec in zip(found, rotated, self.codec.codecs, strict=True):
            positions = self._positions(column, column + x.shape[1]).unsqueeze(-1)
            at = column - self.first
            to[:, :, at : at + x.shape[1]] = codec.restore(x, positions).transpose(1, 2)

    def keep_last(self, count: int) -> None:
        """Drop all but the newest tokens; up to 15 more stay, as micro-blocks go whole."""
        self.first = max(self.first, self.end - count)
        self.first_recent = max(self.first_recent, self.first)
        self._reserve()

    def remove_last(self, count: int) -> None:
        """Remove the newest tokens."""
        self.end = max(self.first, self.end - count)
        self.first_recent = min(self.first_recent, self.end)
        self._reserve()

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace what sequences have by `change` of it, in memory of its own."""
        for blocks in (self.pages, self.ring):
            blocks.memory = change(blocks.memory)
        self._set_starts(change(self.starts[:, 0]))

    def _reserve(self) -> None:
        self.pages.reserve(self.first // MICRO_BLOCK, -(-(self.end + self.lead) // MICRO_BLOCK))
        self.ring.reserve(0, min(self.recent, self.end), self.recent)

    def _reserve_means(self) -> None:
        """Have means of keys for all positions: the library has the address of a table, which PyTorch's code lets grow
        as positions come."""
        transform = self.codec.key.transform
        if self.library and transform.grows and self.end >= transform.mean_blocks * transform.block_tokens:
            transform.means(torch.tensor([self.end]))
            self.library = Library(self.codec)

    def _positions(self, start: int, end: int) -> torch.Tensor:
        """int64 [sequences, columns], of the columns `start` .. `end` - 1 in their sequences; below 0: padding."""
        return torch.arange(start, end, device=self.starts.device) - self.starts

    def _empty(self, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, to be filled."""
        sequences, _, heads, *_ = self.pages.memory.shape
        key, value = (
            torch.empty((sequences, heads, tokens, codec.head_dim), dtype=dtype, device=self.starts.device)
            for codec in self.codec.codecs
        )
        return key, value
