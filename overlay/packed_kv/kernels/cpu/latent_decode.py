"""Decode attention over latents on a CPU: `latent.cpp` for a codec, and what it is called with."""

from __future__ import annotations

import ctypes

import torch

from ...codecs.latent import LatentCodec
from ...codecs.pages import pack_codes, pack_scales
from ...codecs.ring import Ring, order_of_bytes
from ...layout import MICRO_BLOCK, ROPE, ROPE_SCALES
from ..checks import check_int32, check_pages
from ..kernel_layout import kernel_layout
from .build import SIMD, Program, load_library
from .compiler import Target
from .constants import constants_header, number_line, numbers_line
from .jobs import Jobs, Largest
from .tables import ELEMENT_TYPES, add_ring

PROGRAM = Program(
    "latent.cpp",
    (*SIMD, "jobs.h", "latent_amx.h", "latent_tile.h", "latent_vectors.h", "numbers.h", "pages.h", "softmax.h",
     "threads.h"),
)  # fmt: skip
PIECE = 8
"""RoPE channels of a token that lie side by side."""
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class Arguments(ctypes.Structure):
    """`LatentArguments` of latent_tile.h."""

    _fields_ = (
        ("cache", _ADDRESS), ("cache_block_stride", _NUMBER), ("block_size", _NUMBER),
        ("requests", _NUMBER), ("block_table", _ADDRESS), ("block_table_stride", _NUMBER),
        ("query_start", _ADDRESS), ("seq_lens", _ADDRESS),
        ("query", _ADDRESS), ("rope_query", _ADDRESS), ("query_type", _NUMBER), ("query_stride", _NUMBER),
        ("query_head_stride", _NUMBER), ("rope_stride", _NUMBER), ("rope_head_stride", _NUMBER),
        ("output", _ADDRESS), ("output_type", _NUMBER), ("output_stride", _NUMBER), ("lse", _ADDRESS),
        ("heads", _NUMBER), ("scale", ctypes.c_double), ("constant", _ADDRESS),
        ("ring", _ADDRESS), ("ring_block_stride", _NUMBER), ("ring_token_stride", _NUMBER),
        ("ring_block_size", _NUMBER), ("ring_table", _ADDRESS), ("ring_table_stride", _NUMBER),
        ("ring_first", _ADDRESS), ("ring_window", _NUMBER),
        ("threads", _NUMBER), ("workspace", _ADDRESS),
    )  # fmt: skip


def latent_header(codec: LatentCodec) -> str:
    """Return the text of constants.h for pages of this codec: as for pairs, and where RoPE channels lie."""
    layout, bits, channels = codec.layout, codec.rope_bits, codec.rope_dim
    index = torch.arange(MICRO_BLOCK * channels, dtype=torch.int32).view(1, MICRO_BLOCK, channels)
    planes = {plane.content: plane for plane in layout.planes}
    if bits == 16:
        found = pack_codes(index, codec.rope_vector, "key").view(torch.int16).long() & 0xFFFF
    else:  # a code is a byte: the two bytes of an index by themselves
        low, high = (pack_codes((index >> shift & 0xFF).byte(), codec.rope_vector, "key") for shift in (0, 8))
        found = low.long() | high.long() << 8
    byte_of = found.flatten().argsort().view(MICRO_BLOCK, channels) * (bits // 8) + planes[ROPE].offset
    order = (torch.arange(0, channels, 32)[:, None] + order_of_bytes("key")).flatten()
    pieces = byte_of[:, order].unflatten(1, (-1, PIECE))
    assert (pieces.diff(dim=-1) == bits // 8).all(), "a piece is one run of bytes"
    scales_at = [0]
    if ROPE_SCALES in planes:
        numbers = torch.arange(MICRO_BLOCK * channels // 32).view(MICRO_BLOCK, -1)
        scales_at = (pack_scales(numbers, "key").argsort() + planes[ROPE_SCALES].offset).tolist()
    return "\n".join([
        constants_header(kernel_layout(layout), codec.fmt.rotation),
        "// RoPE channels: their bits, and byte offsets in a micro-block by token: of pieces of 8 channels in the",
        "// order of KEY_BYTES, and of scales by group. KEY_BYTES: the channel of each byte of a group in a ring.",
        number_line("ROPE_DIM", channels), number_line("ROPE_BITS", bits),
        numbers_line("ROPE_AT", pieces[..., 0].flatten().tolist()), numbers_line("ROPE_SCALES_AT", scales_at),
        numbers_line("KEY_BYTES", order_of_bytes("key").tolist()), "",
    ])  # fmt: skip


class CpuLatentDecode:
    """Decode attention of one layer over packed latents, as `reference.latent_attention.attend` has it.

    Outputs have the same bits whatever the number of threads and the other requests of a batch.

    Args:
        codec: of the layer, on the CPU.
        scale: of scores.
        target: what to compile for; None: the best of this processor.

    Raises:
        BuildError: there is no compiler, or it fails; one line.
    """

    def __init__(self, codec: LatentCodec, scale: float, *, target: Target | None = None) -> None:
        self.codec, self.scale = codec, scale
        library = load_library(PROGRAM, latent_header(codec), target)
        self._jobs = Jobs(library, "latent_decode", Arguments)

    def reserve(self, largest: Largest, heads: int) -> None:
        """Take the workspace of the largest step. `heads`: of queries."""
        self._jobs.reserve(Arguments(heads=heads, ring=int(largest.has_ring), threads=torch.get_num_threads()), largest)

    def __call__(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        output: torch.Tensor,
        constant: torch.Tensor | None = None,
        ring: Ring | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attention of requests' newest tokens over all of their cached tokens, the newest included.

        Args:
            cache: uint8 [blocks, block_size, slot_bytes].
            block_table: int32 [requests, blocks].
            query_start: int32 [requests + 1], first row of each request in the queries.
            seq_lens: int32 [requests], tokens of each in the cache.
            q_latent, q_rope: fp32, bf16 or fp16 [tokens or more, heads, rank], which meets stored latents, and
                [tokens or more, heads, rope_dim].
            output: fp32, bf16 or fp16 [tokens or more, heads, rank]; the rows of these requests are filled.
            constant: fp32 [rank], added to each row, or None.
            ring: of these requests, the new tokens included; None: there is none.
            lse: fp32 [tokens or more, heads], contiguous, filled with the natural log-sum-exp of the scores; None: it
                is not wanted.
        """
        rank, rope_dim, heads = self.codec.rank, self.codec.rope_dim, q_latent.shape[1]
        query_start, seq_lens = query_start.to(torch.int32).contiguous(), seq_lens.to(torch.int32).contiguous()
        assert q_latent.shape[1:] == output.shape[1:] == (heads, rank), (q_latent.shape, output.shape)
        assert q_rope.shape[1:] == (heads, rope_dim) and q_rope.dtype == q_latent.dtype, q_rope.shape
        assert q_latent.stride(2) == q_rope.stride(2) == 1 and output.stride()[1:] == (rank, 1), output.stride()
        check_pages(cache, 1)
        check_int32(block_table)
        assert cache.shape[2] == self.codec.slot_bytes, cache.shape
        assert lse is None or (lse.dtype == torch.float32 and lse.is_contiguous()), lse
        call = Arguments(
            cache=cache.data_ptr(), cache_block_stride=cache.stride(0), block_size=cache.shape[1],
            requests=len(seq_lens), block_table=block_table.data_ptr(), block_table_stride=block_table.stride(0),
            query_start=query_start.data_ptr(), seq_lens=seq_lens.data_ptr(),
            query=q_latent.data_ptr(), rope_query=q_rope.data_ptr(), query_type=ELEMENT_TYPES[q_latent.dtype],
            query_stride=q_latent.stride(0), query_head_stride=q_latent.stride(1), rope_stride=q_rope.stride(0),
            rope_head_stride=q_rope.stride(1), output=output.data_ptr(), output_type=ELEMENT_TYPES[output.dtype],
            output_stride=output.stride(0), heads=heads, scale=self.scale, threads=torch.get_num_threads(),
        )  # fmt: skip
        call.lse = None if lse is None else lse.data_ptr()
        if constant is not None:
            assert constant.dtype == torch.float32 and constant.is_contiguous(), constant.dtype
            call.constant = constant.data_ptr()
        if ring is not None:
            add_ring(call, ring)
        with self._jobs.workspace.lock:
            self._jobs.run(call)
