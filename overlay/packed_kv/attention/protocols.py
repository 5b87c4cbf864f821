"""What a layer's attention calls on the routes of a device. `routes.py` says which requests take which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from ..codecs.ring import Ring
    from .metadata import PackedMetadata


class DecodeRoute(Protocol):
    """Stores a layer's tokens and attends to its decodes: `decode.FusedDecode`, `cpu.CpuRoute`.

    What a step decides is worked out for its first layer (`store_step`, `decode_step`) and serves all of one kind.
    """

    longest: int
    """Query tokens of a request that are served; 0: no decodes are."""

    @property
    def step_kind(self) -> tuple:
        """Layers of one kind, and of the same heads, share the step of a batch's decodes."""

    def store_step(
        self, slots: torch.Tensor, positions: torch.Tensor, ring_slots: torch.Tensor | None = None, decodes: Any = None
    ) -> Any:
        """See `FusedDecode.store_step`."""

    def store(
        self, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: Any,
        ring: torch.Tensor | None = None, query: torch.Tensor | None = None, *, only_ring: bool = False,
    ) -> None:  # fmt: skip
        """See `FusedDecode.store`."""

    def rotate(self, query: torch.Tensor, step: Any) -> None:
        """See `FusedDecode.rotate`."""

    def decode_step(
        self, positions: torch.Tensor, block_table: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor,
        max_query_len: int, ring: Ring | None = None, lse: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """See `FusedDecode.decode_step`."""

    def attend(
        self, cache: torch.Tensor, step: Any, output: torch.Tensor, ring: Ring | None = None,
        query: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `FusedDecode.attend`. `query`: [tokens or more, query heads, head_dim], as the model made it."""


class PrefillRoute(Protocol):
    """Attends to the requests of a layer that are no decodes: `prefill.FlashPrefill`, `cpu_prefill.CpuPrefill`."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, cache: torch.Tensor,
        metadata: PackedMetadata, first: int, output: torch.Tensor, ring: Ring | None = None,
    ) -> None:  # fmt: skip
        """See `FlashPrefill.attend`."""
