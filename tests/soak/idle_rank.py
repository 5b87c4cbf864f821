#!/usr/bin/env python3
"""Data parallelism over experts with a rank that has no requests, and what happens when its engine is killed.

    idle_rank.py [--dtype NAME] [--window TOKENS] [--activations float16|float32]

On two GPUs, or on a CPU, where `ExpertsOnCpu` supplies what vLLM's communicator lacks for experts of two ranks. A small
random Mixtral. First both ranks serve; then all requests go to rank 0, so that rank 1 runs steps without requests
(`execute_dummy_batch`) beside it; then all go to rank 1. Tokens are compared with those where both serve, and with
those of one engine, which sums experts in another order: in fp16 an answer may part there. Then the idle rank's engine
gets SIGKILL while requests run: their clients have to be told, and no process may stay.
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

import psutil
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


class ExpertsOnCpu:
    """A worker extension of vLLM's: where it is imported, CPU communicators can gather and scatter unequal parts."""

    def idle_steps(self) -> int:
        """Steps without requests that this worker has run."""
        return self.__dict__.get("idle", 0)

    def count_idle_steps(self: Any) -> None:
        run = self.execute_dummy_batch

        def run_and_count() -> None:
            self.__dict__["idle"] = self.idle_steps() + 1
            run()

        self.execute_dummy_batch = run_and_count


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """`CudaCommunicator.all_gatherv` by torch.distributed: parts of `sizes` rows, of one tensor or several."""
    import torch

    if isinstance(input_, list):
        return [all_gatherv(self, x, dim, sizes) for x in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    own = input_.new_zeros(max(sizes), *input_.shape[1:])
    own[: len(input_)] = input_
    parts = [torch.empty_like(own) for _ in sizes]
    torch.distributed.all_gather(parts, own, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """`CudaCommunicator.reduce_scatterv` by torch.distributed: this rank's rows of the sum."""
    import torch

    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    whole = input_.clone()
    torch.distributed.all_reduce(whole, group=self.device_group)
    return whole.split(sizes)[self.rank_in_group]


def supply_communicator() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for function in (all_gatherv, reduce_scatterv):
        setattr(CpuCommunicator, function.__name__, function)


if __name__ != "__main__":  # in a worker
    supply_communicator()


def options(window: int, activations: str) -> dict[str, Any]:
    return {
        "dtype": activations, "skip_tokenizer_init": True, "max_model_len": 256, "enforce_eager": True,
        "enable_prefix_caching": False, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8,
        "additional_config": {"packed_kv": {"recent_tokens": window}},
    }  # fmt: skip


def sampling(tokens: int = GENERATED) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)


def alone(model: str, dtype: str, window: int, activations: str) -> list[list[int]]:
    with engine(model, dtype, **options(window, activations)) as llm:
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(x.outputs[0].token_ids) for x in llm.generate(inputs, sampling(), use_tqdm=False)]


async def over_two_ranks(model: str, dtype: str, window: int, activations: str, expected: list[list[int]]) -> bool:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    given = {"data_parallel_size": 2, "worker_extension_cls": "idle_rank.ExpertsOnCpu", **options(window, activations)}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, kv_cache_dtype=dtype, **given))

    async def answer(rank: int, index: int, tokens: int = GENERATED) -> list[int]:
        found: list[int] = []
        request: Any = {"prompt_token_ids": PROMPTS[index]}
        async for result in llm.generate(
            request, sampling(tokens), f"{tokens}-{rank}-{index}", data_parallel_rank=rank
        ):
            found = list(result.outputs[0].token_ids)
        return found

    is_right = True
    try:
        await llm.collective_rpc("count_idle_steps")
        both = (answer(rank, i, GENERATED + 1) for rank in (0, 1) for i in range(len(PROMPTS)))
        beside = [tokens[:GENERATED] for tokens in await asyncio.gather(*both)]
        for rank in (0, 1):
            found = await asyncio.gather(*(answer(rank, i) for i in range(len(PROMPTS))))
            count, of_rank = len(PROMPTS), beside[rank * len(PROMPTS) :][: len(PROMPTS)]
            same, as_both = (sum(map(list.__eq__, found, others)) for others in (expected, of_rank))
            print(f"rank {rank} serves, the other idles: of {count} answers {same} as of one engine,", end=" ")
            print(f"{as_both} as where both serve", flush=True)
            is_right &= as_both == count and (same == count or activations != "float32")
        (idle_steps,) = await llm.collective_rpc("idle_steps")  # of the first rank
        print(f"rank 0 ran {idle_steps} steps without requests", flush=True)
        running = asyncio.gather(*(answer(0, i, 150) for i in range(len(PROMPTS))), return_exceptions=True)
        await asyncio.sleep(1)
        engines = llm.engine_core.resources.engine_manager.processes
        idle, below = engines[1], [x for process in engines for x in psutil.Process(process.pid).children()]
        os.kill(idle.pid, signal.SIGKILL)
        start = time.monotonic()
        results = await asyncio.wait_for(running, 60)
        kinds = sorted({type(x).__name__ for x in results})
        print(f"the idle rank killed: requests end in {kinds} after {time.monotonic() - start:.1f} s", flush=True)
    finally:
        llm.shutdown()
    _, alive = psutil.wait_procs([*below, *(psutil.Process(x.pid) for x in engines if x.is_alive())], timeout=15)
    print(f"{len(alive)} of their processes are left after 15 s", flush=True)
    return is_right and idle_steps > 0 and kinds == ["EngineDeadError"] and not alive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="tq4", help="default: %(default)s")
    parser.add_argument("--window", type=int, default=64, help="tokens of the recent window (default: %(default)s)")
    parser.add_argument("--activations", default="float16", choices=("float16", "float32"), help="default: %(default)s")
    given = parser.parse_args()
    prepare_environment(small_model=True)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with tempfile.TemporaryDirectory() as folder:
        model = apart(save_model, Path(folder))
        case = (model, given.dtype, given.window, given.activations)
        expected = apart(alone, *case)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        return int(not asyncio.run(over_two_ranks(*case, expected)))


if __name__ == "__main__":
    sys.exit(main())
