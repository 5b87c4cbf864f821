#!/usr/bin/env python3
"""Changes by preemption: tokens of requests that share a small cache, beside those of each request alone.

    preemption.py [--dtype NAME] [--window TOKENS] [--no-prefix-caching] [--earlier TOKENS ...]

A preempted request is computed again. With prefix caching it finds its own blocks, and reads tokens from pages that it
read from the recent window before. `--earlier N` lets each hit end N tokens earlier, so that these are computed again.
The demo model in fp32 on a CPU, greedy, 13 requests of 60 to 180 tokens and 64 generated ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from packed_kv_quality.engines import CHECKOUT, DEMO_MODEL, engine, prepare_environment, scheduler

REQUESTS, TOKENS = 13, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtype", default="isoquant4", help="default: %(default)s")
    add("--window", type=int, default=64, help="tokens of the recent window (default: %(default)s)")
    add("--no-prefix-caching", action="store_true")
    add("--earlier", type=int, nargs="+", default=[0, 64], metavar="TOKENS", help="default: 0 64")
    add("--blocks", type=int, default=60, help="of the cache, 32 tokens each (default: %(default)s)")
    options = parser.parse_args()
    prepare_environment(small_model=True)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 32,
        "num_gpu_blocks_override": options.blocks,
        "enable_prefix_caching": not options.no_prefix_caching,
        "scheduler_reserve_full_isl": False,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "additional_config": {"packed_kv": {"recent_tokens": options.window}},
    }
    with engine(str(DEMO_MODEL), options.dtype, **settings) as llm:
        ids = llm.get_tokenizer().encode((CHECKOUT / "LICENSE").read_text())
        prompts = [ids[k * 211 % (len(ids) - 200) :][: 60 + 13 * k % 120] for k in range(REQUESTS)]
        alone = [answer for prompt in prompts for answer in answers(llm, [prompt])]
        for earlier in options.earlier:
            preempted = watch(llm, earlier)
            report(options, earlier, preempted, alone, answers(llm, prompts))
    return 0


def answers(llm: Any, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens of each answer, and their log-probabilities."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=0, detokenize=False)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [result.outputs[0] for result in llm.generate(inputs, sampling, use_tqdm=False)]
    return [(list(x.token_ids), [next(iter(step.values())).logprob for step in x.logprobs]) for x in found]


def watch(llm: Any, earlier: int) -> list[str]:
    """Let hits end `earlier` tokens earlier; the list returned gets the names of requests as they are preempted."""
    core, preempted = scheduler(llm), []
    coordinator = core.kv_cache_manager.coordinator
    find, preempt = type(coordinator).find_longest_cache_hit, type(core)._preempt_request

    def find_shorter(hashes: Any, longest: int) -> Any:
        found = find(coordinator, hashes, longest)
        return find(coordinator, hashes, max(0, found[1] - earlier)) if earlier and found[1] else found

    def note(request: Any, *arguments: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(core, request, *arguments, **named)

    coordinator.find_longest_cache_hit, core._preempt_request = find_shorter, note
    return preempted


def report(options: argparse.Namespace, earlier: int, preempted: list[str], alone: list, together: list) -> None:
    differences, changed = [], 0
    for (tokens, log_probs), (others, other_log_probs) in zip(alone, together, strict=True):
        same = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), len(tokens))
        changed += same < len(tokens)
        differences += [abs(a - b) for a, b in zip(log_probs[:same], other_log_probs[:same], strict=True)]
    hits = "no prefix caching" if options.no_prefix_caching else f"hits end {earlier} tokens earlier"
    print(f"{options.dtype}, window {options.window}, {hits}: {len(set(preempted))} of {len(alone)} requests",
          f"preempted, {changed} with other tokens; log-probabilities differ by {max(differences):.2g} at most,",
          f"{statistics.fmean(differences):.2g} on average", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
