"""Cost of the recent window in KV tokens, by vLLM's own cache planner, at the sizes of real models.

    python scripts/architectures/window_memory.py [--dtypes NAME ...] [--window TOKENS]

No engine runs: the specs of a model's layers are made here and given to vLLM's planner, which groups them and computes
the bytes of a block of its pool. A request takes blocks of pages for its context, one block of each group of states,
and its share of the blocks that hold ring buffers. Blocks are those of CUDA: pages of 16 tokens, larger beside
states (vLLM enlarges a page until it holds a state) or skipped layers.
"""

from __future__ import annotations

import argparse
import importlib
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from packed_kv.formats import FORMATS, Format
from packed_kv.window.cache_group import RingSpec, ring_spec
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

CONTEXTS = (2048, 8192, 32768)
LONGEST = 1 << 20
"""Longest request of the planner's config: no figure depends on it."""


@dataclass(frozen=True)
class Model:
    """`layers` that attend, `skipped` of them in bf16; `states`: layers with a state of `state_bytes`. `draft_heads`:
    KV heads of a draft's layer, packed too, 0: none."""

    layers: int
    kv_heads: int
    head_dim: int
    states: int = 0
    state_bytes: int = 0
    skipped: int = 0
    draft_heads: int = 0

    @property
    def has_mixed_pages(self) -> bool:
        return bool(self.skipped) or self.draft_heads not in (0, self.kv_heads)


def delta_net(key_heads: int, value_heads: int, head_dim: int, kernel: int = 4) -> int:
    """Bytes of a gated delta net's state: the last inputs of the convolution in bf16, a matrix a value head in fp32."""
    return (kernel - 1) * (2 * key_heads + value_heads) * head_dim * 2 + value_heads * head_dim**2 * 4


def mamba2(heads: int, head_dim: int, state: int, groups: int, kernel: int = 4) -> int:
    """Bytes of a Mamba-2 state in bf16."""
    return ((kernel - 1) * (heads * head_dim + 2 * groups * state) + heads * head_dim * state) * 2


MODELS = {
    "8B (36 layers, 8 heads of 128)": Model(36, 8, 128),
    "the same, 2 layers skipped": Model(36, 8, 128, skipped=2),
    "the same, 4 layers skipped": Model(36, 8, 128, skipped=4),
    "8B, EAGLE layer of 8 heads": Model(36, 8, 128, draft_heads=8),
    "8B, EAGLE layer of 4 heads": Model(36, 8, 128, draft_heads=4),
    "Qwen3-Next-80B-A3B (12 of 48, 2 heads of 256)": Model(12, 2, 256, 36, delta_net(16, 32, 128)),
    "Qwen3.5-35B-A3B (10 of 40, 2 heads of 256)": Model(10, 2, 256, 30, delta_net(16, 32, 128)),
    "Falcon-H1-7B (44 of 44, 2 heads of 128)": Model(44, 2, 128, 44, mamba2(24, 128, 256, 1)),
    "Granite-4.0-H-Small (4 of 40, 8 heads of 128)": Model(4, 8, 128, 36, mamba2(128, 64, 128, 1)),
}


def specs(model: Model, fmt: Format, window: int) -> dict[str, KVCacheSpec]:
    """Return the cache specs of all layers and of their rings, by name."""
    dense = FullAttentionSpec(block_size=1, num_kv_heads=model.kv_heads, head_size=model.head_dim, dtype=torch.bfloat16)
    packed = replace(dense, dtype=torch.uint8, state_content_bytes=fmt.slot_bytes(model.head_dim))
    block_size = 16 * math.ceil(max(model.state_bytes, 16 * packed.page_size_bytes) / (16 * packed.page_size_bytes))
    if model.skipped:  # see vLLM's _align_heterogeneous_kv_block_size
        block_size = 16 * math.ceil(dense.page_size_bytes / packed.page_size_bytes)
    dense, packed = (replace(spec, block_size=block_size) for spec in (dense, packed))
    found: dict[str, KVCacheSpec] = {}
    for i in range(model.layers):
        found[f"attention.{i}"] = dense if i < model.skipped else packed
    for i in range(model.states):
        found[f"state.{i}"] = MambaSpec(
            block_size=LONGEST, shapes=((model.state_bytes,),), dtypes=(torch.uint8,),
            page_size_padded=packed.page_size_bytes,
        )  # fmt: skip
    for i in range(model.skipped, model.layers if window else 0):
        slack = 1 + 3 * bool(model.draft_heads)
        sizes = {"one_size": not model.has_mixed_pages, "side_by_side": model.has_mixed_pages}
        found[f"attention.{i}.recent"] = ring_spec(packed, window, slack, **sizes)
    if model.draft_heads:
        found["draft"] = replace(packed, num_kv_heads=model.draft_heads)
    return found


def bytes_of_request(
    found: dict[str, KVCacheSpec], layout: KVCacheLayout, contexts: tuple[int, ...], *, counts_whole: bool = False
) -> list[float]:
    """Bytes of the pool that a request takes at each context. `counts_whole`: a ring buffer as whole blocks, as vLLM's
    own count of KV tokens does."""
    planner: Any = kv_cache_utils
    if not hasattr(planner, "get_kv_cache_groups"):  # 0.33 and later
        planner = importlib.import_module("vllm.v1.core.kv_cache_planning")
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout, mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    groups = planner.get_kv_cache_groups(config, found)
    block_bytes = planner._pool_bytes_per_block(config, groups)
    totals = []
    for context in contexts:
        blocks = 0.0
        for group in groups:
            spec: Any = group.kv_cache_spec
            spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
            if isinstance(spec, RingSpec):
                share = spec.ring_blocks / spec.ring_blocks_a_block
                blocks += math.ceil(share) if counts_whole else share
            else:
                blocks += math.ceil(context / spec.block_size)
        totals.append(blocks * block_bytes)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["tq4", "turboquant35", "turboquant25"], choices=list(FORMATS))
    parser.add_argument("--window", type=int, default=64, help="tokens (default: %(default)s)")
    options = parser.parse_args()
    print(f"vLLM {vllm.__version__}; KV tokens that a window of {options.window} costs\n")
    heads = " | ".join(f"at {context // 1024}k" for context in CONTEXTS)
    print(f"| model | dtype | block | layout | a ring | {heads} |")
    print("|---|---|---|---|---|" + "---|" * len(CONTEXTS))
    for name, model in MODELS.items():
        layout = KVCacheLayout.BLHNC if model.has_mixed_pages else KVCacheLayout.LBHNC
        for dtype in options.dtypes:
            without = specs(model, FORMATS[dtype], 0)
            with_ring = specs(model, FORMATS[dtype], options.window)
            plain = bytes_of_request(without, KVCacheLayout.LBHNC, CONTEXTS)
            more = bytes_of_request(with_ring, layout, CONTEXTS)
            block = with_ring[f"attention.{model.layers - 1}"].block_size
            cost = " | ".join(f"{1 - a / b:.1%}" for a, b in zip(plain, more, strict=True))
            print(f"| {name} | {dtype} | {block} | {layout.name} | {(more[0] - plain[0]) / 2**20:.1f} MiB | {cost} |")


if __name__ == "__main__":
    main()
