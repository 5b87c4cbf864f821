#!/usr/bin/env python3
"""Data parallelism over experts with a rank that has no requests, and what happens when its engine is killed.

    idle_rank.py [--dtype NAME] [--window TOKENS]

On two GPUs: vLLM 0.32.0 on a CPU has no `all_gatherv`, which experts of two ranks need. A small random Mixtral in fp16.
All requests go to rank 0, so that rank 1 runs steps without requests (`execute_dummy_batch`) beside it; then all go to
rank 1. Tokens are compared with those of one engine. Then the idle rank's engine gets SIGKILL while requests run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from packed_kv_quality.engines import apart, engine, prepare_environment

PROMPTS = [[(7 * i * i + 3 * i + start) % 250 for i in range(n)] for start, n in ((0, 90), (5, 37), (9, 3))]
GENERATED = 24


def save_model(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.1,
        max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def options(window: int) -> dict[str, Any]:
    return {
        "dtype": "float16", "skip_tokenizer_init": True, "max_model_len": 256, "enforce_eager": True,
        "enable_prefix_caching": False, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8,
        "additional_config": {"packed_kv": {"recent_tokens": window}},
    }  # fmt: skip


def sampling(tokens: int = GENERATED) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)


def alone(model: str, dtype: str, window: int) -> list[list[int]]:
    with engine(model, dtype, **options(window)) as llm:
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(x.outputs[0].token_ids) for x in llm.generate(inputs, sampling(), use_tqdm=False)]


async def over_two_ranks(model: str, dtype: str, window: int, expected: list[list[int]]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = {"data_parallel_size": 2, **options(window)}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, kv_cache_dtype=dtype, **given))

    async def answer(rank: int, index: int, tokens: int = GENERATED) -> list[int]:
        found: list[int] = []
        request: Any = {"prompt_token_ids": PROMPTS[index]}
        async for result in llm.generate(
            request, sampling(tokens), f"{tokens}-{rank}-{index}", data_parallel_rank=rank
        ):
            found = list(result.outputs[0].token_ids)
        return found

    try:
        for rank in (0, 1):
            found = await asyncio.gather(*(answer(rank, i) for i in range(len(PROMPTS))))
            same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
            print(
                f"rank {rank} serves, the other idles: {same} of {len(expected)} answers as of one engine", flush=True
            )
        running = asyncio.gather(*(answer(0, i, 150) for i in range(len(PROMPTS))), return_exceptions=True)
        await asyncio.sleep(1)
        idle = llm.engine_core.resources.engine_manager.processes[1]
        os.kill(idle.pid, signal.SIGKILL)
        start = time.monotonic()
        results = await asyncio.wait_for(running, 60)
        kinds = sorted({type(x).__name__ for x in results})
        print(f"the idle rank killed: requests end in {kinds} after {time.monotonic() - start:.1f} s", flush=True)
    finally:
        llm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="tq4", help="default: %(default)s")
    parser.add_argument("--window", type=int, default=64, help="tokens of the recent window (default: %(default)s)")
    given = parser.parse_args()
    prepare_environment(small_model=True)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with tempfile.TemporaryDirectory() as folder:
        model = apart(save_model, Path(folder))
        expected = apart(alone, model, given.dtype, given.window)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        asyncio.run(over_two_ranks(model, given.dtype, given.window, expected))
    return 0


if __name__ == "__main__":
    sys.exit(main())
