"""The kernels of a CPU, in C++, over latents: which of them serve a layer, its decodes and the prefixes of prompts.

As over pairs (`attention/cpu.py`), stored bytes and what is read back equal the reference's, and decodes run in PyTorch
with fp32 activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...kernels.ahead import Ahead, wait_for
from ...kernels.cpu import latent, tables
from ...kernels.cpu.compiler import BuildError
from ...kernels.cpu.jobs import Largest
from ...kernels.cpu.latent import CpuLatentPages
from ...kernels.cpu.latent_decode import CpuLatentDecode
from ..cpu import warn_of_pytorch, without_error
from ..protocols import DecodeBatch, DecodeKernel
from ..store import DirectStore, reference_latent_store
from .in_pytorch import RecentContext, ReferenceLatentPrefix, ReferenceLatents

if TYPE_CHECKING:
    from ...codecs.latent import LatentCodec
    from ...codecs.ring import Ring
    from ...formats import Format

Attended = tuple[torch.Tensor, torch.Tensor | None]

LIBRARY = ("cpu", "latents")
SLOWER = "5 to 20 times"
"""Time of a decode step in PyTorch, in steps of these kernels, as benchmarks/cpu_latents.py measures it."""


class CpuLatents(DecodeKernel[DecodeBatch, Attended]):
    """The C++ kernels over latents of one layer: see `ReferenceLatents`."""

    kind, longest, bound = "cpu latents", 1 << 30, None

    def __init__(
        self, codec: LatentCodec, heads: int, scale: float, constant: torch.Tensor | None, largest: Largest, *,
        is_shard: bool = False,
    ) -> None:  # fmt: skip
        """Take the workspace of the largest step, of so many query heads. Raises BuildError."""
        self.decode, self.constant, self.is_shard = CpuLatentDecode(codec, scale), constant, is_shard
        self.decode.reserve(largest, heads)

    def attend(
        self, step: DecodeBatch, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> Attended:  # fmt: skip
        q_latent, q_rope = queries
        batch = (cache, step.block_table, step.query_start, step.seq_lens, q_latent, q_rope)
        shape = q_latent.shape
        if self.is_shard:
            found, lse = torch.zeros(shape), torch.full(shape[:2], float("-inf"))
            self.decode(*batch, found, lse=lse)
            return found, lse
        found = torch.zeros(shape, dtype=q_latent.dtype)
        self.decode(*batch, found, self.constant, ring)
        return found, None


class CpuLatentPrefix(ReferenceLatentPrefix):
    """Reads the prefixes of prompts in C++; the few tokens of their rings in PyTorch."""

    def __init__(self, page_kernels: CpuLatentPages) -> None:
        super().__init__(page_kernels.codec)
        self.page_kernels = page_kernels

    def gather(
        self, cache: torch.Tensor, block_table: torch.Tensor, chunk: Any, rows: torch.Tensor,
        recent: RecentContext | None = None,
    ) -> None:  # fmt: skip
        row = 0
        for blocks, start, count in zip(block_table, chunk.starts.tolist(), chunk.seq_lens.tolist(), strict=True):
            self.page_kernels.read(cache, blocks, start, rows[row : row + count])
            row += count
        if recent is not None:
            self.read_ring(chunk, rows, recent, 1.0)


def find_kernels(
    fmt: Format, codec: LatentCodec, heads: int, scale: float, constant: torch.Tensor | None, dtype: torch.dtype,
    largest: Largest, *, is_shard: bool,
) -> tuple[DirectStore, ReferenceLatents | CpuLatents, ReferenceLatentPrefix]:  # fmt: skip
    """Return what stores, decodes and gathers prefixes of a layer: in PyTorch, as the log says, where C++ does not.

    Args:
        fmt, codec: of the layer, on the CPU.
        heads: of queries, those of all ranks that split the tokens.
        scale, constant, is_shard: see `ReferenceLatents`.
        dtype: of the model.
        largest: step of decodes, whose workspace is taken.
    """
    decode: ReferenceLatents | CpuLatents
    in_pytorch = ReferenceLatents(codec, scale, constant, is_shard=is_shard)
    refused = tables.latent_refusal(fmt, codec.rank, codec.rope_dim)
    reason = f"the kernels do not serve {refused}" if refused else ""
    if not refused:
        wait_for(LIBRARY)
        try:
            page_kernels, decode = CpuLatentPages(codec), in_pytorch
            if dtype != torch.float32:
                decode = CpuLatents(codec, heads, scale, constant, largest, is_shard=is_shard)
        except BuildError as error:
            reason = str(error)
    if reason:
        warn_of_pytorch(fmt.name, reason, SLOWER)
        return reference_latent_store(codec), in_pytorch, ReferenceLatentPrefix(codec)

    def store(cache: Any, new: Any, rope: Any, slots: Any, _positions: Any, ring: Any, ring_slots: Any) -> None:
        page_kernels.store(cache, slots, new, rope, ring, ring_slots)

    return DirectStore(store), decode, CpuLatentPrefix(page_kernels)


def compile_ahead() -> None:
    """Begin to compile the libraries, in another thread, while vLLM loads the model."""
    with Ahead() as ahead:
        ahead.note(LIBRARY, lambda: without_error(latent.load))
