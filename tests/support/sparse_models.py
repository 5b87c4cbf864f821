"""Sparse attention over latents (DeepSeek V3.2, Hy4) with an indexer in PyTorch, of exact picks, in vLLM's place.

vLLM's CPU platform has none for it: there its keys are fp32, beside pages of 132 bytes a token as on CUDA. On CUDA
vLLM's needs DeepGEMM, which compiles kernels at run time; there the keys are vLLM's own, fp8 in these pages.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf


@dataclass
class IndexMetadata:
    """`slots` int64 [tokens], `table` int32 [requests, blocks], `seq_lens` int32 [requests], `starts` int32 [requests +
    1], and on the host."""

    slots: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    host_starts: torch.Tensor


class IndexBuilder(AttentionMetadataBuilder[IndexMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> IndexMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc, common.query_start_loc_cpu
        return IndexMetadata(common.slot_mapping, common.block_table_tensor, common.seq_lens, *starts)


class IndexBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "TEST_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        return None

    @staticmethod
    def get_builder_cls() -> type[IndexBuilder]:
        return IndexBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


def pick(
    self: Any, hidden: torch.Tensor, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """vLLM's `SparseAttnIndexer.forward_cpu`: fill the buffer of picks. query: fp32 [tokens, index heads, 128]; key:
    [tokens, 128]; weights: [tokens, index heads]."""
    metadata = get_forward_context().attn_metadata
    buffer = self.topk_indices_buffer
    if not isinstance(metadata, dict):
        return buffer
    found, cache = metadata[self.k_cache.prefix], self.k_cache.kv_cache
    block_size = cache.shape[1]
    if not hasattr(self, "keys"):
        self.keys = torch.full((cache.shape[0], block_size, 128), float("nan"))
    stored = found.slots >= 0
    slots = found.slots[stored]
    self.keys[slots // block_size, slots % block_size] = key[: len(found.slots)][stored].float()
    cache[slots // block_size, slots % block_size] = 0xFF  # whoever reads the neighbours' pages sees it
    buffer[: len(hidden)] = -1
    for request, seq_len in enumerate(found.seq_lens.tolist()):
        start, end = found.host_starts[request].item(), found.host_starts[request + 1].item()
        at = torch.arange(seq_len)
        keys = self.keys[found.table[request][at // block_size].long(), at % block_size]
        for token in range(start, end):
            seen = seq_len - (end - token) + 1
            scores = torch.relu(query[token].float() @ keys[:seen].T) * weights[token].float()[:, None]
            count = min(self.topk_tokens, seen)
            buffer[token, :count] = scores.sum(0).topk(count).indices.int()
    return buffer


PICK_TOKENS = 64
"""Tokens whose scores are made at a time, on CUDA."""


def pick_on_cuda(
    hidden: torch.Tensor, prefix: str, cache: torch.Tensor, query: torch.Tensor, _scale: Any, _key: Any,
    weights: torch.Tensor, _group: int, _format: Any, picks: int, channels: int, max_len: int, _buffer: int,
    buffer: torch.Tensor, **_options: Any,
) -> torch.Tensor:  # fmt: skip
    """vLLM's `sparse_attn_indexer`, without a host sync: query e4m3 [tokens, index heads, 128], weights fp32 [tokens,
    index heads], cache uint8 [blocks, 64, 132], whose blocks are all keys, then all scales."""
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return buffer
    found, tokens = metadata[prefix], len(hidden)
    buffer[:tokens] = -1
    pages = cache.flatten(1)
    keys = pages[:, : 64 * channels].view(torch.float8_e4m3fn).unflatten(1, (64, channels))
    scales = pages[:, 64 * channels :].contiguous().view(torch.float32)
    at = torch.arange(min(max_len, found.table.shape[1] * 64), device=cache.device)
    last = len(found.seq_lens) - 1
    for first in range(0, tokens, PICK_TOKENS):
        token = torch.arange(first, min(first + PICK_TOKENS, tokens), device=cache.device)
        request = torch.searchsorted(found.starts[1:].contiguous(), token, right=True).clamp(max=last)
        position = found.seq_lens[request] - (found.starts[request + 1] - token)
        blocks = found.table[request][:, at // 64].long()
        key = keys[blocks, at % 64].float() * scales[blocks, at % 64][..., None]
        scores = torch.einsum("thd,tld->thl", query[token].float(), key).relu_()
        scores = torch.einsum("thl,th->tl", scores, weights[token].float())
        scores = scores.masked_fill(at > position[:, None], float("-inf"))
        best = scores.topk(min(picks, len(at)), dim=1)
        chosen = torch.where(best.values > float("-inf"), best.indices, -1).to(torch.int32)
        buffer[first : first + len(token), : chosen.shape[1]] = chosen
    return buffer


def requests_of_tokens(starts: torch.Tensor, out: torch.Tensor, _mapped: int, tokens: int) -> torch.Tensor:
    """vLLM's `compute_token_to_req_indices`, whose kernel is Triton's."""
    out[:tokens] = 0
    requests = torch.arange(len(starts) - 1, dtype=torch.int32).repeat_interleave(starts.diff().long())
    out[: len(requests)] = requests
    return out[:tokens]


def store_and_pick_on_cuda(
    self: Any, hidden: torch.Tensor, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """vLLM's `SparseAttnIndexer.forward_cuda`, which stores the index keys, too; see `pick_on_cuda`."""
    from vllm import _custom_ops

    metadata, name, cache = get_forward_context().attn_metadata, self.k_cache.prefix, self.k_cache.kv_cache
    if isinstance(metadata, dict):
        slots = metadata[name].slots
        _custom_ops.indexer_k_quant_and_cache(key[: len(slots)], cache, slots, self.quant_block_size, self.scale_fmt)
    sizes = self.topk_tokens, self.head_dim, self.max_model_len, 0
    return pick_on_cuda(hidden, name, cache, query, None, None, weights, 0, None, *sizes, self.topk_indices_buffer)


def install_on_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's layers of CUDA pick tokens by `pick_on_cuda`, with `block_size` 64."""
    import vllm.model_executor.layers.sparse_attn_indexer as indexer
    import vllm.models.deepseek_v32.attention as attention

    patch.setattr(indexer, "has_deep_gemm", lambda: True)
    patch.setattr(attention, "sparse_attn_indexer", pick_on_cuda)
    patch.setattr(indexer.SparseAttnIndexer, "forward_cuda", store_and_pick_on_cuda)
    patch.setattr(attention.DeepseekV32IndexerCache, "get_attn_backend", lambda _self: IndexBackend)


CUT = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "dtype": "bfloat16",
    "num_hidden_layers": 2, "first_k_dense_replace": 2, "hidden_size": 7168, "intermediate_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 1024, "max_position_embeddings": 8192,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "moe_layer_freq": 1,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""DeepSeek V3.2 with the attention of a rank of eight, and two layers without experts."""


CUT_HY4 = {
    "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "dtype": "bfloat16", "num_hidden_layers": 3,
    "layer_types": ["deepseek_sparse_attention"] * 3, "indexer_types": ["full", "shared", "full"],
    "mlp_layer_types": ["dense"] * 3, "hidden_size": 2816, "intermediate_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 1024, "max_position_embeddings": 8192, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_topk": 2048,
    "index_n_heads": 16, "index_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "learnable_sink": True, "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
"""Hy4 with the attention of the whole model, and three layers without experts, of which the second has no indexer."""


def save_cut(folder: Path, base: dict[str, Any] = CUT, **changed: Any) -> str:
    """Write a config such as `CUT` and return its folder; weights are `random_weights`'."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(base | changed))
    return str(folder)


def random_weights(patch: pytest.MonkeyPatch) -> None:
    """Let `load_format="dummy"` give weights as of a model, the same in every engine: attention is peaked, and sinks
    take some of it."""
    from vllm.model_executor.model_loader import dummy_loader

    def fill(tensor: torch.Tensor, *_args: Any, name: str = "", **_options: Any) -> None:
        if not tensor.is_floating_point() or not tensor.ndim:  # scales stay 1
            return
        seed = zlib.crc32(f"{name}{tuple(tensor.shape)}".encode())
        random = torch.Generator(tensor.device).manual_seed(seed)
        values = torch.randn(tensor.shape, generator=random, device=tensor.device)
        if tensor.ndim == 1:
            values = values * 0 if name.endswith("bias") else 1 + 0.3 * values
            if "sink" in name:
                values = 10 + 10 * (values - 1)
        else:
            values *= 2 / tensor.shape[-1] ** 0.5
        tensor.data.copy_(values)

    patch.setattr(dummy_loader, "initialize_single_dummy_weight", fill)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's CPU platform run the model, with `custom_ops: ["none"]`."""
    import vllm.model_executor.layers.sparse_attn_indexer as indexer
    import vllm.model_executor.models.deepseek_v2 as deepseek
    import vllm.models.hy_v4.nvidia.attention as hy_v4
    import vllm.v1.attention.ops.metadata as metadata

    patch.setattr(metadata, "compute_token_to_req_indices", requests_of_tokens)
    for module in (deepseek, hy_v4):
        patch.setattr(module, "per_token_group_quant_fp8", lambda x, *_args, **_options: (x, torch.ones(len(x), 1)))
    patch.setattr(deepseek.DeepseekV32IndexerCache, "get_attn_backend", lambda _self: IndexBackend)
    patch.setattr(indexer.SparseAttnIndexer, "forward_cpu", pick)
