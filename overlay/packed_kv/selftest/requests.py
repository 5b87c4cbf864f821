"""Requests of one layer of the self-test: their tokens, and the slots that a scheduler would give them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from ..layout import MICRO_BLOCK
from ..window.slots import fill_slots

BLOCK, RING_BLOCK = 32, 8
"""Tokens of a block of pages, and of a ring block."""
POISON = 0xFF
"""Byte that pages and rings hold before anything is stored: scales of the largest numbers."""


@dataclass(frozen=True)
class LayerShape:
    """Heads of a layer, channels of one, tokens of the recent window (0: none), query tokens of its longest decode,
    drafts included, and whether its decode kernel, if it can, reads prefixes of chunks."""

    head_dim: int
    kv_heads: int
    group: int
    window: int
    longest: int = 1
    has_passes: bool = False

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    def __str__(self) -> str:
        return f"{self.query_heads}/{self.kv_heads} heads of {self.head_dim}, window {self.window}"


def ring_blocks(shape: LayerShape) -> int:
    """Ring blocks of a request, as in `RingSpec`."""
    return -(-(shape.window + shape.longest) // RING_BLOCK) + 1


@dataclass(frozen=True)
class RequestBatch:
    """A step's requests, the decodes first.

    `requests`: their numbers. `starts`: first row of each, and the end of the last. `lengths`: tokens of each, the
    step's included. `decodes`: requests of up to `LayerShape.longest` rows. On the device: `block_table` and
    `ring_table` int32 [requests, blocks], `slots` and `positions` int64 [rows].
    """

    requests: tuple[int, ...]
    starts: list[int]
    lengths: list[int]
    decodes: int
    block_table: torch.Tensor
    ring_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor

    @property
    def longest(self) -> int:
        """Most rows of a decode."""
        return max((self.starts[i + 1] - self.starts[i] for i in range(self.decodes)), default=0)

    def rows(self, index: int) -> slice:
        return slice(self.starts[index], self.starts[index + 1])

    def bounds(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return `starts` and `lengths`, int32 [requests + 1] and [requests]."""
        starts, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in (self.starts, self.lengths))
        return starts, lengths


class Requests:
    """The places of some requests' tokens: blocks in any order, and a ring of a few blocks each.

    Args:
        most: tokens of each request at its end.
        shape: of the layer.
        device: of tables.
        block_size: tokens of a block.
    """

    def __init__(self, most: list[int], shape: LayerShape, device: torch.device, block_size: int = BLOCK) -> None:
        self.shape, self.device, self.block_size, self.lengths = shape, device, block_size, [0] * len(most)
        blocks = [-(-tokens // block_size) for tokens in most]
        self.blocks = sum(blocks) + 2
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(5)).to(torch.int32)
        self.table = torch.zeros(len(most), max(blocks), dtype=torch.int32)
        for row, first, count in zip(self.table, accumulate(blocks, initial=0), blocks, strict=False):
            row[:count] = order[first : first + count]
        self.ring_blocks = ring_blocks(shape)
        """Ring blocks of a request. Block 0 is nobody's."""
        number = torch.arange(-(-max(most) // RING_BLOCK)) % self.ring_blocks
        own = 1 + self.ring_blocks * torch.arange(len(most))[:, None]
        self.ring_table = (own + number).to(torch.int32)

    def step(self, new: dict[int, int]) -> RequestBatch:
        """Add tokens to requests: number by request; decodes come first."""
        counts = [*new.values()]
        starts, slots, positions = [*accumulate(counts, initial=0)], [], []
        for request, count in new.items():
            places = torch.arange(self.lengths[request], self.lengths[request] + count)
            blocks = self.table[request, places // self.block_size].long()
            slots.append(blocks * self.block_size + places % self.block_size)
            positions.append(places)
            self.lengths[request] += count
        longest = self.shape.longest
        decodes = next((i for i, count in enumerate(counts) if count > longest), len(counts))
        assert all(count > longest for count in counts[decodes:]), counts
        rows = [*new]
        tensors = (self.table[rows], self.ring_table[rows], torch.cat(slots), torch.cat(positions))
        lengths = [self.lengths[request] for request in rows]
        return RequestBatch(tuple(rows), starts, lengths, decodes, *(x.to(self.device) for x in tensors))

    def fill_slots(self, batch: RequestBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return by the reference where each row goes in its ring, and the first token that each ring has; int32 [rows]
        and [requests] on the CPU."""
        slots, first = (torch.zeros(n, dtype=torch.int32) for n in (batch.starts[-1], len(batch.requests)))
        if self.shape.window:
            fill_slots(
                *batch.bounds(), batch.ring_table.cpu(), slots, first, block_size=RING_BLOCK,
                ring_blocks=self.ring_blocks, window=self.shape.window, longest_decode=self.shape.longest,
            )  # fmt: skip
        return slots, first

    def micro_blocks(self, request: int, end: int) -> torch.Tensor:
        """Return the numbers of the blocks that hold a request's tokens before `end`."""
        token = torch.arange(0, end, MICRO_BLOCK)
        blocks = self.table[request].long()[token // self.block_size]
        return blocks * (self.block_size // MICRO_BLOCK) + token % self.block_size // MICRO_BLOCK
