#!/usr/bin/env python3
"""Effect of the recent window beside layers of other kinds: figures of docs/attention.md, on a GPU or a CPU.

    python experiments/window_effect.py skipped    # a skipped layer: KL to bf16 pages, without the window and with it
    python experiments/window_effect.py states     # layers that keep a state (random models): the same
    python experiments/window_effect.py drafts     # EAGLE drafts, most of them rejected: tokens against those without

One short text of 400 tokens (states: 300 random ones), read in chunks of 1 token, which is the decode route on CUDA,
and longer ones. Behind each figure: vLLM's layout, and kind, layers, tokens of a block and page bytes of each group of
caches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics

from packed_kv_quality.engines import prepare_environment

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests" / "support"))
prepare_environment(small_model=True)  # before vLLM is imported: its scheduler is looked at

import coverage_engine  # noqa: E402
import tiny_models  # type: ignore[import-not-found]  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from coverage_models import MODELS  # noqa: E402
from harness import (  # type: ignore[import-not-found]  # noqa: E402
    engine,
    mean_kl,
    scheduler,
    teacher_forced_logits,
)
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: E402

MODEL, DTYPE, WINDOW = str(REPO / "models" / "demo-7m"), "turboquant25", 64
ON_GPU = torch.cuda.is_available()
OPTIONS = {
    "dtype": "float16" if ON_GPU else "float32", "max_model_len": 1024, "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
}  # fmt: skip
STATES = ("FalconH1ForCausalLM", "Qwen3NextForCausalLM")
TOKENS = 60


def groups(llm: LLM) -> str:
    layout = llm.llm_engine.vllm_config.cache_config.kv_cache_layout
    found = []
    for group in scheduler(llm).kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        found.append((type(spec).__name__, len(group.layer_names), spec.block_size, spec.page_size_bytes))
    return f"{layout} {found}"


def skipped() -> None:
    with engine(MODEL, "auto", **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode(topics["assignment"])[:400]
        truth = teacher_forced_logits(llm, ids, 64)
    for window in (0, WINDOW):
        with engine(MODEL, DTYPE, recent_tokens=window, kv_cache_dtype_skip_layers=["2"], **OPTIONS) as llm:
            found = [mean_kl(truth, teacher_forced_logits(llm, ids, chunk)) for chunk in (1, 7)]
            print(f"layer 2 skipped, window {window}: KL in chunks of 1, 7:", *map("{:.4f}".format, found), groups(llm))


def states() -> None:
    DummyModelLoader.load_weights = coverage_engine.set_weights
    if ON_GPU:
        coverage_engine.keep_one_configuration()
    ids = torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    more = {"gdn_prefill_backend": "triton"} if ON_GPU else {}
    options = {**OPTIONS, "load_format": "dummy", "skip_tokenizer_init": True, "additional_config": more}
    for architecture in STATES:
        coverage_engine.register(architecture)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODELS[architecture]))
            truth: list[torch.Tensor] = []
            for dtype, window in (("auto", 0), (DTYPE, 0), (DTYPE, WINDOW)):
                with engine(folder, dtype, recent_tokens=window, **options) as llm:
                    logits = [teacher_forced_logits(llm, ids, chunk) for chunk in (1, 37)]
                    truth = truth or logits
                    found = [mean_kl(*pair) for pair in zip(truth, logits, strict=True)]
                    kl = " ".join(map("{:.4f}".format, found))
                    print(f"{architecture}, {dtype}, window {window}: KL in chunks of 1, 37: {kl} {groups(llm)}")


def drafts() -> None:
    graphs = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    options = {**OPTIONS, **(graphs if ON_GPU else {})}
    config = transformers.AutoConfig.from_pretrained(MODEL)
    without: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        for heads in (0, config.num_key_value_heads, 1):
            speculative = None
            if heads:
                draft = tiny_models.eagle(Path(folder, str(heads)), heads, config.head_dim, config)
                speculative = {"method": "eagle", "model": draft, "num_speculative_tokens": 4}
            with engine(MODEL, DTYPE, recent_tokens=WINDOW, speculative_config=speculative, **options) as llm:
                ids = llm.get_tokenizer().encode(topics["assignment"] + topics["class"] + topics["comparisons"])
                prompts = [{"prompt_token_ids": ids[i : i + 250]} for i in (0, 300, 600, 900)]
                sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
                results = llm.generate(prompts, sampling, use_tqdm=False)
                found = [list(result.outputs[0].token_ids) for result in results]
                without = without or found
                same = [
                    sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=True)))
                    for pair in zip(without, found, strict=True)
                ]
                print(f"draft of {heads} heads: tokens until the first that differs, of {TOKENS}: {same} {groups(llm)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {part.__name__: part for part in (skipped, states, drafts)}
    parser.add_argument("part", choices=list(parts))
    parts[parser.parse_args().part]()


if __name__ == "__main__":
    main()
