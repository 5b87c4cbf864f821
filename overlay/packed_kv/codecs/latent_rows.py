"""Reference of latent rows: pages of latents (MLA) with each token's bytes in one run, for sparse attention."""

from __future__ import annotations

import torch

from ..channel_calibration import UNCALIBRATED, ChannelCalibration
from ..formats import BYTE_CODE, ROPE_BITS, Format
from ..layout import LANES, MICRO_BLOCK, ROPE, ROPE_SCALES, ROW_LANES, ROW_TOKENS, VectorLayout, row_layout
from .latent import LatentCodec
from .pages import pack_codes, unpack_codes


class LatentRowCodec(LatentCodec):
    """Writes and reads one layer's pages of latent rows: the values of `LatentCodec` in another layout of bytes.

    A cache is vLLM's view of the pages: uint8 [blocks, block_size, slot_bytes], its last two dimensions contiguous.
    Arguments and errors as of `LatentCodec`; also ValueError where groups do not fill words (`row_layout`).
    """

    def __init__(
        self,
        fmt: Format,
        rank: int,
        rope_dim: int,
        device: torch.device | str = "cpu",
        channels: ChannelCalibration = UNCALIBRATED,
        rope_bits: int = ROPE_BITS[0],
    ) -> None:
        super().__init__(fmt, rank, rope_dim, device, channels, rope_bits)
        self.rows = row_layout(fmt, rank, rope_dim, rope_bits)
        self.slot_bytes = self.rows.row_bytes

    def write(self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Store tokens.

        Args:
            cache: see the class.
            slots: int [tokens], block * block_size + offset; negative ones are skipped, the others are distinct.
            latent, rope: float [tokens, rank] and [tokens, rope_dim].
        """
        stored = slots >= 0
        slots = slots[stored]
        content = self.encode(latent[stored], rope[stored])
        cache[slots // cache.shape[1], slots % cache.shape[1], : content.shape[1]] = content

    def read(self, cache: torch.Tensor, micro_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantise each 16 tokens: see `LatentCodec.read`; `micro_blocks` are counted as there."""
        tokens = torch.arange(MICRO_BLOCK, device=micro_blocks.device)
        return self.read_slots(cache, (micro_blocks[:, None] * MICRO_BLOCK + tokens).flatten())

    def read_slots(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantise tokens: slots int [tokens] -> latents as stored, fp32 [tokens, rank], and RoPE channels, fp32
        [tokens, rope_dim]."""
        return self.decode(cache[slots // cache.shape[1], slots % cache.shape[1]])

    def encode(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """float [tokens, rank] and [tokens, rope_dim] -> the rows without their padding, uint8 [tokens, bytes]."""
        codes, scales = self.latent.quantize(latent)
        rope_codes, *rope_scales = self.quantize_rope(rope)
        page = self.rows.page
        assert page.rope is not None
        return torch.cat((_pack(codes, page.vectors[0]), scales, _pack(rope_codes, page.rope), *rope_scales), dim=-1)

    def decode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows uint8 [tokens, slot_bytes] -> latents as stored, fp32 [tokens, rank], and RoPE channels, fp32 [tokens,
        rope_dim]."""
        page, at, rope_at = self.rows.page, self.rows.offset("scales"), self.rows.offset(ROPE)
        assert page.rope is not None
        latent = self.latent.dequantize(_unpack(rows[:, :at], page.vectors[0]), rows[:, at:rope_at].contiguous())
        if self.rope_bits != BYTE_CODE.bits:
            end = rope_at + self.rope_dim * self.rope_bits // 8
            return latent, self.dequantize_rope(_unpack(rows[:, rope_at:end], page.rope))
        at = self.rows.offset(ROPE_SCALES)
        scales = rows[:, at : at + 2 * len(page.rope.group_bits)].contiguous()
        return latent, self.dequantize_rope(_unpack(rows[:, rope_at:at], page.rope), scales)


def _pack(codes: torch.Tensor, half: VectorLayout) -> torch.Tensor:
    """codes [tokens, channels] -> words uint8 [tokens, bytes]. `half`: layout of every other group."""
    tokens, groups = len(codes), len(half.group_bits)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -tokens % ROW_TOKENS))
    pairs = codes.view(-1, ROW_TOKENS, groups, 2, codes.shape[1] // (2 * groups))
    packed = pack_codes(pairs.movedim(3, 1).flatten(3).flatten(1, 2), half, "key")
    chunks = packed.split([4 * LANES * width for width in half.chunks], dim=-1)
    return torch.cat([chunk.unflatten(-1, (ROW_TOKENS, -1)) for chunk in chunks], dim=-1).flatten(0, 1)[:tokens]


def _unpack(words: torch.Tensor, half: VectorLayout) -> torch.Tensor:
    """Inverse of `_pack`: uint8 [tokens, bytes] -> codes [tokens, channels]."""
    tokens, groups = len(words), len(half.group_bits)
    words = torch.nn.functional.pad(words, (0, 0, 0, -tokens % ROW_TOKENS)).unflatten(0, (-1, ROW_TOKENS))
    chunks = words.split([4 * ROW_LANES * width for width in half.chunks], dim=-1)
    codes = unpack_codes(torch.cat([chunk.flatten(1) for chunk in chunks], dim=-1), half, "key")
    pairs = codes.unflatten(1, (2, ROW_TOKENS)).unflatten(-1, (groups, -1))
    return pairs.movedim(1, 3).flatten(2).flatten(0, 1)[:tokens]
