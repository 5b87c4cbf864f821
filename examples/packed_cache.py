"""Generate text in transformers over a cache of packed bytes, beside transformers' own.

    python examples/packed_cache.py [MODEL] [--dtype tq4] [--calibration turboquant_kv.json]

Needs no vLLM. Without a model, the checkout's demo model runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from packed_kv import FORMATS
from packed_kv.transformers import CACHE_ARGUMENT, PackedCache
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

DEMO_MODEL = Path(__file__).parents[1] / "models" / "demo-7m"
PROMPTS = [
    "Remember this: the secret number of Julia is 78868. Question: what is the secret number of Julia?",
    "Once upon a time there was a king who",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(DEMO_MODEL))
    parser.add_argument("--dtype", choices=FORMATS, default="tq4")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--tokens", type=int, default=100, help="to generate (default: %(default)s)")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.model)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)

    plain = DynamicCache(config=model.config)
    packed = PackedCache(
        options.dtype,
        calibration=options.calibration,
        config=model.config,
        attention_mask=inputs["attention_mask"],  # which of a row's tokens is the first: prompts are padded
    )
    for name, cache in (("transformers", plain), (options.dtype, packed)):
        tokens = model.generate(
            **inputs,
            **{CACHE_ARGUMENT: cache},
            max_new_tokens=options.tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        print(f"{name}:")
        for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
            print(f"    {text!r}")
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    print(
        f"{tokens.shape[1]} tokens of {len(PROMPTS)} sequences: {whole:,} bytes, {packed.nbytes:,} in {options.dtype},"
    )
    print(f"of which the last {packed.settings.recent_tokens} tokens at 8 bits are the part that does not grow")


if __name__ == "__main__":
    main()
