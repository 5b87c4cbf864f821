"""The routes of a CPU, in C++: what of a layer they serve, its store and its decodes. Prefill is in `cpu_prefill.py`.

They have the calls of `FusedDecode`. Stored bytes equal the reference's, so every layer that `kernels/cpu` knows is
stored by it. Decodes run on it in fp16 and bf16: with fp32 activations a result must not depend on how the scheduler
cut, batched or cached a request, and that only `active_blocks.py` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.logger import init_logger

from ..formats import Format
from ..kernels.ahead import Ahead, wait_for
from ..kernels.cpu import decode, gather, store, tables
from ..kernels.cpu.build import load_library
from ..kernels.cpu.compiler import BuildError
from ..kernels.cpu.constants import constants_header
from ..kernels.kernel_layout import kernel_layout
from ..layout import page_layout
from .active_blocks import AttentionOptions
from .context_shard import UNSHARDED, ContextShard
from .cpu_prefill import CpuPrefill
from .cpu_prefill import refusal as prefill_refusal
from .routes import longest_fused

if TYPE_CHECKING:
    from ..codecs.pages import PagedCodec
    from ..codecs.ring import Ring

logger = init_logger("vllm.packed_kv")

SLOWER = "10 to 25 times"
"""What a decode step in PyTorch takes, in steps of these kernels, as benchmarks/cpu.py measures it."""


@dataclass(frozen=True)
class CpuDecodeStep:
    """Of a step's decodes: `decode.CpuDecode`'s arguments, one a request, and the number of their tokens."""

    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    tokens: int


@dataclass(frozen=True)
class CpuStoreStep:
    """Of a step's tokens: `CpuStore`'s arguments."""

    slots: torch.Tensor
    positions: torch.Tensor
    ring_slots: torch.Tensor | None


class CpuRoute:
    """Store, and decode attention, of one layer.

    Args:
        codec: of the layer, on the CPU.
        query_heads, kv_heads: of this rank.
        options: see `AttentionOptions`.
        decodes: whether decodes are served, too.

    Raises:
        BuildError: no compiler, or one that fails.
    """

    def __init__(
        self, codec: PagedCodec, query_heads: int, kv_heads: int, options: AttentionOptions, *, decodes: bool
    ) -> None:
        self.store_tokens = store.CpuStore(codec)
        self.decode = decode.CpuDecode(codec, query_heads, kv_heads, options) if decodes else None
        self.longest = longest_fused(query_heads // kv_heads, by_cuda=False) if decodes else 0
        """Query tokens of a request that this route takes; 0: it takes none."""
        self.step_kind = ("cpu",)
        """Layers of one kind share the step of a batch's decodes."""

    def store_step(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        ring_slots: torch.Tensor | None = None,
        decodes: CpuDecodeStep | None = None,
    ) -> CpuStoreStep | None:
        """For a step's tokens: see `CpuStore`. `decodes`: not looked at. None: no tokens."""
        return CpuStoreStep(slots, positions, ring_slots) if len(slots) else None

    def store(
        self,
        cache: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: CpuStoreStep | None,
        ring: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
        *,
        only_ring: bool = False,
    ) -> None:
        """Write new tokens, into the ring too if the step has `ring_slots`. `query`: not looked at."""
        if step is not None:
            pages = None if only_ring else cache
            self.store_tokens(pages, key, value, step.slots, step.positions, ring, step.ring_slots)

    def rotate(self, query: torch.Tensor, step: CpuDecodeStep) -> None:
        """Nothing: `attend` rotates queries."""

    def decode_step(
        self,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        max_query_len: int,
        ring: Ring | None = None,
        lse: torch.Tensor | None = None,
    ) -> CpuDecodeStep:
        """For the decodes of a step: see `FusedDecode.decode_step`. `max_query_len`, `ring`: not looked at."""
        assert lse is None, "context parallelism decodes in PyTorch"
        return CpuDecodeStep(block_table, query_start, seq_lens, len(positions))

    def attend(
        self,
        cache: torch.Tensor,
        step: CpuDecodeStep,
        output: torch.Tensor,
        ring: Ring | None = None,
        query: torch.Tensor | None = None,
    ) -> None:
        """Attention of requests with few query tokens, over all of their cached tokens.

        Args:
            cache: uint8 [blocks, KV heads, block_size, slot_bytes].
            step: of these tokens.
            output: [tokens or more, query heads, value_dim]; the rows of these tokens are filled.
            ring: of the layer, the new tokens included; None: there is none.
            query: fp16 or bf16 [tokens or more, query heads, head_dim].
        """
        assert self.decode is not None and query is not None
        self.decode(query, cache, step.block_table, step.query_start, step.seq_lens, output, ring)


class Sizes(NamedTuple):
    """Of an engine: the most tokens of a request and of a batch; the model's dtype; a number of its own."""

    max_tokens: int
    dtype: torch.dtype
    engine: int


def find_routes(
    fmt: Format, head_dim: int, codec: PagedCodec, query_heads: int, kv_heads: int, options: AttentionOptions,
    sizes: Sizes, shard: ContextShard = UNSHARDED,
) -> tuple[CpuRoute | None, CpuPrefill | None]:  # fmt: skip
    """Return the routes of a layer: None of what they do not serve, which the log says.

    Args:
        fmt, head_dim: K's.
        codec, query_heads, kv_heads, options: of the layer.
        sizes: see `Sizes`.
        shard: what is in this rank's pages. Where there are several ranks, all runs in PyTorch.
    """
    attends = sizes.dtype != torch.float32
    if shard != UNSHARDED:
        return None, None
    if refused := tables.refusal(fmt, head_dim):
        warn_of_pytorch(fmt.name, f"the kernels do not serve {refused}")
        return None, None
    wait_for_libraries(fmt, head_dim, attends=attends)
    layer = (codec, query_heads, kv_heads, options)
    try:
        route = CpuRoute(*layer, decodes=attends)
        if not attends:
            return route, None
        if refused := prefill_refusal(head_dim):
            logger.warning_once(
                "%s: vLLM's attention op does not serve %s; prefill runs in PyTorch, many times slower",
                fmt.name,
                refused,
                scope="local",
            )
            return route, None
        return route, CpuPrefill(*layer, *sizes)
    except BuildError as error:
        warn_of_pytorch(fmt.name, str(error))
        return None, None


def compile_ahead(fmt: Format, head_dim: int, *, attends: bool) -> None:
    """Begin to compile what a layer's routes need, in other threads, while vLLM loads the model."""
    if tables.refusal(fmt, head_dim) is not None:
        return
    with Ahead() as ahead:
        for name, load in _libraries(fmt, head_dim, attends=attends).items():
            ahead.note(name, lambda load=load: _without_error(load))  # type: ignore[misc]


def wait_for_libraries(fmt: Format, head_dim: int, *, attends: bool) -> None:
    """Return once they are compiled, or cannot be: who loads them then is told why."""
    for name in _libraries(fmt, head_dim, attends=attends):
        wait_for(name)


def _libraries(fmt: Format, head_dim: int, *, attends: bool) -> dict[tuple[object, ...], Callable[[], object]]:
    of_all: dict[tuple[object, ...], Callable[[], object]] = {("cpu", "store"): store.load}
    if not attends:
        return of_all
    constants = constants_header(kernel_layout(page_layout(fmt, head_dim)), fmt.rotation)
    of_decodes: dict[tuple[object, ...], Callable[[], object]] = {
        ("cpu", "decode", constants): lambda: load_library(decode.PROGRAM, constants)
    }  # first, as they take longest
    return {**of_decodes, **of_all, ("cpu", "gather"): gather.load}


def _without_error(load: Callable[[], object]) -> None:
    with suppress(BuildError):
        load()


def warn_of_pytorch(name: str, reason: str) -> None:
    """Log, once, that attention runs in PyTorch, why, and what it costs."""
    logger.warning_once(
        "KV cache dtype %s: attention runs in PyTorch, a decode step takes %s as long: %s",
        name,
        SLOWER,
        reason,
        scope="local",
    )
