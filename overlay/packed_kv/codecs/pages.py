"""Reference of the page layout: tokens of one layer written to and read from packed pages, in PyTorch.

`layout.py` draws the bytes; here the same order is spelled as reshapes and shifts.
"""

from __future__ import annotations

import torch

from .. import layout
from ..formats import GROUP_SIZE, Format
from ..layout import CODES_PER_LANE, LANES, MICRO_BLOCK, VectorLayout, page_layout
from .codec import Codec, Outliers

# Axes of a group's codes in a micro-block, [n3, n2 n1 n0, d4, d3, d2 d1, d0] for K and [n3, n2 n1, n0, d4, d3, d2 d1 d0]
# for V, and the order that makes them [lane, code] (see layout.py).
_AXES = {"key": (2, 8, 2, 2, 4, 2), "value": (2, 4, 2, 2, 2, 8)}
_TO_LANES = {"key": (1, 4, 0, 2, 3, 5), "value": (5, 1, 3, 4, 0, 2)}
_FROM_LANES = {role: tuple(order.index(axis) for axis in range(6)) for role, order in _TO_LANES.items()}


class PagedCodec:
    """Writes and reads one layer's pages of one format.

    A cache is vLLM's view of the pages: uint8 [blocks, KV heads, block_size, slot_bytes], with the last two
    dimensions contiguous and block_size a multiple of 16. Vectors read are still rotated: rotate the query with
    `rotate_query`, attend, and undo V's rotation once on the output with `unrotate_output`.

    Args:
        fmt, head_dim, device: as for `Codec`.
        key_outliers, value_outliers: `outliers` of the two codecs, [heads, n] or [n].
    """

    def __init__(
        self,
        fmt: Format,
        head_dim: int,
        key_outliers: Outliers | None = None,
        value_outliers: Outliers | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.key = Codec(fmt, head_dim, "key", key_outliers, device)
        self.value = Codec(fmt, head_dim, "value", value_outliers, device)
        self.layout = page_layout(fmt, head_dim)
        self.slot_bytes = fmt.slot_bytes(head_dim)

    def write(self, cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store tokens.

        Args:
            cache: see the class.
            slots: int [tokens], block * block_size + offset; negative ones are skipped, the others are distinct.
            key, value: float [tokens, KV heads, head_dim].
        """
        stored = slots >= 0
        slots, key, value = slots[stored], key[stored], value[stored]
        # A word holds codes of several tokens, so whole micro-blocks are read, changed and written back.
        touched, where = torch.unique(slots // MICRO_BLOCK, return_inverse=True)
        token = slots % MICRO_BLOCK
        block, inner = self._locate(cache, touched)
        pages = _micro_blocks(cache)
        old = pages[block, :, inner]
        planes = []
        for codec, vectors in ((self.key, key), (self.value, value)):
            codes, scales = self._unpack(codec, old)
            new_codes, new_scales = codec.quantize(vectors)
            codes[where, :, token], scales[where, :, token] = new_codes, new_scales
            planes.append((_pack_codes(codes, codec.group_bits, codec.role), scales.flatten(-2)))
        (key_codes, key_scales), (value_codes, value_scales) = planes
        pages[block, :, inner] = torch.cat((key_codes, value_codes, key_scales, value_scales), dim=-1)

    def read(self, cache: torch.Tensor, micro_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantise micro-blocks, given as int [n] of (block * block_size + offset) / 16.

        Returns K and V, rotated, float32 [KV heads, n * 16, head_dim].
        """
        block, inner = self._locate(cache, micro_blocks)
        packed = _micro_blocks(cache)[block, :, inner]
        key, value = (
            codec.dequantize(*self._unpack(codec, packed)).transpose(0, 1).flatten(1, 2)
            for codec in (self.key, self.value)
        )
        return key, value

    def rotate_query(self, query: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, KV heads, queries a KV head, head_dim] -> the same, rotated as K is."""
        return self.key.rotate(query.transpose(1, 2)).transpose(1, 2)

    def unrotate_output(self, output: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, KV heads, queries a KV head, head_dim], sums of rotated V -> the same, rotated back."""
        return self.value.unrotate(output.transpose(1, 2)).transpose(1, 2)

    def _locate(self, cache: torch.Tensor, micro_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a_block = cache.shape[2] // MICRO_BLOCK
        return micro_blocks // a_block, micro_blocks % a_block

    def _unpack(self, codec: Codec, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-blocks uint8 [n, heads, bytes] -> codes uint8 [n, heads, 16, head_dim], scales [n, heads, 16, groups]."""
        page = self.layout
        codes_at, scales_at = (
            (page.key_codes, page.key_scales) if codec.role == "key" else (page.value_codes, page.value_scales)
        )
        codes = packed[..., codes_at : codes_at + page.vector.code_bytes]
        scales = packed[..., scales_at : scales_at + page.vector.scale_bytes]
        return _unpack_codes(codes, page.vector, codec.role), scales.unflatten(-1, (MICRO_BLOCK, -1)).clone()


def _micro_blocks(cache: torch.Tensor) -> torch.Tensor:
    """View uint8 [blocks, heads, block_size, slot_bytes] as [blocks, heads, block_size / 16, 16 * slot_bytes]."""
    blocks, heads, block_size, slot_bytes = cache.shape
    assert cache.stride()[2:] == (slot_bytes, 1) and block_size % MICRO_BLOCK == 0, (cache.shape, cache.stride())
    return cache.view(blocks, heads, block_size // MICRO_BLOCK, MICRO_BLOCK * slot_bytes)


def _pack_codes(codes: torch.Tensor, group_bits: tuple[int, ...], role: str) -> torch.Tensor:
    """codes uint8 [..., 16, head_dim] -> uint8 [..., code_bytes] in fragment order."""
    vector = VectorLayout(group_bits)
    groups = codes.unflatten(-1, (-1, GROUP_SIZE)).movedim(-2, 0).to(torch.int32)
    lead = groups.shape[1:-2]
    lanes = groups.reshape(len(group_bits), -1, *_AXES[role]).permute(0, 1, *(2 + axis for axis in _TO_LANES[role]))
    lanes = lanes.reshape(len(group_bits), -1, LANES, CODES_PER_LANE)
    words, sign_words, halves = [], [], []
    for bits, code in zip(group_bits, lanes, strict=True):
        sign, magnitude = code >> (bits - 1), code & (1 << (bits - 1)) - 1
        word = _shift_left(magnitude, layout.MAGNITUDE_SHIFT[bits])
        if bits != 3:
            word = word | _shift_left(sign, layout.SIGN_SHIFT[bits])
        elif vector.half_words and len(sign_words) == 2 * vector.sign_words:
            halves.append(_or(_shift_left(sign, layout.SIGN_HALF_SHIFT)))
        else:
            sign_words.append(_or(_shift_left(sign, layout.SIGN_WORD_SHIFT[len(sign_words) % 2])))
        words += [_or(part) for part in word.chunk(layout.CODE_WORDS[bits], dim=-1)]
    words += [even | odd for even, odd in zip(sign_words[::2], sign_words[1::2], strict=True)]
    chunks = torch.stack(words, dim=-1).split(vector.chunks, dim=-1)
    parts = [chunk.reshape(*lead, -1).contiguous().view(torch.uint8) for chunk in chunks]
    parts += [half.to(torch.int16).reshape(*lead, -1).view(torch.uint8) for half in halves]
    return torch.cat(parts, dim=-1)


def _unpack_codes(packed: torch.Tensor, vector: VectorLayout, role: str) -> torch.Tensor:
    """Inverse of `_pack_codes`: uint8 [..., code_bytes] -> codes uint8 [..., 16, head_dim]."""
    lead = packed.shape[:-1]
    word_bytes = 4 * LANES * sum(vector.chunks)
    chunks = packed[..., :word_bytes].contiguous().view(torch.int32).split([LANES * n for n in vector.chunks], dim=-1)
    words = torch.cat([chunk.unflatten(-1, (LANES, -1)) for chunk in chunks], dim=-1)
    half = packed[..., word_bytes:].contiguous().view(torch.int16).to(torch.int32)
    groups, at, threes = [], 0, 0
    for bits in vector.group_bits:
        count = layout.CODE_WORDS[bits]
        word = words[..., at : at + count].repeat_interleave(CODES_PER_LANE // count, dim=-1)
        at += count
        if bits != 3:
            sign = _bits(word, layout.SIGN_SHIFT[bits], 1)
        else:
            if threes < 2 * vector.sign_words:
                sign_word = words[..., vector.code_words + threes // 2]
                shifts = layout.SIGN_WORD_SHIFT[threes % 2]
            else:
                sign_word, shifts = half, layout.SIGN_HALF_SHIFT
            sign = _bits(sign_word.unsqueeze(-1), shifts, 1)
            threes += 1
        groups.append(sign << (bits - 1) | _bits(word, layout.MAGNITUDE_SHIFT[bits], bits - 1))
    lanes = torch.stack(groups, dim=-3).to(torch.uint8)
    axes = [_AXES[role][axis] for axis in _TO_LANES[role]]
    codes = lanes.reshape(-1, len(groups), *axes).permute(0, 1, *(2 + axis for axis in _FROM_LANES[role]))
    return codes.reshape(*lead, len(groups), MICRO_BLOCK, GROUP_SIZE).transpose(-3, -2).flatten(-2)


def _shift_left(x: torch.Tensor, shifts: tuple[int, ...]) -> torch.Tensor:
    return x << torch.tensor(shifts, dtype=torch.int32, device=x.device)


def _bits(x: torch.Tensor, shifts: tuple[int, ...], count: int) -> torch.Tensor:
    return x >> torch.tensor(shifts, dtype=torch.int32, device=x.device) & (1 << count) - 1


def _or(x: torch.Tensor) -> torch.Tensor:
    """Combine disjoint bits of the last dimension (a sum, as no two share a bit)."""
    return x.sum(-1, dtype=torch.int32)
