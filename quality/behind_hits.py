#!/usr/bin/env python3
"""KL divergence from bf16 of the token that follows a short prompt behind a hit of the prefix cache, by two routes.

    behind_hits.py MODEL --text FILE [FILE ...] [--dtypes tq4] [--prefixes 1000 7500] [--prompts 64] [--rows FILE]

Prompts of 2 to 2 * --prompts tokens follow a prefix that the cache has, one prompt a step. The route of whole CUDA
graphs (`mixed_graphs`) reads the prefix where it lies, with rotated queries in fp16; the ordinary one unpacks it, and
reads it with queries of the model's dtype. An engine of `auto` has the expected distributions. `ratio` is the first
route's mean KL over the second's, of the same prompts, with its standard error (a prompt is a block). A calibration
file in the model's folder is used. On a CPU both routes are the same.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import csv_rows
import torch
from packed_kv_quality.engines import apart, engine, memory, model_of, prepare_environment
from packed_kv_quality.teacher_forced import token_kl
from packed_kv_quality.uncertainty import ratio
from transformers import AutoTokenizer

STEP_TOKENS = 512
LARGEST_BLOCK = 128
"""Tokens that a page has at most; a prefix is found in whole pages."""
GRAPHS = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}


def log_probs(dtype: str, mixed_graphs: bool, texts: list[list[int]], options: argparse.Namespace) -> torch.Tensor:
    """Log-probabilities of the token behind each prompt, fp32 [texts, prefixes, prompts, vocabulary].

    Raises RuntimeError if a prompt does not find its prefix, or takes another route than `mixed_graphs` says.
    """
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    found: list[torch.Tensor] = []
    replays = 0
    run = ModelCudaGraphManager.run_fullgraph

    def counted(manager: Any, graph: Any) -> Any:
        nonlocal replays
        replays += graph.uniform_token_count is None
        return run(manager, graph)

    ModelCudaGraphManager.run_fullgraph = counted
    given: dict[str, Any] = {
        "kv_cache_memory_bytes": options.kv_bytes, "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 8,
        "max_model_len": max(options.prefixes) + 2 * options.prompts + 2,
    }  # fmt: skip
    if torch.cuda.is_available():
        given |= {"enforce_eager": False, "compilation_config": GRAPHS}
    if dtype != "auto":
        given["additional_config"] = {"packed_kv": {"mixed_graphs": mixed_graphs}}
    with engine(options.model, dtype, enable_prefix_caching=True, **given) as llm:
        model: Any = model_of(llm)
        compute_logits = model.compute_logits

        def kept(hidden: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
            logits = compute_logits(hidden, *arguments, **more)
            found.append(logits[-1:].float().log_softmax(-1).cpu())
            return logits

        one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        for ids, prefix, number in itertools.product(texts, options.prefixes, range(options.prompts)):
            llm.reset_prefix_cache()  # else a prompt would find what the one before it has left
            llm.generate({"prompt_token_ids": ids[:prefix]}, one, use_tqdm=False)
            before, model.compute_logits = replays, kept
            (result,) = llm.generate({"prompt_token_ids": ids[: prefix + 2 * number + 2]}, one, use_tqdm=False)
            model.compute_logits = compute_logits
            if not max(0, prefix - LARGEST_BLOCK) < (result.num_cached_tokens or 0) <= prefix:
                raise RuntimeError(f"{result.num_cached_tokens} of {prefix} tokens are cached")
            if torch.cuda.is_available() and dtype != "auto" and (replays > before) != mixed_graphs:
                raise RuntimeError(f"{2 * number + 2} tokens took another route than mixed_graphs={mixed_graphs}")
    return torch.cat(found).unflatten(0, (len(texts), len(options.prefixes), options.prompts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model")
    add("--text", type=Path, nargs="+", required=True, help="each has prefixes and prompts")
    add("--dtypes", nargs="+", default=["tq4"], help="default: %(default)s")
    add("--prefixes", type=int, nargs="+", default=[1000, 7500], help="tokens (default: %(default)s)")
    add("--prompts", type=int, default=64, help="behind each prefix (default: %(default)s)")
    add("--kv-bytes", type=memory, default=memory("1G"), help="of the KV cache (default: 1G)")
    csv_rows.add_options(parser)
    options = parser.parse_args()
    prepare_environment(small_model=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [tokenizer.encode(file.read_text(encoding="utf-8")) for file in options.text]
    needed = max(options.prefixes) + 2 * options.prompts
    for file, ids in zip(options.text, texts, strict=True):
        if len(ids) < needed:
            parser.error(f"--text: {file} has {len(ids):,} tokens; give a text of at least {needed:,}")
    expected = apart(log_probs, "auto", False, texts, options)
    rows = []
    for dtype in options.dtypes:
        kl = [token_kl(expected, apart(log_probs, dtype, is_graph, texts, options)) for is_graph in (True, False)]
        for number, prefix in enumerate(options.prefixes):
            ours, theirs = ([text.tolist() for text in one[:, number]] for one in kl)
            found, error = ratio(ours, theirs)
            means = {name: f"{one[:, number].mean():.5f}" for name, one in zip(("graphs", "ordinary"), kl, strict=True)}
            rows.append({"dtype": dtype, "prefix": prefix, "prompts": len(texts) * options.prompts, **means,
                         "ratio": f"{found:.3f}", "ratio_error": f"{error or 0:.3f}"})  # fmt: skip
            print(*rows[-1].values(), flush=True)
    if options.rows:
        csv_rows.write(options.rows, rows, options.beside)
    return 0


if __name__ == "__main__":
    sys.exit(main())
