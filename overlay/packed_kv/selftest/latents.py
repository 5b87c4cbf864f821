"""A dtype's layers of latents (MLA) through the steps of an engine, held to attention in fp64 over `LatentCodec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..codecs import ring as rings
from ..codecs.latent import LatentCodec
from ..formats import Format
from ..reference.latent_attention import page_lens
from .checks import DTYPE, MOST, REPEATS, Check, rounds_that_differ, share_of_bytes, steps, vectors
from .launches import RANK, ROPE_DIM, LatentLayer
from .reference import Source, attention, relative_rms
from .requests import BLOCK, POISON, RING_BLOCK, LayerShape, RequestBatch, Requests

SHAPES = (LayerShape(192, 1, 16, 64, longest=4), LayerShape(192, 1, 16, 0))
"""16 query heads, of 128 channels and 64 of RoPE before latents are folded in."""
DECODE_BOUND, GATHER_BOUND = 2e-3, 2.0**-11
"""Relative RMS errors: of outputs in fp16, and of rows that are rounded to fp16."""


def latent_layers(fmt: Format, device: torch.device, kernel: str) -> list[LatentLayer]:
    """Layers of all `SHAPES`, whose kernels are being compiled."""
    layers = [LatentLayer(fmt, RANK, ROPE_DIM, shape, device, DTYPE, kernel, len(MOST)) for shape in SHAPES]
    for layer in layers:
        layer.compile_ahead()
    return layers


class LatentReference:
    """Pages and rings on the CPU; see `reference.Reference`."""

    def __init__(self, fmt: Format, shape: LayerShape, requests: Requests) -> None:
        self.codec, self.shape, self.requests = LatentCodec(fmt, RANK, ROPE_DIM), shape, requests
        self.cache = torch.full((requests.blocks, BLOCK, self.codec.slot_bytes), POISON, dtype=torch.uint8)
        blocks = 1 + requests.ring_blocks * len(requests.lengths)
        self.ring = torch.full((blocks, 1, RING_BLOCK, self.codec.ring_slot_bytes), POISON, dtype=torch.uint8)
        self.raw = [torch.empty(0, RANK + ROPE_DIM) for _ in requests.lengths]

    def store(self, batch: RequestBatch, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Store a step's rows. Returns the first token of each ring, int32 [requests]."""
        for index, request in enumerate(batch.requests):
            rows = batch.rows(index)
            own = torch.cat((latent[rows], rope[rows]), dim=-1).float()
            self.raw[request] = torch.cat((self.raw[request], own))
        self.codec.write(self.cache, batch.slots.cpu(), latent, rope)
        slots, first = self.requests.fill_slots(batch)
        if self.shape.window:
            self.codec.write_ring(self.ring, slots, latent, rope)
        return first

    def stored(self, request: int, end: int) -> torch.Tensor:
        """Rows of a request as its pages have them, fp32 [end, rank + rope_dim]."""
        return torch.cat(self.codec.read(self.cache, self.requests.micro_blocks(request, end)), dim=-1)[:end]

    def recent(self, request: int) -> torch.Tensor:
        """Rows of a request as its ring gives them back, fp32 [tokens, rank + rope_dim]."""
        latent, rope = self.raw[request].split([RANK, ROPE_DIM], dim=-1)
        return rings.round_trip(torch.cat((self.codec.latent.prepare(latent), rope), dim=-1))

    def gathered(self, batch: RequestBatch, first: torch.Tensor) -> torch.Tensor:
        """Return what chunks behind the requests would read, fp32 [tokens of all, rank + rope_dim]."""
        rows = []
        for index, request in enumerate(batch.requests):
            end = batch.lengths[index]
            read = self.stored(request, end)
            if self.shape.window:
                low = max(int(first[index]), end - self.shape.window + 1)
                read[low:] = self.recent(request)[low:]
            rows.append(read)
        return torch.cat(rows)

    def expected(self, batch: RequestBatch, index: int, query: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Attention of a decode, fp64 [rows, heads, rank]. query: of the step, [rows, heads, rank + rope_dim]."""
        request, end, rows = batch.requests[index], batch.lengths[index], batch.rows(index)
        own, token = torch.arange(end - (rows.stop - rows.start), end)[:, None], torch.arange(end)
        in_pages = end
        if self.shape.window:
            in_pages = int(page_lens(*batch.bounds(), first, self.shape.window)[index])
        of_pages = token <= own - (end - in_pages)
        stored, recent = self.stored(request, end), self.recent(request)
        values = stored[:, :RANK], recent[:, :RANK] / self.codec.value_gain()
        sources = [
            Source(stored[:, None], values[0][:, None], of_pages),
            Source(recent[:, None], values[1][:, None], (token <= own) & ~of_pages),
        ]
        return attention(query[rows], sources, self.shape.head_dim**-0.5)


def check_latents(fmt: Format, layer: LatentLayer, device: torch.device) -> Iterator[Check]:
    """Take requests through the steps; chunks of prompts are gathered, which vLLM's own attention then reads."""
    shape = layer.shape
    requests = Requests(MOST, shape, device)
    reference = LatentReference(fmt, shape, requests)
    cache, ring = (torch.full_like(x, POISON).to(device) for x in (reference.cache, reference.ring))
    of_ring = ring if shape.window else None
    for number, (name, new) in enumerate(steps(shape)):
        batch = requests.step(new)
        rows, case = batch.starts[-1], f"latents, {shape.group} heads, window {shape.window}: {name}"
        latent, rope = (vectors(rows, 1, n, 2 * number).squeeze(1) for n in (RANK, ROPE_DIM))
        held = layer.store(batch, latent.to(device), rope.to(device), cache, of_ring)
        first = reference.store(batch, latent, rope)
        share = max(share_of_bytes(cache, reference.cache), share_of_bytes(ring, reference.ring))
        yield Check("latents", f"{case}: bytes", share, 0.0)
        if batch.decodes < len(batch.requests):
            wanted = reference.gathered(batch, first)
            read = torch.full(wanted.shape, float("nan"), dtype=DTYPE, device=device)
            layer.gather(batch, cache, held, read)
            yield Check("latents", f"{case}: gather", relative_rms(read.cpu(), wanted), GATHER_BOUND)
            continue
        query = vectors(rows, shape.group, RANK + ROPE_DIM, 100 + number)
        q_latent, q_rope = query.to(device).split([RANK, ROPE_DIM], dim=-1)
        decode = partial(layer.decode, batch, q_latent, q_rope, cache, held)
        output = decode().clone()
        for index in range(len(batch.requests)):
            error = relative_rms(output[batch.rows(index)].cpu(), reference.expected(batch, index, query, first))
            yield Check("latents", case, error, DECODE_BOUND)
        again = torch.empty_like(output)
        differ = rounds_that_differ(
            partial(_decode_into, again, decode), partial(again.fill_, float("nan")), [again], [output],
            REPEATS[layer.kernel],
        )  # fmt: skip
        yield Check("latents", f"{case} again", 0.0, 0.0, REPEATS[layer.kernel], differ)


def _decode_into(output: torch.Tensor, decode: Callable[[], torch.Tensor]) -> None:
    output.copy_(decode())
