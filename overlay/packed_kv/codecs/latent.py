"""Reference of latent attention (MLA): one latent vector a token, K and V at once, and the key's RoPE channels.

A latent c is stored as y = R diag(scale) (c - mean) in codes of the format, with R its rotation. Rotation, scale and
mean fold into the layer's weights on both sides (`fold`), so that attention reads only y:

    scores    (W_UK q) . c = (R diag(1 / scale) W_UK q) . y + one number a query, which the softmax ignores
    output    sum p c      = diag(1 / scale) R^T (sum p y) + mean, as the weights p sum to 1

V's gain (docs/formats.md, section 8) multiplies W_UV alone. Latents in the ring, at 8 bits, have no gain, so their sums
are divided by it.
"""

from __future__ import annotations

import torch

from ..channel_calibration import UNCALIBRATED, ChannelCalibration
from ..formats import BYTE_CODE, GROUP_SIZE, INPUT_LIMIT, ROPE_BITS, Format, code_of
from ..layout import MICRO_BLOCK, ROPE, latent_layout, ring_slot_bytes
from . import ring
from .codec import Codec
from .pages import micro_blocks_of, pack_codes, pack_scales, unpack_codes, unpack_scales


class LatentCodec:
    """Writes and reads one layer's pages of latent vectors.

    A cache is vLLM's view of the pages: uint8 [blocks, block_size, slot_bytes], its last two dimensions contiguous and
    block_size a multiple of 16.

    Args:
        fmt: the format.
        rank: channels of a latent vector, vLLM's `kv_lora_rank`; a multiple of 32.
        rope_dim: channels of RoPE, `qk_rope_head_dim`; a multiple of 32.
        device: where the constants live; inputs must be on it.
        channels: calibration of the latent's channels, [n] or [rank]; without `first_mean` and `rope`. See `Codec`.
        rope_bits: bits of RoPE channels: 16, or 8 as in the ring (`ring.py`).

    Raises:
        ValueError: an unsupported size, or channels, means or scales that do not fit.
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
        self.layout = latent_layout(fmt, rank, rope_dim, rope_bits)
        self.latent = Codec(fmt, rank, "key", channels, device)
        if self.latent.heads is not None:
            raise ValueError(f"latent vectors have no heads; expected channels, means and scales [{rank}]")
        self.fmt, self.rank, self.rope_dim, self.device = fmt, rank, rope_dim, self.latent.device
        # For the store kernel, or None: made here, as CUDA graphs keep its address.
        transform = self.latent.transform
        self.transform_table = transform.table(self.latent.channels) if transform.changes else None
        assert self.layout.rope is not None
        self.rope_vector = self.layout.rope
        self.rope_bits, self.slot_bytes = rope_bits, fmt.latent_bytes(rank, rope_dim, rope_bits)
        self.ring_slot_bytes = ring_slot_bytes(rank + rope_dim, vectors=1)

    def write(self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Store tokens.

        Args:
            cache: see the class.
            slots: int [tokens], block * block_size + offset; negative ones are skipped, the others are distinct.
            latent, rope: float [tokens, rank] and [tokens, rope_dim].
        """
        stored = slots >= 0
        slots, latent, rope = slots[stored], latent[stored], rope[stored]
        if not len(slots):
            return
        touched, where = torch.unique(slots // MICRO_BLOCK, return_inverse=True)
        token = slots % MICRO_BLOCK
        pages = _micro_blocks(cache)
        block, inner = touched // pages.shape[1], touched % pages.shape[1]
        unpacked = self._unpack(pages[block, inner])
        for tokens, new in zip(unpacked, (*self.latent.quantize(latent), *self.quantize_rope(rope)), strict=True):
            tokens[where, token] = new
        codes, scales, rope_codes, *rope_scales = unpacked
        parts = [
            pack_codes(codes, self.layout.vectors[0], "key"),
            pack_scales(scales, "key"),
            pack_codes(rope_codes, self.rope_vector, "key"),
            *(pack_scales(x, "key") for x in rope_scales),
        ]
        pages[block, inner] = torch.cat(parts, dim=-1)

    def read(self, cache: torch.Tensor, micro_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantise micro-blocks.

        Args:
            cache: see the class.
            micro_blocks: int [n], each (block * block_size + offset) / 16.

        Returns:
            latents as stored, y of the module's text, fp32 [n * 16, rank], and RoPE channels, fp32 [n * 16, rope_dim].
        """
        pages = _micro_blocks(cache)
        codes, scales, *rope = self._unpack(pages[micro_blocks // pages.shape[1], micro_blocks % pages.shape[1]])
        return self.latent.dequantize(codes, scales).flatten(0, 1), self.dequantize_rope(*rope).flatten(0, 1)

    def write_ring(self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Store tokens in a ring.

        Args:
            cache: uint8 [blocks, 1, block_size, ring_slot_bytes].
            slots: int [tokens], block * block_size + offset; negative ones are skipped, the others are distinct.
            latent, rope: float [tokens, rank] and [tokens, rope_dim].
        """
        whole = torch.cat((self.latent.prepare(latent), halves_of(rope).float()), dim=-1)
        ring.write(cache, slots, whole.unsqueeze(1))

    def read_ring(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the ring's slots int [tokens]: latents as `read` returns them, but without V's gain, fp32 [tokens,
        rank], and RoPE channels, fp32 [tokens, rope_dim]."""
        (whole,) = ring.read(cache, slots, vectors=1)
        latent, rope = whole.squeeze(1).split([self.rank, self.rope_dim], dim=-1)
        return latent, rope

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """Latents as stored, fp32 [..., rank] -> as the model has them."""
        return self.latent.restore(stored)

    def fold(self, key_up: torch.Tensor, value_up: torch.Tensor) -> torch.Tensor:
        """Fold the weights so that they apply to latents as stored. They are in new memory, in the order of the model's
        `kv_b_proj`.

        Args:
            key_up: vLLM's `W_UK_T` [heads, nope_dim, rank]: scores are queries times this, times latents.
            value_up: vLLM's `W_UV` [heads, rank, value_dim]: sums of latents times this are V. It gets V's gain.

        Returns:
            of `key_up`'s dtype, [heads, nope_dim + value_dim, rank]: a latent times this is K, then V, of each head.
        """
        up = torch.cat((key_up.float(), value_up.float().transpose(1, 2)), dim=1)
        folded = self.latent.rotate(self.latent.transform.unscale(up))
        folded[:, key_up.shape[1] :] *= self.value_gain()
        return folded.to(key_up.dtype)

    def lacking(self, folded: torch.Tensor, nope_dim: int) -> torch.Tensor | None:
        """The constant to add to `folded` times a stored latent to get K and V, fp32 [heads, nope_dim + value_dim];
        None: nothing."""
        mean, constant = self.stored_mean(), self.output_constant()
        if mean is None or constant is None:
            return None
        key, value = folded[:, :nope_dim].float(), folded[:, nope_dim:].float()
        return torch.cat((key @ mean, value @ constant), dim=1)

    def value_gain(self) -> torch.Tensor:
        """V's gain of each channel as stored, fp32 [rank]."""
        gains = [code_of(bits).value_gain for bits in self.layout.vectors[0].group_bits]
        return torch.tensor(gains, device=self.device).repeat_interleave(GROUP_SIZE)

    def stored_mean(self) -> torch.Tensor | None:
        """The mean that stored latents lack, R diag(scale) mean, fp32 [rank]; None: there is none."""
        transform = self.latent.transform
        if transform.mean is None:
            return None
        return self.latent.rotate(transform.mean if transform.scale is None else transform.mean * transform.scale)

    def output_constant(self) -> torch.Tensor | None:
        """The constant to add to weighted means of stored latents before the folded `W_UV`, fp32 [rank];
        None: nothing. It is divided by V's gain, which is meant for the codes alone."""
        mean = self.stored_mean()
        return None if mean is None else mean / self.value_gain()

    def _unpack(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Micro-blocks uint8 [n, bytes] -> codes [n, 16, rank], scales [n, 16, groups], RoPE codes [n, 16, RoPE] and,
        at 8 bits, their scales [n, 16, RoPE groups]."""
        scales, rope = (self.layout.plane(0, content) for content in ("scales", ROPE))
        end = rope.offset + rope.bytes
        parts = [
            unpack_codes(packed[..., : scales.offset], self.layout.vectors[0], "key"),
            unpack_scales(packed[..., scales.offset : rope.offset], "key"),
            unpack_codes(packed[..., rope.offset : end], self.rope_vector, "key"),
        ]
        return [*parts, unpack_scales(packed[..., end:], "key")] if self.rope_bits == BYTE_CODE.bits else parts

    def quantize_rope(self, rope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """RoPE channels, float [..., rope_dim] -> codes of 16 bits, or codes of 8 and scales."""
        halves = halves_of(rope)
        if self.rope_bits != BYTE_CODE.bits:
            return (halves.view(torch.int16).to(torch.int32) & 0xFFFF,)
        codes, scales = ring.quantize(halves.float())
        return (codes.to(torch.int16) + 128).to(torch.uint8), scales

    def dequantize_rope(self, codes: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """Inverse of `quantize_rope`: -> fp32 [..., rope_dim]."""
        if scales is None:
            return codes.to(torch.int16).view(torch.float16).to(torch.float32)
        return ring.dequantize((codes.to(torch.int16) - 128).to(torch.int8), scales)


def halves_of(rope: torch.Tensor) -> torch.Tensor:
    """RoPE channels of any float dtype as fp16: NaN and infinities are 0, the rest is clamped."""
    rope = rope.float()
    return torch.where(rope.isfinite(), rope, 0.0).clamp(-INPUT_LIMIT, INPUT_LIMIT).half()


def _micro_blocks(cache: torch.Tensor) -> torch.Tensor:
    """View uint8 [blocks, block_size, slot_bytes] as [blocks, block_size / 16, 16 * slot_bytes]."""
    return micro_blocks_of(cache.unsqueeze(1)).squeeze(1)
