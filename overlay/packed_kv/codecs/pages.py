"""Reference of the page layout: tokens of one layer written to and read from packed pages, in PyTorch.

`layout.py` draws the bytes; here the same order is spelled as reshapes and shifts.
"""

from __future__ import annotations

import functools

import torch

from ..channel_calibration import UNCALIBRATED, ChannelCalibration
from ..formats import CODES_PER_LANE, GROUP_SIZE, Format, code_of, runs
from ..layout import LANES, MICRO_BLOCK, SIGN_HALF_SHIFT, SIGN_PARITY_SHIFT, SIGN_WORD_SHIFT, VectorLayout, page_layout
from .codec import Codec, split_runs

# Axes of a group's codes in a micro-block, [n3, n2 n1 n0, d4, d3, d2 d1, d0] for K and
# [n3, n2 n1, n0, d4, d3, d2 d1 d0] for V, and the order that makes them [lane, code] (see layout.py).
_AXES = {"key": (2, 8, 2, 2, 4, 2), "value": (2, 4, 2, 2, 2, 8)}
_TO_LANES = {"key": (1, 4, 0, 2, 3, 5), "value": (5, 1, 3, 4, 0, 2)}
_FROM_LANES = {role: tuple(order.index(axis) for axis in range(6)) for role, order in _TO_LANES.items()}


class PagedCodec:
    """Writes and reads one layer's pages of one format.

    A cache is vLLM's view of the pages: uint8 [blocks, KV heads, block_size, slot_bytes], with the last two
    dimensions contiguous and block_size a multiple of 16. Vectors read are as stored, scaled and rotated: turn the
    query with `rotate_query`, attend, and turn the output back once with `unrotate_output`.

    Args:
        fmt, device, positions: as for `Codec`.
        head_dim: channels of a head of K.
        key_channels: calibration of K's channels, `head_dim` a head.
        value_channels: calibration of V's channels, `value_dim` a head; with a mean only where K has one.
        value_dim: channels of a head of V, at most K's; in a page vectors of V have the size of K's. None: `head_dim`.

    Attributes:
        needs_positions: True if what is stored depends on a token's position in its sequence.

    Raises:
        ValueError: as `Codec`; means of V without means of K, or with RoPE.
    """

    def __init__(
        self,
        fmt: Format,
        head_dim: int,
        key_channels: ChannelCalibration = UNCALIBRATED,
        value_channels: ChannelCalibration = UNCALIBRATED,
        device: torch.device | str = "cpu",
        value_dim: int | None = None,
        positions: int | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        self.key = Codec(fmt, head_dim, "key", key_channels, device, positions=positions)
        self.value = Codec(fmt, value_dim, "value", value_channels, device, layout_dim=head_dim)
        self.codecs = (self.key, self.value)
        if self.value.transform.centres and (not self.key.transform.centres or value_channels.rope is not None):
            raise ValueError("means of V are given without means of K, or with RoPE, which turns keys alone")
        self.needs_positions = any(codec.transform.needs_positions for codec in self.codecs)
        # For the store kernel: the tables of K and V; None if neither is centred or scaled.
        changes = any(codec.transform.changes for codec in self.codecs)
        self.transform_tables = [codec.transform.table(codec.channels) for codec in self.codecs] if changes else None
        self.layout = page_layout(fmt, head_dim, key_bits=key_channels.group_bits)
        self.slot_bytes = fmt.slot_bytes(head_dim)

    def write(
        self,
        cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Store tokens.

        Args:
            cache: see the class.
            slots: int [tokens], block * block_size + offset; negative ones are skipped, the others are distinct.
            key, value: float [tokens, KV heads, head_dim] and [tokens, KV heads, value_dim].
            positions: int [tokens], each token's place in its sequence; may be None unless `needs_positions`.

        Raises:
            ValueError: no positions where they are needed.
        """
        stored = slots >= 0
        slots, key, value = slots[stored], key[stored], value[stored]
        place = None if positions is None else positions[stored].unsqueeze(1)
        if not len(slots):
            return
        # A word holds codes of several tokens, so whole micro-blocks are read, changed and written back.
        touched, where = torch.unique(slots // MICRO_BLOCK, return_inverse=True)
        token = slots % MICRO_BLOCK
        block, inner = self._locate(cache, touched)
        pages = micro_blocks_of(cache)
        old = pages[block, :, inner]
        codes, scales = [], []
        for i, (codec, vectors) in enumerate(zip(self.codecs, (key, value), strict=True)):
            own_codes, own_scales = self._unpack(i, old)
            own_codes[where, :, token], own_scales[where, :, token] = codec.quantize(vectors, place)
            codes.append(pack_codes(own_codes, self.layout.vectors[i], codec.role))
            scales.append(pack_scales(own_scales, codec.role))
        pages[block, :, inner] = torch.cat((*codes, *scales), dim=-1)

    def prepare(
        self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The vectors that `write` quantises and that a ring keeps (`codecs/ring.py`): fp32 [tokens, KV heads,
        stored_dim]. See `write`."""
        place = None if positions is None else positions.unsqueeze(1)
        return self.key.prepare(key, place), self.value.prepare(value, place)

    def read(
        self, cache: torch.Tensor, micro_blocks: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantise micro-blocks.

        Args:
            cache: see the class.
            micro_blocks: int [n], each (block * block_size + offset) / 16.
            positions: int [n * 16], positions of the tokens: the means are added to K and V. None: they are not added.

        Returns:
            K and V, scaled and rotated, float32 [KV heads, n * 16, stored_dim].
        """
        block, inner = self._locate(cache, micro_blocks)
        packed = micro_blocks_of(cache)[block, :, inner]
        key, value = (
            codec.dequantize(*self._unpack(i, packed)).transpose(0, 1).flatten(1, 2)
            for i, codec in enumerate(self.codecs)
        )
        return (key, value) if positions is None else self.whole(key, value, positions)

    def whole(
        self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the means, scaled and rotated, to K and V as `prepare` returns them, fp32 [KV heads, tokens, stored_dim].
        positions: int [tokens]."""
        key, value = (
            x + codec.prepared_means(positions).transpose(0, 1) if codec.transform.centres else x
            for codec, x in zip(self.codecs, (key, value), strict=True)
        )
        return key, value

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, KV heads, queries a KV head, head_dim] -> over K's scale and rotated as K is,
        [..., stored_dim]."""
        query = self.key.pad(query).transpose(1, 2)
        return self.key.rotate(self.key.transform.unscale(query)).transpose(1, 2)

    def unrotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, KV heads, queries a KV head, stored_dim], sums of rotated V -> sums of V, [..., value_dim].
        The means that stored V lacks are not added."""
        sums = self.value.transform.unscale(self.value.unrotate(output.transpose(1, 2))).transpose(1, 2)
        return sums[..., : self.value.head_dim]

    def _locate(self, cache: torch.Tensor, micro_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a_block = cache.shape[2] // MICRO_BLOCK
        return micro_blocks // a_block, micro_blocks % a_block

    def _unpack(self, vector: int, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-blocks uint8 [n, heads, bytes] -> codes [n, heads, 16, head_dim], scales [n, heads, 16, groups] of one
        of the page's vectors."""
        words, halves, scales = (self.layout.plane(vector, part) for part in ("words", "half words", "scales"))
        codes = packed[..., words.offset : halves.offset + halves.bytes]
        order = words.order
        return (
            unpack_codes(codes, self.layout.vectors[vector], order),
            unpack_scales(packed[..., scales.offset : scales.offset + scales.bytes], order),
        )


def micro_blocks_of(cache: torch.Tensor) -> torch.Tensor:
    """View uint8 [blocks, heads, block_size, slot_bytes] as [blocks, heads, block_size / 16, 16 * slot_bytes]."""
    blocks, heads, block_size, slot_bytes = cache.shape
    assert cache.stride()[2:] == (slot_bytes, 1) and block_size % MICRO_BLOCK == 0, (cache.shape, cache.stride())
    return cache.view(blocks, heads, block_size // MICRO_BLOCK, MICRO_BLOCK * slot_bytes)


def lanes_of(codes: torch.Tensor, groups: int, role: str) -> torch.Tensor:
    """codes [..., 16, groups * 32] -> [n, groups, 32 lanes, 16 codes of a lane]."""
    axes = codes.reshape(-1, MICRO_BLOCK, groups, GROUP_SIZE).transpose(1, 2).reshape(-1, groups, *_AXES[role])
    return axes.permute(0, 1, *(2 + axis for axis in _TO_LANES[role])).reshape(-1, groups, LANES, CODES_PER_LANE)


def pack_codes(codes: torch.Tensor, vector: VectorLayout, role: str) -> torch.Tensor:
    """codes uint8 [..., 16, head_dim] -> uint8 [..., code_bytes] in fragment order."""
    lead, groups = codes.shape[:-2], len(vector.group_bits)
    lanes = lanes_of(codes, groups, role).to(torch.int32)
    words, signs = [], []
    for bits, code in split_runs(vector.group_bits, lanes, dim=1):
        width = code_of(bits)
        sign, magnitude = code >> (bits - 1), code & (1 << (bits - 1)) - 1
        word = magnitude << _shifts(width.magnitude_shift, code.device)
        if width.has_sign_words:
            signs.append(sign)
        else:
            word = word | sign << _shifts(width.sign_shift, code.device)
        word = word.unflatten(-1, (width.code_words, -1)).sum(-1, dtype=torch.int32)
        words.append(word.transpose(1, 2).flatten(2))
    halves = []
    if signs:
        paired, single = torch.cat(signs, dim=1).split([2 * vector.sign_words, vector.half_words], dim=1)
        shared = paired.unflatten(1, (-1, 2)) << _sign_shifts(code.device)
        words.append(shared.sum((2, 4), dtype=torch.int32).transpose(1, 2))
        halves.append((single << _shifts(SIGN_HALF_SHIFT, code.device)).sum(-1))
    chunks = torch.cat(words, dim=-1).split(vector.chunks, dim=-1)
    parts = [chunk.flatten(1).contiguous().view(torch.uint8) for chunk in chunks]
    parts += [half.to(torch.int16).flatten(1).view(torch.uint8) for half in halves]
    return torch.cat(parts, dim=-1).unflatten(0, lead)


def unpack_codes(packed: torch.Tensor, vector: VectorLayout, role: str) -> torch.Tensor:
    """Inverse of `pack_codes`: uint8 [..., code_bytes] -> codes uint8 [..., 16, head_dim]."""
    lead, groups = packed.shape[:-1], len(vector.group_bits)
    packed = packed.reshape(-1, packed.shape[-1])
    word_bytes = 4 * LANES * sum(vector.chunks)
    chunks = packed[:, :word_bytes].contiguous().view(torch.int32).split([LANES * n for n in vector.chunks], dim=-1)
    words = torch.cat([chunk.unflatten(-1, (LANES, -1)) for chunk in chunks], dim=-1)
    code_words, sign_words = words.split([vector.code_words, vector.sign_words], dim=-1)
    half = packed[:, word_bytes:].contiguous().view(torch.int16).to(torch.int32).unflatten(-1, (-1, LANES))
    paired = sign_words.transpose(1, 2)[:, :, None, :, None] >> _sign_shifts(packed.device) & 1
    single = half.unsqueeze(-1) >> _shifts(SIGN_HALF_SHIFT, packed.device) & 1
    signs = torch.cat((paired.flatten(1, 2), single), dim=1)  # number among groups with sign words
    codes, at = [], 0
    for bits, count in runs(vector.group_bits):
        width = code_of(bits)
        word = code_words[..., at : at + width.code_words * count]
        word = word.unflatten(-1, (count, width.code_words)).transpose(1, 2)
        at += width.code_words * count
        word = word.repeat_interleave(CODES_PER_LANE // width.code_words, dim=-1)  # [n, count, lanes, codes]
        if width.has_sign_words:
            sign, signs = signs[:, :count], signs[:, count:]
        else:
            sign = word >> _shifts(width.sign_shift, word.device) & 1
        magnitude = word >> _shifts(width.magnitude_shift, word.device) & (1 << (bits - 1)) - 1
        codes.append((sign << (bits - 1) | magnitude).to(torch.uint8 if bits <= 8 else torch.int32))
    axes = torch.cat(codes, dim=1).reshape(-1, groups, *(_AXES[role][axis] for axis in _TO_LANES[role]))
    tokens = axes.permute(0, 1, *(2 + axis for axis in _FROM_LANES[role])).reshape(-1, groups, MICRO_BLOCK, GROUP_SIZE)
    return tokens.transpose(1, 2).reshape(*lead, MICRO_BLOCK, groups * GROUP_SIZE)


def pack_scales(scales: torch.Tensor, role: str) -> torch.Tensor:
    """uint8 [..., 16, groups] -> uint8 [..., 16 * groups] in the order of layout.py."""
    if role == "key":
        return scales.unflatten(-2, (2, 8)).movedim(-3, -1).flatten(-3)  # n3 g group -> g group n3
    return scales.unflatten(-2, (2, 4, 2)).movedim((-3, -1), (-4, -3)).flatten(-4)  # n3 t n0 group -> t group n3 n0


def unpack_scales(packed: torch.Tensor, role: str) -> torch.Tensor:
    """Inverse of `pack_scales`: uint8 [..., 16 * groups] -> a new uint8 [..., 16, groups]."""
    if role == "key":
        return packed.unflatten(-1, (8, -1, 2)).movedim(-1, -3).flatten(-3, -2).contiguous()
    return packed.unflatten(-1, (4, -1, 2, 2)).movedim((-4, -3), (-3, -1)).flatten(-4, -2).contiguous()


def _sign_shifts(device: torch.device) -> torch.Tensor:
    """Bit positions of the signs of a sign word's two groups, int32 [2, 1, 16]."""
    return torch.stack([_shifts(SIGN_WORD_SHIFT, device) + parity * SIGN_PARITY_SHIFT for parity in (0, 1)])[:, None]


@functools.cache
def _shifts(shifts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(shifts, dtype=torch.int32, device=device)
