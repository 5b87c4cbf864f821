"""A generate step of transformers on a CPU: `PackedCache` beside transformers' own cache, and without its kernels.

    python benchmarks/cpu_cache.py MODEL [--dtypes NAME ...] [--contexts N ...] [--threads N] [--csv FILE]

All caches live in one process and take turns: a step of one token behind a random prompt, which is then taken back.
Figures are medians in milliseconds; with one thread of CPU time, with more of wall-clock time. `pytorch_ms` is
PackedCache's own step as it packs and unpacks in PyTorch; `bytes` are of all that a cache holds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from packed_kv import transformers as packed
from packed_kv.kernels.cpu.compiler import processor
from rows import append, commit_here, machine
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

PYTORCH = " in PyTorch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["tq4", "turboquant25"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    for context in options.contexts:
        for row in measure(model, context, options):
            print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            if options.csv:
                versions = {"cpu": processor()[0], **machine(with_vllm=False), "commit": commit_here()}
                append(options.csv, row | versions)


@torch.inference_mode()
def measure(model: PreTrainedModel, context: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each dtype."""
    prompt = torch.randint(10, 4000, (1, context), generator=torch.Generator().manual_seed(0))
    caches: dict[str, Cache] = {"auto": DynamicCache(config=model.config)}
    for name in options.dtypes:
        caches |= {name: packed.PackedCache(name), name + PYTORCH: without_kernels(name)}
    for cache in caches.values():
        model(prompt, **{packed.CACHE_ARGUMENT: cache}, logits_to_keep=1)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(options.rounds + 1):
        for name, cache in caches.items():
            before = clock()
            model(prompt[:, :1], **{packed.CACHE_ARGUMENT: cache})
            if turn:  # the first one warms up
                times[name].append(clock() - before)
            cache.crop(-1)
    own = statistics.median(times["auto"])
    rows: list[dict[str, object]] = []
    for name in options.dtypes:
        ours, pytorch = (statistics.median(times[name + suffix]) for suffix in ("", PYTORCH))
        row: dict[str, object] = {"dtype": name, "context": context, "threads": options.threads}
        row |= {"auto_ms": f"{own * 1e3:.1f}", "packed_ms": f"{ours * 1e3:.1f}", "pytorch_ms": f"{pytorch * 1e3:.1f}"}
        row |= {"ratio": f"{ours / own:.2f}", "ratio_pytorch": f"{pytorch / own:.2f}", "bytes": caches[name].nbytes}
        rows.append(row)
    return rows


class _WithoutKernels(packed.PackedLayer):
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        for held in self.vectors:
            held.kernel = None


def without_kernels(name: str) -> packed.PackedCache:
    """A cache that packs and unpacks in PyTorch."""
    cache = packed.PackedCache(name)
    cache.layer_class_to_replicate = lambda: _WithoutKernels(cache.settings, len(cache.layers))
    return cache


if __name__ == "__main__":
    main()
