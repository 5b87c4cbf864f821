#!/usr/bin/env python3
"""Share KV pages on disk between engines with different numbers of ranks: tokens found, tokens generated.

    python experiments/tier_ranks.py [--ranks 1 2 1] [--model models/demo-7m]

Engines with `"canonical_layout": true` and one folder run one after the other, each with the next number of
tensor-parallel ranks; each is asked twice, so that the second answer comes from its own prefix cache. Needs no GPU.
Ranks split sums, so log-probabilities agree only up to the rounding of --activations.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from packed_kv_quality.engines import DEMO_MODEL, engine, prepare_environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 1])
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--dtype", default="isoquant4")
    parser.add_argument("--activations", default="float32", help="of the model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of the prompt (default: %(default)s)")
    options = parser.parse_args()
    prepare_environment(small_model=True)
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    import vllm
    from cpu_offload import connector  # type: ignore[import-not-found]

    print(f"vLLM {vllm.__version__}, PyTorch {torch.__version__}, {vars(options)}")
    prompt = torch.randint(3, 250, (options.tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    sampling = vllm.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            settings = {
                "kv_transfer_config": connector(folder, canonical_layout=True),
                "tensor_parallel_size": ranks,
                "distributed_executor_backend": "mp",
                "dtype": options.activations,
                "block_size": 32,
                "max_model_len": 512,
            }
            with engine(options.model, options.dtype, **settings) as llm:
                for _ in range(2):
                    (result,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
                    (output,) = result.outputs
                    logprob = sum(
                        step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)
                    )
                    print(f"{ranks} ranks: {result.num_cached_tokens} of {len(prompt)} tokens found,", end=" ")
                    print(f"tokens {list(output.token_ids)}, log-probability {logprob:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
