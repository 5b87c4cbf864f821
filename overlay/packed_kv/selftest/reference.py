"""The reference of what the self-test's layers store and return, on the CPU: `PagedCodec` and attention in fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..codecs import ring as rings
from ..codecs.pages import PagedCodec
from ..formats import Format
from ..layout import ring_slot_bytes
from .requests import BLOCK, POISON, RING_BLOCK, LayerShape, RequestBatch, Requests


class Source(NamedTuple):
    """Keys and values [tokens, KV heads, channels] of one source, and a mask of the tokens that rows read there: bool
    [rows, tokens]."""

    key: torch.Tensor
    value: torch.Tensor
    seen: torch.Tensor


def attention(query: torch.Tensor, sources: list[Source], scale: float) -> torch.Tensor:
    """Return fp64 [rows, query heads, channels]: each row's softmax over the tokens that it sees in any source.

    query: [rows, query heads, channels].
    """
    kv_heads = sources[0].key.shape[1]
    rows = query.double().unflatten(1, (kv_heads, -1))  # [rows, KV heads, query heads of each, channels]
    scores, values = [], []
    for key, value, seen in sources:
        read = seen.any(0)  # most sources have few of the tokens that are read
        products = torch.einsum("qhgd,khd->hgqk", rows, key[read].double()) * scale
        scores.append(products.masked_fill(~seen[:, read], float("-inf")))
        values.append(value[read].double())
    weights = torch.cat(scores, dim=-1).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, torch.cat(values)).flatten(1, 2)


def relative_rms(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, divided by `wanted`'s; NaN counts as infinite."""
    got, wanted = got.double(), wanted.double()
    error = float((got - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")


class Reference:
    """Pages and rings of one layer on the CPU, and K and V of all requests as the model made them.

    Args:
        fmt, shape: of the layer.
        requests: whose tokens it has.
        own_is_raw: whether a prompt's or chunk's rows read the step's own tokens before quantisation.
    """

    def __init__(self, fmt: Format, shape: LayerShape, requests: Requests, *, own_is_raw: bool) -> None:
        self.codec, self.shape, self.requests = PagedCodec(fmt, shape.head_dim), shape, requests
        self.own_is_raw = own_is_raw
        self.cache = torch.full(
            (requests.blocks, shape.kv_heads, BLOCK, self.codec.slot_bytes), POISON, dtype=torch.uint8
        )
        blocks = 1 + requests.ring_blocks * len(requests.lengths)
        slot = ring_slot_bytes(shape.head_dim)
        self.ring = torch.full((blocks, shape.kv_heads, RING_BLOCK, slot), POISON, dtype=torch.uint8)
        none = torch.empty(0, shape.kv_heads, shape.head_dim)
        self.raw = [[none, none] for _ in requests.lengths]

    def store(self, batch: RequestBatch, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store a step's K and V, [rows, KV heads, head_dim] on the CPU, and keep them. Returns the first token of each
        request that can be read in its ring, int32 [requests]."""
        for index, request in enumerate(batch.requests):
            rows = batch.rows(index)
            own = (key[rows].float(), value[rows].float())
            self.raw[request] = [torch.cat(parts) for parts in zip(self.raw[request], own, strict=True)]
        positions = batch.positions.cpu()
        self.codec.write(self.cache, batch.slots.cpu(), key, value, positions)
        slots, first = self.requests.fill_slots(batch)
        if self.shape.window:
            rings.write(self.ring, slots, *self.codec.prepare(key, value, positions))
        return first

    def expected(self, batch: RequestBatch, index: int, query: torch.Tensor, first: int) -> torch.Tensor:
        """Attention of request `index` of a step that is stored, fp64 [rows, query heads, head_dim].

        query: of the step, on the CPU. first: see `store`.
        """
        request, end = batch.requests[index], batch.lengths[index]
        rows = batch.rows(index)
        own = torch.arange(end - (rows.stop - rows.start), end)[:, None]
        token = torch.arange(end)
        causal, prefix = token <= own, int(own[0])
        is_raw = torch.zeros_like(causal)
        if self.own_is_raw and index >= batch.decodes:
            is_raw = (token >= prefix) & causal
            in_ring = (token >= max(first, prefix - self.shape.window + 1)) & (token < prefix)
        else:
            in_ring = (token >= first) & (own - token < self.shape.window)
        in_ring = in_ring & causal if self.shape.window else torch.zeros_like(causal)
        sources = []
        for read, seen in (
            (lambda: self._stored(request, end), causal & ~is_raw & ~in_ring),
            (lambda: self._recent(request), in_ring),
            (lambda: self.raw[request], is_raw),
        ):
            if seen.any():  # a prompt's rows read neither pages nor ring
                key, value = read()
                sources.append(Source(key, value, seen))
        return attention(query[rows], sources, self.shape.head_dim**-0.5)

    def _stored(self, request: int, end: int) -> list[torch.Tensor]:
        """K and V as the pages have them, in the model's basis."""
        read = self.codec.read(self.cache, self.requests.micro_blocks(request, end))
        return [one.restore(x[:, :end].transpose(0, 1)) for one, x in zip(self.codec.codecs, read, strict=True)]

    def _recent(self, request: int) -> list[torch.Tensor]:
        """K and V as a ring gives them back, in the model's basis."""
        prepared = self.codec.prepare(*self.raw[request])
        return [one.restore(rings.round_trip(x)) for one, x in zip(self.codec.codecs, prepared, strict=True)]
