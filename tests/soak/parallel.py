#!/usr/bin/env python3
"""Compare engines with two ranks (decode context, pipeline or data parallelism) to one without, with packed pages.

    python tests/soak/parallel.py {dcp,latent-dcp,pp,dp} [--dtype NAME] [--activations float16]

On 2 GPUs; pp and dp on a CPU, too. Both engines run at once, in processes of their own, on the demo model; for decode
context parallelism, which needs more ranks than KV heads, with its first KV head alone. `latent-dcp`: on
models/mla-demo, whose latents are one KV head, calibrated. docs/lab/parallel.md has the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from packed_kv_quality.engines import KV_CACHE_BYTES, apart, attention_layers, engine, prepare_environment, scheduler

prepare_environment(small_model=True)
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # asking PyTorch for a GPU is too much before a fork
VOCAB = 4096
REPO = Path(__file__).resolve().parents[2]
"""Not `CHECKOUT` of packed_kv_quality, which may be an installed copy."""
DEMO_MODEL, MLA_DEMO, TEXT = REPO / "models" / "demo-7m", REPO / "models" / "mla-demo", REPO / "LICENSE"
LENGTHS = (90, 37, 16, 3)
"""Tokens of the prompts, where they are continued; where they are scored, all have as many as the first."""
CHUNKS = (1, 48)
"""Tokens of a prompt that a step takes: 1 is a decode, in CUDA graphs."""
GENERATED = 100
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


def one_kv_head(folder: Path) -> str:
    """The demo model without its second KV head and the query heads that read it."""
    from safetensors.torch import load_file, save_file

    config = json.loads((DEMO_MODEL / "config.json").read_text())
    weights, head_dim = load_file(DEMO_MODEL / "model.safetensors"), config["head_dim"]
    for name, x in weights.items():
        if "self_attn" in name:
            rows, columns = {"q": (2 * head_dim, None), "o": (None, 2 * head_dim)}.get(name[-13], (head_dim, None))
            weights[name] = x[:rows, :columns].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config | heads))
    return str(folder)


def deepseeks_heads(folder: Path) -> str:
    """models/mla-demo with zeros as further channels of its heads, 128 and 128 as DeepSeek's: the same model, for
    FlashAttention 3, which knows no heads of 128 and 64."""
    from safetensors.torch import load_file, save_file

    config = json.loads((MLA_DEMO / "config.json").read_text())
    weights, wide = load_file(MLA_DEMO / "model.safetensors"), 128
    heads, nope, rope, value = (
        config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )

    def widened(x: torch.Tensor, *sizes: tuple[int, int]) -> torch.Tensor:
        """Rows of each head, in parts of these sizes before and after."""
        parts = x.unflatten(0, (heads, -1)).split([before for before, _ in sizes], dim=1)
        pads = [(0, 0, 0, after - before) for before, after in sizes]
        return torch.cat([torch.nn.functional.pad(*x) for x in zip(parts, pads, strict=True)], dim=1).flatten(0, 1)

    for name, x in weights.items():
        if name.endswith("q_proj.weight"):  # the scale of scores is of all channels
            weights[name] = widened(x, (nope, wide), (rope, rope)) * ((wide + rope) / (nope + rope)) ** 0.5
        elif name.endswith("kv_b_proj.weight"):
            weights[name] = widened(x, (nope, wide), (value, wide))
        elif name.endswith("o_proj.weight"):
            weights[name] = widened(x.T, (value, wide)).T.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"qk_nope_head_dim": wide, "v_head_dim": wide, "qk_head_dim": wide + rope}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    shutil.copy(MLA_DEMO / "turboquant_kv.json", folder)
    return str(folder)


def options(packed_kv: dict[str, Any], **more: Any) -> dict[str, Any]:
    if torch.cuda.is_available():
        more |= {"enforce_eager": False, "compilation_config": GRAPHS}
    return {
        "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256,
        "max_logprobs": VOCAB, "enable_prefix_caching": False, "additional_config": {"packed_kv": packed_kv},
        **more,
    }  # fmt: skip


def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(DEMO_MODEL).encode(TEXT.read_text())
    return [ids[i * LENGTHS[0] : (i + 1) * LENGTHS[0]] for i in range(len(LENGTHS))]


def sampling(**more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False, **more)


def log_probabilities(flat: Any, first: int) -> torch.Tensor:
    """fp32 [positions, vocabulary] of vLLM's flat ones, from position `first` on."""
    rows = torch.empty(len(flat) - first, VOCAB)
    for row, (start, end) in zip(
        rows, zip(flat.start_indices[first:], flat.end_indices[first:], strict=True), strict=True
    ):
        row[torch.tensor(flat.token_ids[start:end])] = torch.tensor(flat.logprobs[start:end])
    return rows


def over_ranks(model: str, dtype: str, activations: str, ranks: int, kernel: str) -> dict[str, Any]:
    """Run TP 2, its tokens split over that many ranks: KV tokens, log-probabilities by chunk, and what it generates."""
    parallel = {"tensor_parallel_size": 2, "decode_context_parallel_size": ranks}
    given = options({"recent_tokens": 0, "decode_kernel": kernel}, distributed_executor_backend="mp", **parallel)
    given |= {"async_scheduling": False, "dtype": activations}  # so that each step takes what it is told to
    with engine(model, dtype, **given) as llm:
        found: dict[str, Any] = {"tokens": llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens}
        core = scheduler(llm)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
        limit = core.max_num_scheduled_tokens
        for chunk in CHUNKS:
            core.max_num_scheduled_tokens = chunk * len(inputs)
            core.scheduler_config.long_prefill_token_threshold = chunk
            asked = sampling(prompt_logprobs=-1, flat_logprobs=True)
            asked.max_tokens = 1
            results = llm.generate(inputs, asked, use_tqdm=False)
            found[f"chunks of {chunk}"] = torch.cat([log_probabilities(x.prompt_logprobs, 1) for x in results])
        core.max_num_scheduled_tokens, core.scheduler_config.long_prefill_token_threshold = limit, 0
        results = continued(llm, logprobs=-1, flat_logprobs=True)
        found["generated"] = [list(x.token_ids) for x in results]
        found["of generated"] = [log_probabilities(x.logprobs, 0) for x in results]
    return found


def alone(dtype: str, activations: str) -> dict[str, Any]:
    """Run one rank: what it generates, and milliseconds of a step without requests and of its profiling attention."""
    with engine(str(DEMO_MODEL), dtype, **options({}, dtype=activations)) as llm:
        found: dict[str, Any] = {"generated": [list(x.token_ids) for x in continued(llm)]}
        found["idle step, ms"] = milliseconds(llm.llm_engine.model_executor.execute_dummy_batch)
        if torch.cuda.is_available():
            query, key = (
                torch.zeros(1, heads, 128, dtype=getattr(torch, activations), device="cuda") for heads in (4, 2)
            )

            def profile() -> None:
                for layer in attention_layers(llm):
                    layer.impl.attention.profile(query, key, key, 16, None)

            found["its profiling attention, ms"] = milliseconds(profile)
    return found


def milliseconds(step: Any) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def continued(llm: Any, **more: Any) -> list[Any]:
    inputs = [{"prompt_token_ids": prompt[:length]} for prompt, length in zip(prompts(), LENGTHS, strict=True)]
    return [x.outputs[0] for x in llm.generate(inputs, sampling(**more), use_tqdm=False)]


def served(kv_cache_dtype: str, ranks: tuple[int | None, ...], **more: Any) -> list[list[list[int]]]:
    """Return continuations of the prompts by a server's engine, once for each of these data-parallel ranks."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def answer(llm: AsyncLLM, rank: int | None, index: int) -> list[int]:
        prompt: Any = {"prompt_token_ids": prompts()[index][: LENGTHS[index]]}
        async for result in llm.generate(prompt, sampling(), f"{rank}-{index}", data_parallel_rank=rank):
            tokens = list(result.outputs[0].token_ids)
        return tokens

    async def run() -> list[list[list[int]]]:
        small = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "gpu_memory_utilization": 0.1}
        given = {"enforce_eager": True, **small, **options({}, **more)}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(DEMO_MODEL), kv_cache_dtype=kv_cache_dtype, **given))
        try:
            if not torch.cuda.is_available():  # where vLLM's second stage fails unless it had such a step
                await llm.collective_rpc("execute_dummy_batch")
            return [await asyncio.gather(*(answer(llm, rank, i) for i in range(len(LENGTHS)))) for rank in ranks]
        finally:
            llm.shutdown()

    return asyncio.run(run())


def in_stages(dtype: str, activations: str) -> list[list[list[int]]]:
    return served(dtype, (None,), dtype=activations, pipeline_parallel_size=2, distributed_executor_backend="mp")


def in_replicas(dtype: str, activations: str) -> list[list[list[int]]]:
    return served(dtype, (0, 1), dtype=activations, data_parallel_size=2)


def kl(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean, in nats, of each position of `other` to `one`."""
    return (one.double().exp() * (one.double() - other.double())).sum(-1).mean().item()


def same(one: list[int], other: list[int]) -> int:
    """Tokens until the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))


def compare_ranks(
    dtype: str, activations: str, pool: ThreadPoolExecutor, *, latents: bool = False
) -> Iterator[tuple[str, Any]]:
    """Figures of decode context parallelism, each with its name, as they come; and what is not due to it: how far two
    kernels with different rounding are apart."""
    with tempfile.TemporaryDirectory() as folder:
        model = (deepseeks_heads if latents else one_kv_head)(Path(folder))
        given = (model, dtype, activations)
        engines = ((1, "auto"), (2, "auto"), (1, "triton"))
        one, two, triton = pool.map(lambda engine: apart(over_ranks, *given, *engine), engines)
    for ranks, found in ((1, one), (2, two)):
        yield f"KV tokens, DCP {ranks}", found["tokens"]
    for name, found in (("DCP 2", two), ("the Triton kernel, DCP 1", triton)):
        for chunk in CHUNKS:
            of_chunk = f"chunks of {chunk}"
            yield f"mean KL to DCP 1 of {name}, {of_chunk}", kl(one[of_chunk], found[of_chunk])
        equal = [same(*pair) for pair in zip(one["generated"], found["generated"], strict=True)]
        yield f"tokens of {GENERATED} as with DCP 1, {name}", equal
        likely = [torch.cat([x[:n] for x, n in zip(of["of generated"], equal, strict=True)]) for of in (one, found)]
        yield f"mean KL to DCP 1 of {name}, these tokens", kl(*likely)
        # Prefilled in one piece, so the pages are the same: what attention of the first decode alone differs by.
        alike = [i for i, (a, b) in enumerate(zip(one["generated"], found["generated"], strict=True)) if a[0] == b[0]]
        if alike:
            first = [torch.stack([of["of generated"][i][1] for i in alike]) for of in (one, found)]
            yield f"mean KL to DCP 1 of {name}, the first decode of {len(alike)} prompts", kl(*first)


def compare_engines(
    served_by: Callable[[str, str], list[list[list[int]]]], dtype: str, activations: str, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, Any]]:
    """Figures of an engine of several processes beside one of one."""
    expected = pool.submit(apart, alone, dtype, activations)
    found = pool.submit(apart, served_by, dtype, activations)
    figures = expected.result()
    tokens = figures.pop("generated")
    yield from figures.items()
    for index, of_rank in enumerate(found.result()):
        yield f"tokens of {GENERATED} as alone, rank {index}", [same(*x) for x in zip(tokens, of_rank, strict=True)]


CASES: dict[str, Callable[[str, str, ThreadPoolExecutor], Iterator[tuple[str, Any]]]] = {
    "dcp": compare_ranks,
    "latent-dcp": partial(compare_ranks, latents=True),
    "pp": partial(compare_engines, in_stages),
    "dp": partial(compare_engines, in_replicas),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--dtype", default="isoquant4", help="of the KV cache (default: %(default)s)")
    parser.add_argument("--activations", default="float16", help="default: %(default)s")
    asked = parser.parse_args()
    with ThreadPoolExecutor() as pool:
        for name, figure in CASES[asked.case](asked.dtype, asked.activations, pool):
            print(f"{asked.case} {asked.dtype} {asked.activations} {name}: {figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
