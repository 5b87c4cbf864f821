"""Decode attention over latents on a CPU: see `decode.py`."""

from __future__ import annotations

import ctypes

import torch

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from .compiler import Target
from .decode import LATENTS, Arguments, prepare_step
from .jobs import Jobs, Largest
from .layer import Cache, layer_of, load_for


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
        self.layer = layer_of(codec)
        self._jobs = Jobs(load_for(LATENTS, codec, target), Arguments)

    def reserve(self, largest: Largest, heads: int) -> None:
        """Take the workspace of the largest step. `heads`: of queries."""
        self._jobs.reserve(Arguments(kv_heads=1, group=heads), self.layer, largest)

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
            q_latent, q_rope: fp32, bf16 or fp16 [tokens or more, heads, rank], to be multiplied with stored latents,
                and [tokens or more, heads, rope_dim].
            output: fp32, bf16 or fp16 [tokens or more, heads, rank]; the rows of these requests are filled.
            constant: fp32 [rank], added to each row, or None.
            ring: of these requests, the new tokens included; None: there is none.
            lse: fp32 [tokens or more, heads], contiguous, filled with the natural log-sum-exp of the scores; None: it
                is not wanted.
        """
        rank, rope_dim, heads = self.codec.rank, self.codec.rope_dim, q_latent.shape[1]
        assert q_latent.shape[1:] == output.shape[1:] == (heads, rank), (q_latent.shape, output.shape)
        assert q_rope.shape[1:] == (heads, rope_dim) and q_rope.dtype == q_latent.dtype, q_rope.shape
        assert q_rope.stride(2) == 1 and cache.shape[2] == self.codec.slot_bytes, (q_rope.stride(), cache.shape)
        assert lse is None or (lse.dtype == torch.float32 and lse.is_contiguous()), lse
        step = prepare_step(block_table, query_start, seq_lens, ring)
        call = Arguments(
            of_step=step.requests, layer=ctypes.pointer(self.layer), pages=Cache.of(cache.unsqueeze(1)), kv_heads=1,
            group=heads, scale=self.scale, query=q_latent.data_ptr(), output=output.data_ptr(),
            rope_query=q_rope.data_ptr(), rope_stride=q_rope.stride(0), rope_head_stride=q_rope.stride(1),
        )  # fmt: skip
        call.set_vectors(q_latent, output)
        if ring is not None:
            call.ring, call.ring_window = Cache.of(ring.cache), ring.window
        call.lse = None if lse is None else lse.data_ptr()
        if constant is not None:
            assert constant.dtype == torch.float32 and constant.is_contiguous(), constant.dtype
            call.constant = constant.data_ptr()
        with self._jobs.workspace.lock:
            self._jobs.run(call)
