#!/usr/bin/env python3
"""Changes by the recent window and the prefix cache with `n > 1` and rescoring, on the demo model on a CPU in fp32.

    samples_and_rescoring.py [--dtypes auto tq4] [--prompts 6] [--tokens 64] [--n 4]

Samples: each prompt with `n` seeded samples in one request, beside each of them in a request of its own with an empty
prefix cache: where they part, and by how much log-probabilities differ before that. Rescoring: `prompt_logprobs` of a
prompt and its answer, beside the log-probabilities that the answer was sampled with; of these the ratios that
reinforcement learning takes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

from packed_kv_quality.engines import CHECKOUT, DEMO_MODEL, engine, prepare_environment
from preemption import watch

EARLIER = "hits end 64 tokens earlier"
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    EARLIER: {},
    "no prefix cache": {"enable_prefix_caching": False},
    "no window": {"additional_config": {"packed_kv": {"recent_tokens": 0}}},
    "no window, no prefix cache": {
        "enable_prefix_caching": False, "additional_config": {"packed_kv": {"recent_tokens": 0}},
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["auto", "tq4"], help="default: auto tq4")
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    add("--prompts", type=int, default=6, help="of 200 tokens (default: %(default)s)")
    add("--tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    add("--n", type=int, default=4, help="samples of a prompt (default: %(default)s)")
    options = parser.parse_args()
    prepare_environment(small_model=True)
    heads = [
        "dtype", "setting", "samples that part from those alone, after tokens",
        "log-probabilities until then differ by: largest; mean", "rescored: largest; mean; largest ratio",
    ]  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for dtype in options.dtypes:
        for name in options.settings:
            if dtype == "auto" and ("window" in name or name == EARLIER):
                continue
            common: dict[str, Any] = {"dtype": "float32", "block_size": 32, "max_model_len": 1024}
            with engine(str(DEMO_MODEL), dtype, **common, **SETTINGS[name]) as llm:
                if name == EARLIER:
                    watch(llm, earlier=64)
                print(f"| {dtype} | {name} | {samples(llm, options)} | {rescored(llm, options)} |", flush=True)
    return 0


def prompts_of(llm: Any, number: int) -> list[list[int]]:
    ids = llm.get_tokenizer().encode((CHECKOUT / "LICENSE").read_text())
    return [ids[211 * k % (len(ids) - 200) :][:200] for k in range(number)]


def generate(llm: Any, ids: list[int], **sampling: Any) -> Any:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=1.0, ignore_eos=True, detokenize=False, **sampling)
    return llm.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)[0]


def numbers(output: Any) -> tuple[list[int], list[float]]:
    """Tokens of an answer, and their log-probabilities."""
    tokens = list(output.token_ids)
    return tokens, [step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)]


def samples(llm: Any, options: argparse.Namespace) -> str:
    """`n` samples of one request, beside those of requests alone: vLLM seeds sample i with seed + i."""
    parted, differences = [], [0.0]
    for prompt in prompts_of(llm, options.prompts):
        llm.reset_prefix_cache()
        together = generate(llm, prompt, n=options.n, seed=7, max_tokens=options.tokens, logprobs=0).outputs
        for sample, output in enumerate(together):
            llm.reset_prefix_cache()
            (alone,) = generate(llm, prompt, seed=7 + sample, max_tokens=options.tokens, logprobs=0).outputs
            (ours, our_numbers), (theirs, their_numbers) = numbers(output), numbers(alone)
            same = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
            if same is not None:
                parted.append(same)
            differences += [abs(a - b) for a, b in zip(our_numbers[:same], their_numbers[:same], strict=True)]
    total = options.prompts * options.n
    where = f"{len(parted)} of {total}" + (f", after {min(parted)} to {max(parted)}" if parted else "")
    return f"{where} | {max(differences):.3g}; {statistics.mean(differences):.3g}"


def rescored(llm: Any, options: argparse.Namespace) -> str:
    differences = []
    for prompt in prompts_of(llm, options.prompts):
        llm.reset_prefix_cache()
        tokens, sampled = numbers(generate(llm, prompt, seed=7, max_tokens=options.tokens, logprobs=0).outputs[0])
        scored = generate(llm, prompt + tokens, seed=7, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        again = [step[token].logprob for token, step in zip(tokens, scored[len(prompt) :], strict=True)]
        differences += [b - a for a, b in zip(sampled, again, strict=True)]
    sizes = [abs(difference) for difference in differences]
    return f"{max(sizes):.3g}; {statistics.mean(sizes):.3g}; {math.exp(max(sizes)):.3g}"


if __name__ == "__main__":
    sys.exit(main())
