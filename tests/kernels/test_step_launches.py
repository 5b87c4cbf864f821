"""The launches of a step, in order: what a layer of pairs and one of latents launch, and what layers share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention.latent import decode
from packed_kv.attention.latent.decode import TritonLatents
from packed_kv.attention.latent.impl import LatentAttentionImpl
from packed_kv.attention.latent.kernels import LatentKernels
from packed_kv.attention.latent.metadata import LatentDecodeMetadata
from packed_kv.attention.layouts import LatentLayout
from packed_kv.attention.limits import Limits
from packed_kv.attention.metadata import Batch
from packed_kv.attention.step import StepCache
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.triton.launch import Launch
from packed_kv.reference.attention import AttentionOptions
from packed_kv.reference.context_shard import UNSHARDED
from packed_kv.window.metadata import WindowMetadata
from packed_kv.window.step import WindowStep
from test_latent import codec_of
from test_precompile import window_layer
from test_shares import BLOCK, DEVICE, HEAD_DIM, HEADS, Workspace, _machine, batch, layer

__all__ = ["_machine"]  # a fixture
FLASH, STORE, DECODE, MERGE = "flash", "store_kernel", "_decode_kernel", "_merge_kernel"
PREFIX = ["_gather_kernel", "_gather_ring_kernel", "_unrotate_kernel", "_unrotate_kernel", FLASH, "_combine_kernel"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Names of the kernels that are launched, none of which runs, and the arguments that their step decides."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        Launch, "__call__", lambda self, _grid, _tensors, step: found.append((self.kernel.__name__, step))
    )
    return found


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(40, 1), (9, 1)], [STORE, DECODE, MERGE]),
        ([(20, 20), (3, 3)], [STORE, FLASH]),
        ([(40, 3)], [STORE, FLASH, *PREFIX, STORE]),  # their rings come last
        ([(40, 1), (3, 3)], [STORE, DECODE, MERGE, FLASH]),
        ([(40, 1), (40, 3)], [STORE, DECODE, MERGE, FLASH, *PREFIX, STORE]),
    ],
    ids=["decodes", "new_prompts", "prompt_goes_on", "decodes_and_new", "decodes_and_old"],
)
def test_pairs(lengths: list[tuple[int, int]], expected: list[str], launched: list[tuple[str, Any]]) -> None:
    """With a recent window; another layer takes the arguments of the first."""
    codec = PagedCodec(FORMATS["tq4"], HEAD_DIM, device=DEVICE)
    metadata, _ = batch(UNSHARDED, lengths)
    table = torch.zeros(len(lengths), 20, dtype=torch.int32, device=DEVICE)
    rings = WindowMetadata(table, metadata.slot_mapping.to(torch.int32), table[:, 0].contiguous())
    cache = torch.zeros(metadata.block_table.numel(), 1, BLOCK, codec.slot_bytes, dtype=torch.uint8, device=DEVICE)
    vectors = torch.zeros(metadata.num_actual_tokens, HEADS + 2, HEAD_DIM, dtype=torch.float16, device=DEVICE)
    query, key, value = vectors.split([HEADS, 1, 1], dim=1)
    steps = []
    for _ in range(2):
        served = layer(codec, UNSHARDED, None, AttentionOptions(HEAD_DIM**-0.5), in_pytorch=False, kernel="triton")
        flash: Any = served.kernels.prefill
        attend = flash.flash_attention.function

        def function(*arguments: Any, attend: Any = attend, **options: Any) -> Any:
            launched.append((FLASH, None))
            return attend(*arguments, **options)

        flash.flash_attention = SimpleNamespace(function=function, value_dim=HEAD_DIM)
        window = window_layer()
        window.kv_cache = window.ring_of_one_request(40, 1, HEAD_DIM, DEVICE).cache
        served.forward(Batch(query, key, value, cache, metadata, query.clone(), WindowStep(window, rings, False)))
        assert [name for name, _ in launched] == expected
        steps.append([step for name, step in launched if name not in (FLASH, "_combine_kernel")])
        launched.clear()
    assert all(ours is theirs for ours, theirs in zip(*steps, strict=True))


def test_latents(launched: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recent window; lengths over pages are counted once a step, before the first layer."""
    workspace = Workspace()
    monkeypatch.setattr(decode, "current_workspace_manager", lambda: workspace)
    codec, counts = codec_of(FORMATS["tq4"], 96, 32), torch.arange(3, dtype=torch.int32, device=DEVICE)
    table, query = counts[:2, None].contiguous(), torch.zeros(2, HEADS, 128, dtype=torch.float16, device=DEVICE)
    cache = torch.zeros(4, BLOCK, codec.slot_bytes, dtype=torch.uint8, device=DEVICE)
    ring = torch.zeros(4, 1, 4, codec.ring_slot_bytes, dtype=torch.uint8, device=DEVICE)
    metadata = LatentDecodeMetadata(
        block_table=table, seq_lens=counts[:2], dcp_tot_seq_lens=None, query_start=counts, query_starts=counts,
        max_query_len=1,
    )  # fmt: skip
    of_batch: Any = SimpleNamespace(decode=metadata, num_decodes=2, steps=StepCache())
    rings = WindowMetadata(table, counts, counts[:2])
    window = WindowStep(SimpleNamespace(kv_cache=ring, window=8), rings, is_shared=False)  # type: ignore[arg-type]
    for _ in range(2):
        impl: Any = object.__new__(LatentAttentionImpl)
        layout = LatentLayout(codec, HEADS, 1.0, torch.float16, Limits(1, 2), None, window=8)
        impl.kernels = LatentKernels(None, TritonLatents(layout), None)
        impl.kv_lora_rank, impl.qk_rope_head_dim = 96, 32
        impl._window_step = lambda: window
        impl.forward_mqa(query, cache, of_batch, None)
    of_layer = ["_decode_latents_kernel", "_merge_latents_kernel", "_attend_latent_ring_kernel"]
    assert [name for name, _ in launched] == ["_split_lens_kernel", *of_layer, *of_layer]
    assert all(launched[1 + i][1] is launched[4 + i][1] for i in range(3))
