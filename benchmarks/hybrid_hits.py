#!/usr/bin/env python3
"""Prefix-cache hits in conversations with a hybrid model: the share of prompt tokens found, by dtype and match unit.

A random model with 3 gated delta nets per attention layer. State and token bytes are an eighth of those of
Qwen3.6-35B-A3B (2 MiB and 48 KiB of state; 2,048 bytes per token and attention layer in bf16), so blocks are as long as
the large model's, and so are the hits. The tokens that the model generates do not matter.

    python benchmarks/hybrid_hits.py

Conversations share a first prompt and run together. Each turn adds a question and an answer to the next prompt.
Columns: dtype, match unit (`--prefix-match-unit`), tokens of a block, KV tokens of the cache by vLLM's count, tokens of
prompts, share of them that was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from packed_kv_quality.engines import engine, kv_tokens, prepare_environment, scheduler

if TYPE_CHECKING:
    from vllm import LLM

MODEL = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "dtype": "bfloat16", "vocab_size": 256,
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BLOCK = 16
"""`--block-size` before vLLM aligns it with the state; CUDA's default."""


def main() -> int:
    options = parse_arguments()
    prepare_environment(small_model=True)
    import vllm
    from coverage_engine import register

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine() + " CPU"
    print(f"{device}, vLLM {vllm.__version__}, PyTorch {torch.__version__}, {vars(options)}")
    register("Qwen3NextForCausalLM")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        print("| dtype | match unit | tokens of a block | KV tokens | prompts | found |")
        print("|---|---|---|---|---|---|")
        for dtype, unit in itertools.product(("auto", options.dtype), (None, options.unit)):
            with start(folder, dtype, unit, options.conversations) as llm:
                asked, found = converse(llm, options)
                block, size = llm.llm_engine.vllm_config.cache_config.block_size, kv_tokens(llm)
                unit_of = f"{scheduler(llm).hash_block_size:,}"
            print(f"| {dtype} | {unit_of} | {block:,} | {size:,} | {asked:,} | {found / asked:.0%} |", flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtype", default="tq4", help="what is compared with auto (default: %(default)s)")
    add("--unit", type=int, default=16, help="of every second row (default: %(default)s)")
    add("--conversations", type=int, default=4, help="at a time (default: %(default)s)")
    add("--turns", type=int, default=6, help="of each (default: %(default)s)")
    add("--common", type=int, default=1000, help="tokens of the prompt in common (default: %(default)s)")
    add("--question", type=int, default=400, help="tokens of a question, up to twice that (default: %(default)s)")
    add("--answer", type=int, default=16, help="tokens of an answer (default: %(default)s)")
    return parser.parse_args()


def start(folder: str, dtype: str, unit: int | None, conversations: int):  # -> AbstractContextManager[LLM]
    on_gpu = {"additional_config": {"gdn_prefill_backend": "triton"}} if torch.cuda.is_available() else {}
    return engine(
        folder, dtype, load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=256 << 20,
        max_model_len=32768, max_num_seqs=conversations, max_num_batched_tokens=8192, block_size=BLOCK,
        enable_prefix_caching=True, mamba_cache_mode="align", mamba_ssm_cache_dtype="float32",
        prefix_match_unit=unit, **on_gpu,
    )  # fmt: skip


def converse(llm: LLM, options: argparse.Namespace) -> tuple[int, int]:
    """Tokens of all prompts, and those that the prefix cache had."""
    from vllm import SamplingParams

    random = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(3, 256, (length,), generator=random).tolist()

    sampling = SamplingParams(max_tokens=options.answer, temperature=0, ignore_eos=True, detokenize=False)
    common = text(options.common)
    prompts = [list(common) for _ in range(options.conversations)]
    asked = found = 0
    for _ in range(options.turns):
        for prompt in prompts:
            prompt += text(int(torch.randint(options.question, 2 * options.question + 1, (), generator=random)))
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        for prompt, result in zip(prompts, results, strict=True):
            asked += len(prompt)
            found += result.num_cached_tokens
            prompt += result.outputs[0].token_ids
    return asked, found


if __name__ == "__main__":
    raise SystemExit(main())
