"""Per-batch metadata: where each token is in its request; whose decodes CUDA graphs can hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention import limits
from packed_kv.attention.layer import PairKernels
from packed_kv.attention.limits import EngineLimits
from packed_kv.attention.metadata import PackedMetadataBuilder
from packed_kv.formats import FORMATS
from packed_kv.kernels.served import CUDA, TRITON, Pairs, longest_of
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec


@pytest.fixture
def builder() -> PackedMetadataBuilder:
    made = object.__new__(PackedMetadataBuilder)
    made.rows, made.positions = torch.arange(32, dtype=torch.int32), torch.full((32,), -7)
    made.vllm_config = SimpleNamespace(speculative_config=None)
    return made


def batch(query_lens: list[int], seq_lens: list[int], padding: int = 0, **fields: torch.Tensor) -> SimpleNamespace:
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    tokens = sum(query_lens) + padding
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return SimpleNamespace(query_start_loc=starts, seq_lens=lengths, num_actual_tokens=tokens, **fields)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "expected"),
    [
        ([1], [1], [0]),
        ([4, 1, 3], [4, 17, 9], [0, 1, 2, 3, 16, 6, 7, 8]),
        ([0, 2, 0, 1], [5, 2, 9, 12], [0, 1, 11]),
        ([1, 1, 0, 0], [8, 1, 0, 0], [7, 0]),
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_positions_from_lengths(builder, query_lens, seq_lens, expected, padding):
    """Rows of padding may hold anything; those of a CUDA graph stay where they are."""
    found = builder._positions(batch(query_lens, seq_lens, padding, positions=None))
    assert found.dtype == torch.int64 and len(found) == len(expected) + padding
    assert found[: len(expected)].tolist() == expected
    assert found.data_ptr() == builder.positions.data_ptr()


def test_positions_of_vllm_are_taken(builder):
    given = torch.arange(100, 120)
    found = builder._positions(batch([2, 1], [2, 5], positions=given))
    assert found.data_ptr() == given.data_ptr() and found.tolist() == [100, 101, 102]


def test_positions_that_drafts_leave_behind_are_not(builder):
    builder.vllm_config.speculative_config = object()
    assert builder._positions(batch([2, 1], [2, 5], positions=torch.full((9,), 50))).tolist() == [0, 1, 4]


class Layer(AttentionLayerBase):
    """A packed layer of 8 KV heads."""

    def __init__(self, query_heads: int, kv_cache_dtype: str = "tq4", **options) -> None:
        self.kv_cache_dtype = kv_cache_dtype
        self.impl = SimpleNamespace(
            group=query_heads // 8, asked=lambda: Pairs(FORMATS["tq4"], 128, query_heads // 8, 128, **options)
        )  # fmt: skip

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


def is_captured(layers, drafts, capability, kernel, monkeypatch, requests=256):
    """True if CUDA graphs hold decodes of these packed layers; one that is not packed has no say."""
    for layer in layers:
        layer.impl.longest_decode, layer.impl.max_requests = 1 + drafts, requests
    monkeypatch.setattr(limits.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(limits.current_platform, "get_device_capability", lambda: capability)
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)
    named = {str(i): layer for i, layer in enumerate(layers)} | {"draft": Layer(1000, "auto")}
    speculative = SimpleNamespace(parallel_drafting=False, num_speculative_tokens=drafts) if drafts else None
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=named),
        model_config=SimpleNamespace(dtype=torch.bfloat16, attention_chunk_size=None, enforce_eager=True),
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=8192),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=speculative,
        additional_config={"packed_kv": {"decode_kernel": kernel}},
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.uint8)
    support = PackedMetadataBuilder.get_cudagraph_support(config, spec)
    assert support in (AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.NEVER)
    return support == AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    ("query_heads", "drafts", "captured", "capability", "kernel"),
    [
        ([8], 0, True, (8, 0), "auto"),
        ([64 * 8, 32], 0, True, (8, 0), "auto"),
        ([71 * 8], 0, True, (8, 0), "auto"),
        ([64], 7, True, (8, 0), "auto"),
        ([64], 8, False, (8, 0), "auto"),
        ([64, 96], 4, True, (8, 0), "auto"),
        ([64, 96], 5, False, (8, 0), "auto"),
        ([64 * 8], 1, False, (8, 0), "auto"),
        ([64, 96], 19, True, (9, 0), "auto"),
        ([64, 96], 20, False, (9, 0), "auto"),
        ([64 * 8], 3, True, (9, 0), "auto"),
        ([64 * 8], 4, False, (9, 0), "auto"),
        ([71 * 8], 0, True, (9, 0), "auto"),
        ([71 * 8], 1, False, (9, 0), "auto"),
        ([64, 96], 4, True, (9, 0), "triton"),
        ([64, 96], 5, False, (9, 0), "triton"),
    ],
)
def test_graphs_hold_decodes_that_the_kernel_serves(query_heads, drafts, captured, capability, kernel, monkeypatch):
    """Of layers that differ, the one with the most heads decides."""
    layers = [Layer(heads) for heads in query_heads]
    assert is_captured(layers, drafts, capability, kernel, monkeypatch) == captured


@pytest.mark.parametrize("options", [{"sliding_window": 128}, {"soft_cap": 30.0}, {"has_sinks": True}])
def test_graphs_hold_what_triton_serves_of_a_layer_that_the_cuda_kernel_refuses(options, monkeypatch):
    """On Hopper, 8 query heads a KV head: 8 tokens, whatever its other layers take."""
    layers = [Layer(64), Layer(64, **options)]
    assert is_captured(layers, 7, (9, 0), "auto", monkeypatch)
    assert not is_captured(layers, 8, (9, 0), "auto", monkeypatch)
    assert is_captured(layers[:1], 8, (9, 0), "auto", monkeypatch)


@pytest.mark.parametrize(("drafts", "requests", "captured"), [(8, 8192, True), (8, 8193, False), (7, 8193, True)])
def test_graphs_hold_what_triton_serves_of_more_requests_than_the_cuda_kernel(drafts, requests, captured, monkeypatch):
    """8 query heads a KV head; 9 tokens take two passes."""
    assert is_captured([Layer(64)], drafts, (9, 0), "auto", monkeypatch, requests) == captured


@pytest.mark.parametrize(("query_len", "decodes"), [(5, 3), (6, 0)])
def test_a_layer_goes_by_its_own_heads(query_len: int, decodes: int):
    """As the builder does for graphs: 12 query heads a KV head, whatever the model says."""
    kernels = object.__new__(PairKernels)
    kernels.decode = SimpleNamespace(longest=longest_of(TRITON, Pairs(None, 128, 12)))
    batch = SimpleNamespace(decodes=3, decode_query_len=query_len)
    assert kernels.count_decodes(batch, torch.bfloat16) == decodes
    kernels.decode.longest = longest_of(CUDA, Pairs(None, 128, 12))
    assert kernels.decode.longest == 20 and kernels.count_decodes(batch, torch.bfloat16) == 3


@pytest.mark.parametrize(
    ("drafts", "is_parallel", "batched", "expected"), [(None, False, 900, 8), (3, False, 900, 32), (3, True, 20, 20)]
)
def test_most_query_tokens_of_decodes(drafts: int | None, is_parallel: bool, batched: int, expected: int) -> None:
    """Those of all requests with their drafts, of which parallel drafting has twice as many, if a batch holds them."""
    speculative = drafts and SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=is_parallel)
    scheduler = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=batched)
    model = SimpleNamespace(attention_chunk_size=None, dtype=torch.bfloat16, max_model_len=100, enforce_eager=True)
    compilation = SimpleNamespace(static_forward_context={})
    config: Any = SimpleNamespace(
        speculative_config=speculative, scheduler_config=scheduler, model_config=model, compilation_config=compilation,
        additional_config={},
    )  # fmt: skip
    engine = EngineLimits.of(config, torch.device("cpu"))
    assert (engine.decode_tokens, engine.limits.max_tokens) == (expected, batched)
    model.attention_chunk_size = 64
    assert EngineLimits.of(config, torch.device("cpu")).limits.max_requests == 16
