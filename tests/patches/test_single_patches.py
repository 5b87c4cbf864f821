"""Patches whose code no engine test names, on the installed vLLM and in its terms alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import REPO
from packed_kv_patches import pins, tree

pytest.importorskip("vllm.v1.attention.backend")

from vllm.config.cache import KV_CACHE_DTYPES, prepare_kv_cache_dtype, register_kv_cache_dtype
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
)
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.warmup import _reserved_block_count
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8}


@dataclass(frozen=True, kw_only=True)
class ScratchSpec(CircularBufferSpec):
    """A circular cache whose manager numbers parts of blocks, and which stays in its engine."""

    num_warmup_blocks = 0
    enable_kv_transfer = False


def groups(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(9, [], [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)])


@pytest.mark.parametrize(("spec_class", "blocks"), [(CircularBufferSpec, 1), (ScratchSpec, 0)])
def test_the_warm_up_asks_a_circular_cache_for_its_blocks(spec_class: type[CircularBufferSpec], blocks: int) -> None:
    counted = _reserved_block_count(
        2, spec_class(**SIZES), num_lookahead_tokens=0, max_model_len=4096, max_encoder_len=0
    )
    assert counted == blocks


def test_a_spec_keeps_its_group_from_connectors() -> None:
    config = groups(ScratchSpec(**SIZES), CircularBufferSpec(**SIZES), FullAttentionSpec(**SIZES))
    assert config.transfer_group_ids == (1, 2)


def test_a_failed_transfer_concerns_transferred_groups_alone() -> None:
    request = SimpleNamespace(request_id="a", num_computed_tokens=48, status=RequestStatus.WAITING_FOR_REMOTE_KVS)
    scheduler: Any = SimpleNamespace(
        kv_cache_config=groups(FullAttentionSpec(**SIZES), ScratchSpec(**SIZES)),
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda _request: ([3, 4, 5], [6, 7])),
        block_size=16,
        kv_holding_waiting=[request],
        running=[],
        recompute_kv_load_failures=True,
        failed_recving_kv_req_ids=set(),
    )
    scheduler._update_requests_with_invalid_blocks = lambda *arguments, **options: (
        Scheduler._update_requests_with_invalid_blocks(scheduler, *arguments, **options)
    )
    Scheduler._handle_invalid_blocks(scheduler, {4}, {})
    assert request.num_computed_tokens == 16
    assert scheduler.failed_recving_kv_req_ids == {"a"}


@pytest.mark.parametrize(("entries", "block"), [(1, 21), (8, 2)])
def test_stores_are_waited_for_by_all_groups(entries: int, block: int) -> None:
    request = SimpleNamespace(
        update_offload_keys=lambda: None, update_block_id_groups=lambda _groups: None, group_states=()
    )
    scheduler: Any = SimpleNamespace(
        _req_status={"a": request},
        _sliding_window_groups=(),
        _table_entries_per_block=(1, entries),
        _current_batch_allocated_block_ids=set(),
    )
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([5], [0, 21]))],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
        kv_cache_block_copies=None,
    )
    OffloadingConnectorScheduler._update_req_states(scheduler, output)
    assert scheduler._current_batch_allocated_block_ids == {5, block}


@pytest.mark.skipif(tree.locate(None, pins.load()).pin.version == "0.31.0", reason="vLLM 0.31.0 has no such patch")
def test_a_page_is_copied_behind_a_state() -> None:
    storage = torch.zeros(2 * 4 * 64, dtype=torch.uint8)  # two layers, four blocks of 64 bytes
    page = storage[:256].view(4, 64)
    state = page[:, :40]
    page[1] = 7
    copy_kv_cache_blocks_inplace([state, page], 4, [(1, 2)])
    assert (page[2] == 7).all()
    assert not page[0].any()
    assert not storage[256:].any()


@pytest.fixture
def dtype() -> Iterator[str]:
    @register_kv_cache_dtype("my_dtype")
    class Handler:
        name = "my_dtype"

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.NONE

        def before_engine(self, vllm_config: Any) -> None:
            vllm_config.additional_config["scales"] = "found"

    yield "my_dtype"
    KV_CACHE_DTYPES.remove("my_dtype")


def prepared(dtype: str) -> dict[str, str]:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype), additional_config={})
    prepare_kv_cache_dtype(config)
    return config.additional_config


def test_the_handler_of_an_engines_dtype_alone_is_told(dtype: str) -> None:
    assert prepared(dtype) == {"scales": "found"}
    assert prepared("auto") == prepared("fp8") == {}


def test_docs_list_each_patch() -> None:
    page = (REPO / "docs" / "upstream.md").read_text()
    folder = REPO / "vllm_patches" / "v0.33.0"
    for patch in (folder / "series").read_text().split():
        text = (folder / patch).read_text()
        files, added = len(re.findall(r"^\+\+\+", text, re.M)), len(re.findall(r"^\+(?!\+\+)", text, re.M))
        assert f"v0.33.0/{patch}) | {files} | {added} |" in page, patch
