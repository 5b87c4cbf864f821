"""Time of a decode step of transformers' `generate` over `PackedCache`, beside transformers' own cache, on a CPU.

    python benchmarks/packed_cache.py MODEL [--dtypes NAME ...] [--contexts N ...] [--before FILE] [--csv FILE]

The sides take turns, a step each, in one process: transformers' cache, `PackedCache` by the C++ library, the same in
PyTorch, and that of an older transformers.py (`--before`). A step is a `forward` of one token as `generate` makes it;
the ratio is that of the medians. With one thread it is CPU time.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import packed_kv
import torch
from packed_kv import packed_tokens
from packed_kv.codecs.pages import PagedCodec
from packed_kv.kernels.cpu.compiler import best_target, processor
from packed_kv.packed_tokens import library_for
from packed_kv.transformers import PackedCache
from rows import append, commit_here, machine
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel


def older(file: Path) -> Any:
    """The module of another transformers.py, as one of the package."""
    spec = importlib.util.spec_from_file_location(f"{packed_kv.__name__}.before", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def without(codec: PagedCodec) -> None:
    """No library for any layer."""


def measure(model: PreTrainedModel, caches: dict[str, Cache], context: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of steps behind a prompt of `context` tokens, by side."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {side: [] for side in caches}
    ids = torch.randint(model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for side, cache in caches.items():
            with mock.patch.object(packed_tokens, "library_for", without if side == "pytorch" else library_for):
                model(
                    ids, past_key_values=cache, use_cache=True, logits_to_keep=1
                )  # layers choose with their first token
        for step in range(steps + 1):
            for side, cache in caches.items():
                start = clock()
                model(ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
                if step:
                    times[side].append(1e3 * (clock() - start))
    return times


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["tq4"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--dtype", default="bfloat16", help="of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--before", type=Path, help="an older transformers.py")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    before = None if options.before is None else older(options.before)
    cpu = processor()[0].split()[-1]
    for name in options.dtypes:
        for context in options.contexts:
            caches: dict[str, Cache] = {"transformers": DynamicCache()}
            caches |= {side: PackedCache(name) for side in ("library", "pytorch")}
            if before is not None:
                caches["before"] = before.PackedCache(name)
            times = {side: statistics.median(ms) for side, ms in measure(model, caches, context, options.steps).items()}
            for side, ms in times.items():
                row: dict[str, object] = {"dtype": name, "side": side, "context": context, "model_dtype": options.dtype}
                row |= {"threads": options.threads, "ms": f"{ms:.1f}", "ratio": f"{ms / times['transformers']:.2f}"}
                row |= {"target": best_target().name, "cpu": cpu, **machine(with_vllm=False)}
                row |= {"transformers": version("transformers"), "commit": commit_here()}
                print(row)
                if options.csv is not None:
                    append(options.csv, row)


if __name__ == "__main__":
    main()
