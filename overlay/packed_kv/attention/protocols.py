"""The kernels of a layer's attention, as a layer calls them: to store tokens, to attend to decodes and to prefills.

Whatever depends on the step alone is computed once (`prepare`), for the first layer of a kind; the others only launch.
No kernel of a GPU waits for the device or allocates in a step, once vLLM's profiling run has sized the workspace.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import torch

    from ..codecs.ring import Ring
    from ..kernels.triton.launch import Launches
    from ..kernels.triton.rotate import RotateStep
    from .passes import OverPrefixes, PassLimits, PrefixPasses

Step = TypeVar("Step")
Result = TypeVar("Result", covariant=True)
Prefilled = TypeVar("Prefilled", contravariant=True)


@dataclass(frozen=True)
class PrefixBatch:
    """Passes over the prefixes of a step's chunks.

    `passes`: of the batch. `block_table`: int32 [requests, blocks] of all requests. `query_start`: int32 [requests or
    more], first query token of each chunk. `dtype`: of the result. `ring`: the ring of all requests, of any layer that
    shares the step, before it has the chunks' own tokens; None: there is none.
    """

    passes: PrefixPasses
    block_table: torch.Tensor
    query_start: torch.Tensor
    dtype: torch.dtype
    ring: Ring | None = None


@dataclass(frozen=True)
class DecodeBatch:
    """The decodes of a step, on the device.

    `block_table`: int32 [requests, blocks]. `query_start`: int32 [requests + 1], first query token of each request, and
    their number. `seq_lens`: int32 [requests], tokens in this rank's pages. `tokens`: query tokens of all requests.
    `max_query_len`: the most of a request, known on the host. `positions`: int64 [tokens], or None over latents.
    `ring`: the ring of these requests, of any layer that shares the step; None: there is none. `lse`: fp32 [tokens,
    query heads], contiguous, filled; for pairs with several ranks, and for picked latents with sinks; else None.
    """

    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    tokens: int
    max_query_len: int
    positions: torch.Tensor | None = None
    ring: Ring | None = None
    lse: torch.Tensor | None = None


class RotatingStep(Protocol):
    """Step of decodes of pairs on CUDA, whose queries the store rotates."""

    @property
    def rotate(self) -> RotateStep | None:
        """The launch that rotates the queries (`PairWorkspace.prepare_rotation`); None: the kernel takes them
        unrotated."""


@dataclass(frozen=True)
class NewTokens:
    """Tokens to be stored.

    `slots`: int64 [tokens], block * block_size + offset; negative ones are skipped. `positions`: int64 [tokens], of
    each in its request; None for latents. `ring_slots`: int32 [up to tokens], slots in the ring of the first tokens;
    None: no token goes into a ring. `decodes`: the step of the decode kernel whose queries are rotated in the same
    launch, or None. `only_ring`: whether the pages stay as they are.
    """

    slots: torch.Tensor
    positions: torch.Tensor | None = None
    ring_slots: torch.Tensor | None = None
    decodes: RotatingStep | None = None
    only_ring: bool = False


class LayerKernel(Protocol):
    """Kernel of a layer."""

    bound: Launches | None
    """The launches bound to the layer's memory; a dry run drops them. None on a CPU."""


class StoreKernel(LayerKernel, Protocol):
    """Writes new tokens of one layer into its pages and its ring: `TritonPairStore`, `TritonLatentStore`,
    `FunctionStore`."""

    def prepare(self, tokens: NewTokens) -> Any:
        """Return the step of these tokens; None: there are none."""
        return tokens if len(tokens.slots) else None

    def write(
        self, step: Any, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the tokens of a step.

        Args:
            cache: uint8 [blocks, KV heads, block_size, slot_bytes]; of latents [blocks, block_size, slot_bytes].
            key, value: [tokens or more, KV heads, head_dim] and [tokens or more, KV heads, value_dim]; latents and
                their RoPE channels, [tokens or more, rank] and [tokens or more, rope_dim].
            ring: uint8 [blocks, KV heads, block_size, ring_slot_bytes], where the step has `ring_slots`.
            query: [tokens or more, query heads, head_dim], read where the step has decodes.
        """

    def rotate(self, query: torch.Tensor, decodes: RotatingStep) -> None:
        """Rotate the queries of `decodes` for a layer that stores no tokens, where attention takes rotated queries.

        query: [tokens or more, query heads, head_dim].
        """
        return None


class DecodeKernel(LayerKernel, Protocol[Step, Result]):
    """Attends to the decodes of a layer: of pairs `TritonPairs`, `CudaPairs`, `CpuPairs`; of latents `TritonLatents`,
    `HopperLatents`, `CpuLatents`, `ReferenceLatents`; of picked latents `FlashDecodes` and `HopperSparse`
    (on a CPU `attend_in_pytorch` attends to all rows). On CUDA, a step of pairs is a `RotatingStep`."""

    language: str
    """The language of the kernel: "CUDA", "Triton", "C++" or "PyTorch"."""
    kind: Hashable
    """Kernels of equal `kind` can share the step of a batch."""
    longest: int
    """Most query tokens of a request that the kernel serves; longer requests take the prefill route."""
    pass_limits: PassLimits | None = None
    """The passes over prefixes that the kernel serves; None: it serves no passes."""

    def reserve(self) -> None:
        """Size the workspace for any batch, where there is one."""
        return None

    def prepare(self, batch: DecodeBatch) -> Step:
        """Return the step of a batch: grids, arguments and memory of its launches; on a CPU, the batch."""
        return cast("Step", batch)

    def attend(
        self, step: Step, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> Result:  # fmt: skip
        """Attend over all cached tokens of a step's requests, the new ones included.

        Args:
            cache: see `StoreKernel.write`.
            queries: for pairs [tokens or more, query heads, head_dim], not read where the store has rotated them; for
                latents [tokens, heads, rank], to be multiplied with stored latents, and [tokens, heads, rope_dim]; for
                picked latents also int32 [tokens, picks], positions in requests (negative: no pick).
            ring: of the layer, the new tokens included; None: there is none.
            output: for pairs [tokens or more, query heads, value_dim], whose rows of these tokens are filled; for
                picked latents [tokens, heads, rank].

        Returns:
            None for pairs and picked latents. For latents, in memory that the next layer overwrites: [tokens, heads,
            rank] of the queries' dtype, and None. For a rank's shard of the tokens, the output is in fp32 and without
            the constant, and instead of None comes the natural lse of the scores, fp32 [tokens, heads], -inf where the
            shard has no token.
        """
        raise NotImplementedError

    def prepare_with_prefixes(self, batch: DecodeBatch, prefixes: PrefixBatch) -> Step:
        """Return the step of decodes and of passes over prefixes, of a kernel with `pass_limits`. There may be no
        decodes; the batch's `positions` reach to the last row of the passes."""
        raise AssertionError("a kernel without `pass_limits` reads no prefixes")

    def attend_prefixes(self, step: Step, cache: torch.Tensor, ring: Ring | None = None) -> OverPrefixes:
        """Return attention of a step's passes over their prefixes, in memory that the next layer overwrites.

        `cache`: see `StoreKernel.write`. `ring`: of the layer, see `PrefixBatch`.
        """
        raise AssertionError("a kernel without `pass_limits` reads no prefixes")

    def batches_to_compile(self) -> list[tuple[int, int]]:
        """Return (requests, query tokens of each) of steps that together launch all variants of the kernel."""
        return []


class PrefillKind(NamedTuple):
    """Key of the layers that share a prefill's step: `sizes` (query and KV heads, channels, tokens of the workspace),
    sliding window, whether a layer reads its own keys back from the pages, tokens that it reads in the recent window
    (1: none), queries' dtype, where it matters, and the requests whose prefixes the decode kernel reads."""

    sizes: tuple[int, ...]
    sliding_window: int | None
    is_shared: bool
    recent: int = 1
    dtype: torch.dtype | None = None
    in_passes: frozenset[int] = frozenset()


class PrefillKernel(LayerKernel, Protocol[Prefilled]):
    """Attends to the requests of a layer that are not decodes: in a `Batch` of pairs `FlashPrefill`, `CpuPrefill`; in a
    `SparseBatch` `FlashPrompts`."""

    def reserve(self, dtype: torch.dtype) -> None:
        """Size the workspace for any batch, where there is one. `dtype`: of queries."""
        return None

    def attend(self, batch: Prefilled, first: int, ring: Ring | None = None) -> None:
        """Fill `batch.output` for the requests from `first` on. `ring`: the ring of these requests, before it has the
        batch's own tokens; None: there is none."""
