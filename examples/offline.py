"""Generate text in vLLM with keys and values of 4.25 bits.

    python examples/offline.py [MODEL] [--kv-cache-dtype tq4]

vLLM must be patched (`packed-kv-patch apply`). Without a model, the checkout's demo model runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from packed_kv import FORMATS
from vllm import LLM, SamplingParams

DEMO_MODEL = Path(__file__).parents[1] / "models" / "demo-7m"
PROMPTS = [
    "Remember this: the secret number of Julia is 78868. Question: what is the secret number of Julia?",
    "Once upon a time there was a king who",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(DEMO_MODEL))
    parser.add_argument("--kv-cache-dtype", choices=FORMATS, default="tq4")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        kv_cache_dtype=options.kv_cache_dtype,
        # The demo needs little. For a model of yours leave these three out: vLLM then takes the memory that is free.
        kv_cache_memory_bytes=64 << 20,
        max_model_len=1024,
        enforce_eager=True,
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":  # vLLM's processes import this file again
    main()
