"""The kernels of a CPU, in C++, over latents: which of them serve a layer, its decodes and the prefixes of prompts.

As with pairs (`attention/cpu.py`), stored bytes and gathered values equal the reference's, and with fp32 activations
decodes run in PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...kernels.cpu.compiler import BuildError
from ...kernels.cpu.jobs import Largest
from ...kernels.cpu.latent import CpuLatentPages
from ...kernels.cpu.latent_decode import CpuLatentDecode
from ...kernels.served import ANY, CPP, Engine, Latents, who_serves
from ..cpu import wait_for_libraries, warn_of_pytorch
from ..protocols import DecodeBatch, DecodeKernel
from ..store import FunctionStore, LatentStore
from .in_pytorch import Attended, ReferenceLatentPrefix
from .kernels import LatentKernels, reference_kernels

if TYPE_CHECKING:
    from ...codecs.latent import LatentCodec
    from ...codecs.ring import Ring
    from ...formats import Format
    from ..layouts import LatentLayout
    from ..limits import EngineLimits

SLOWER = "5 to 20 times"
"""Ratio of a decode step's time in PyTorch to its time in these kernels, as benchmarks/cpu_latents.py measures it."""


class CpuLatents(DecodeKernel[DecodeBatch, Attended]):
    """The C++ kernels over latents of one layer: see `ReferenceLatents`."""

    language, kind, longest, bound = CPP, "cpu latents", ANY, None

    def __init__(
        self, codec: LatentCodec, heads: int, scale: float, constant: torch.Tensor | None, largest: Largest, *,
        is_shard: bool = False,
    ) -> None:  # fmt: skip
        """Take the workspace of the largest step with this number of query heads. Raises BuildError."""
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
    """Reads the prefixes of prompts in C++, and the few tokens in their rings in PyTorch."""

    def __init__(self, page_kernels: CpuLatentPages) -> None:
        super().__init__(page_kernels.codec)
        self.page_kernels = page_kernels

    def read_pages(self, cache: torch.Tensor, blocks: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        self.page_kernels.read(cache, blocks, start, rows)


def find_kernels(fmt: Format, layer: LatentLayout, engine: EngineLimits) -> LatentKernels:
    """Return the kernels of a layer of this format. Where C++ does not serve it, they are PyTorch's, and the log says
    so."""
    codec, found = layer.codec, reference_kernels(layer)
    served = who_serves(Engine("cpu"), Latents(fmt, codec.rank, codec.rope_dim, heads=1))
    reason = served.reason
    if served.kernel == CPP:
        attends = layer.dtype != torch.float32
        wait_for_libraries(codec.layout, fmt.rotation, attends=attends)
        try:
            page_kernels = CpuLatentPages(codec)
            decode: DecodeKernel[Any, Attended] = found.decode
            if attends:
                sizes = codec, layer.heads, layer.scale, layer.constant, engine.largest
                decode = CpuLatents(*sizes, is_shard=layer.is_shard)
        except BuildError as error:
            reason = str(error)
    if reason:
        warn_of_pytorch(fmt.name, reason, SLOWER)
        return found

    def store(cache: Any, new: Any, rope: Any, slots: Any, _positions: Any, ring: Any, ring_slots: Any) -> None:
        page_kernels.store(cache, slots, new, rope, ring, ring_slots)

    return LatentKernels(LatentStore(FunctionStore(store), decode.kind), decode, CpuLatentPrefix(page_kernels))
