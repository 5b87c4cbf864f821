"""What layers of latents keep between the calls of a step: its store's work, once for all of a kind, and no batch."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention.latent import base
from packed_kv.attention.latent.impl import LatentAttentionImpl
from packed_kv.attention.latent.metadata import LatentMetadata
from packed_kv.attention.layouts import SparseLayout
from packed_kv.attention.protocols import NewTokens
from packed_kv.attention.sparse.impl import SparseLatentImpl
from packed_kv.attention.sparse.layer import SparseKernels
from packed_kv.attention.sparse.metadata import SparseDecodes, SparseLatentMetadata
from packed_kv.attention.step import StepCache
from packed_kv.attention.store import FunctionStore, LatentStore
from packed_kv.window.metadata import WindowMetadata
from packed_kv.window.step import WindowStep

CACHE, TOKENS = torch.zeros(2, 16, 40, dtype=torch.uint8), 5


class Counting(FunctionStore):
    """Writes nothing, and counts the steps that it prepares."""

    def __init__(self) -> None:
        super().__init__(lambda *_arguments: self.written.append(_arguments))
        self.prepared: list[NewTokens] = []
        self.written: list[tuple[Any, ...]] = []

    def prepare(self, tokens: NewTokens) -> Any:
        self.prepared.append(tokens)
        return super().prepare(tokens)


def layer(kind: type, name: str, kernels: Any) -> Any:
    impl: Any = object.__new__(kind)
    impl.layer_name, impl.kernels, impl.is_handed_latents = name, kernels, False
    return impl


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(TOKENS, 32), torch.zeros(TOKENS, 1, 8)


@pytest.fixture
def in_step(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Metadata by layer, as vLLM's forward context has them."""
    of_layers: dict[str, Any] = {}
    monkeypatch.setattr(base, "get_forward_context", lambda: SimpleNamespace(attn_metadata=of_layers or None))
    return of_layers


@pytest.mark.parametrize("kind", [LatentAttentionImpl, SparseLatentImpl])
def test_layers_of_a_kind_share_the_step_of_a_store(kind: type, in_step: dict[str, Any]) -> None:
    """Not with layers that have other slots, with those of another kind, nor with the next step."""
    counting, names = Counting(), ("a", "b", "c")
    layers = [layer(kind, name, SimpleNamespace(store=LatentStore(counting, name > "b"))) for name in names]
    slots = torch.arange(2 * TOKENS)
    for step in (1, 2):
        in_step.update(dict.fromkeys(names, SimpleNamespace(steps=StepCache(), new_latents=None)))
        for impl in layers[:2]:
            impl.do_kv_cache_update(*vectors(), CACHE, slots[:TOKENS], "tq4", None)
        assert (len(counting.prepared), len(counting.written)) == (step, 2 * step)
    layers[1].do_kv_cache_update(*vectors(), CACHE, slots[TOKENS:], "tq4", None)
    layers[2].do_kv_cache_update(*vectors(), CACHE, slots[:TOKENS], "tq4", None)
    assert len(counting.prepared) == 4 and torch.equal(counting.written[4][3], slots[TOKENS:])
    in_step.clear()  # a step without requests
    layers[0].do_kv_cache_update(*vectors(), CACHE, slots[:TOKENS], "tq4", None)
    assert len(counting.prepared) == len(counting.written) - 2 == 5


def test_layers_of_a_kind_share_the_step_of_their_rings() -> None:
    counting, slots = Counting(), torch.arange(TOKENS, dtype=torch.int32)
    stores, rings = [LatentStore(counting, "kind") for _ in range(2)], WindowMetadata(slots, slots, slots)
    of_pages = slots.long()
    metadata: Any = object.__new__(LatentMetadata)
    metadata.steps, metadata.num_actual_tokens, metadata.num_decode_tokens = StepCache(), TOKENS, 2
    metadata.prefill = SimpleNamespace(chunked_context=object())
    latent, rope = vectors()
    for store in stores:
        window: Any = WindowStep(SimpleNamespace(kv_cache=CACHE, window=8), rings, is_shared=False)  # type: ignore[arg-type]
        store.store(CACHE, of_pages, latent, rope[:, 0], window, metadata)
        store.store_rest(CACHE, latent[2:], rope[2:, 0], window, metadata)
    assert [(len(x.slots), x.only_ring) for x in counting.prepared] == [(5, False), (3, True)]


def test_a_step_that_fails_between_store_and_attention_leaves_no_latents(in_step: dict[str, Any]) -> None:
    """Neither in memory nor to the next batch, which attends to its own; as does one whose latents the layer hands
    over."""
    attended: list[Any] = []

    def attend(metadata: Any, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], *rest: Any) -> torch.Tensor:
        attended.append(rest[-1])
        return queries[0]

    kernels = SimpleNamespace(store=LatentStore(FunctionStore(lambda *_arguments: None), "kind"), attend=attend)
    impl = layer(SparseLatentImpl, "a", kernels)
    impl.kv_lora_rank, impl.qk_rope_head_dim = 32, 8
    impl.topk_indices_buffer = torch.zeros(TOKENS, 4, dtype=torch.int32)

    def begin() -> Any:
        in_step["a"] = SparseLatentMetadata(
            num_reqs=1, max_query_len=TOKENS, max_seq_len=TOKENS, num_actual_tokens=TOKENS, slot_mapping=CACHE,
            query_start_loc=CACHE, block_table=CACHE, seq_lens=CACHE, req_id_per_token=CACHE,
        )  # fmt: skip
        return in_step["a"]

    def store() -> weakref.ref[torch.Tensor]:
        latent, rope = vectors()
        impl.do_kv_cache_update(latent, rope, CACHE, torch.arange(TOKENS), "tq4", None)
        return weakref.ref(latent)

    def forward() -> None:
        impl.forward_mqa(torch.zeros(TOKENS, 2, 40), CACHE, in_step["a"], None)

    begin()
    failed = store()
    in_step.clear()  # with the metadata of a step that raises
    assert failed() is None
    begin()
    forward()
    assert attended.pop() is None
    metadata = begin()
    stored = store()
    forward()
    assert metadata.new_latents is None and attended[-1][0] is stored() is not None
    attended.clear()
    assert stored() is None, "kept behind the layer's attention"
    handed = impl.new_latents = vectors()
    forward()
    assert attended == [handed]


@pytest.mark.parametrize("padded", [TOKENS, TOKENS + 3])
def test_a_kernel_of_picks_gets_as_many_decodes_as_were_prepared(padded: int) -> None:
    """By each layer of a step whose metadata count the rows that pad a graph's batch as decodes, too."""
    seen: list[tuple[int, ...]] = []

    class Decode:
        def prepare(self, batch: SparseDecodes) -> int:
            seen.append((batch.tokens, len(batch.requests)))
            return batch.tokens

        def attend(self, step: int, _cache: Any, queries: Any, ring: Any = None, output: Any = None) -> None:
            assert [len(x) for x in (*queries, output)] == [step] * 4

    layout = SparseLayout(SimpleNamespace(), 2, 0.1, None, picks=4)  # type: ignore[arg-type]
    memory = SimpleNamespace(output=torch.zeros(16, 2, 32), lse=torch.zeros(16, 2))
    kernels = SparseKernels(layout, Any, Any, Decode(), Any, take=lambda: memory)  # type: ignore[arg-type]
    metadata = SparseLatentMetadata(
        num_reqs=1, max_query_len=1, max_seq_len=9, num_actual_tokens=TOKENS, slot_mapping=CACHE,
        query_start_loc=CACHE, block_table=CACHE, seq_lens=CACHE, req_id_per_token=torch.zeros(16, dtype=torch.int32),
        num_decode_tokens=padded, num_decodes=padded,
    )  # fmt: skip
    queries, picks = (torch.zeros(TOKENS, 2, 32), torch.zeros(TOKENS, 2, 8)), torch.zeros(TOKENS, 4, dtype=torch.int32)
    for _layer in range(2):
        assert len(kernels.attend(metadata, CACHE, queries, picks, None)) == TOKENS
    assert seen == [(TOKENS, TOKENS)]
