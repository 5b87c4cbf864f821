"""Decode step of an 8B-shaped model (dummy weights) in the real engine with CUDA graphs, for ours and vLLM's dtypes.

    python benchmarks/decode.py [--dtypes NAME ...] [--shapes 32x8192 ...] [--steps N] [--csv FILE]

Each dtype gets an engine of its own, in its process. When all prompts of a shape are computed, every request decodes
in every step, and the engine's steps are timed one by one, from scheduling to sampled tokens. Rows hold the median.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 32000, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WARM_UP_STEPS = 5
COLUMNS = ["dtype", "requests", "context", "step_ms", "gpu", "vllm", "torch", "commit"]


def measure(dtype: str, shapes: list[tuple[int, int]], steps: int) -> None:
    """In a process of its own: print a JSON row a shape."""
    import torch
    import vllm
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        llm = LLM(
            folder, kv_cache_dtype=dtype, load_format="dummy", skip_tokenizer_init=True, seed=0,
            max_model_len=max(context + 2 * requests for requests, context in shapes) + steps + 128,
            max_num_batched_tokens=8192, max_num_seqs=max(requests for requests, _ in shapes),
            gpu_memory_utilization=0.9,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        )  # fmt: skip

    for requests, context in shapes:
        llm.reset_prefix_cache()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, MODEL["vocab_size"], (requests, context), generator=generator).tolist()
        times = decode_steps(llm.llm_engine, ids, steps)
        row = (dtype, requests, context, f"{statistics.median(times) * 1e3:.3f}", torch.cuda.get_device_name(),
               vllm.__version__, torch.__version__)  # fmt: skip
        print("ROW " + json.dumps(row), flush=True)


def decode_steps(engine: LLMEngine, prompts: list[list[int]], steps: int) -> list[float]:
    """Seconds of each of `steps` engine steps in which all prompts decode."""
    from vllm import SamplingParams

    # Prompts that are ready decode while the last ones are computed: hence the tokens to spare.
    sampling = SamplingParams(
        max_tokens=steps + 2 * len(prompts) + 64, temperature=0, ignore_eos=True, detokenize=False
    )
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": ids}, sampling)
    ready: set[str] = set()
    while len(ready) < len(prompts):
        ready.update(output.request_id for output in engine.step() if output.outputs[0].token_ids)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - started)
        assert len(outputs) == len(prompts), len(outputs)
    engine.abort_request([str(i) for i in range(len(prompts))])
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["auto", "fp8", "isoquant4", "isoquant3", "turboquant25"])
    parser.add_argument("--shapes", nargs="+", default=["32x8192", "128x2048"], help="requests x context")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    if options.worker:
        measure(options.worker, shapes, options.steps)
        return 0
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    rows, baseline = [], {}
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    for dtype in options.dtypes:
        command = [
            sys.executable,
            __file__,
            "--worker",
            dtype,
            "--shapes",
            *options.shapes,
            "--steps",
            str(options.steps),
        ]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            print(f"{dtype} failed:\n{run.stderr[-3000:]}", flush=True)
        for line in run.stdout.splitlines():
            if line.startswith("ROW "):
                row = json.loads(line[4:])
                rows.append([*row, commit.strip()])
                name, requests, context, step = row[:4]
                first = baseline.setdefault((requests, context), float(step))
                print(
                    f"{name:20} {requests:4} x {context:5}  {float(step):7.2f} ms  {float(step) / first:.2f}",
                    flush=True,
                )
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
