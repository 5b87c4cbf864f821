"""The shape of an 8B model, whose engines were measured, and rows of what was."""

from __future__ import annotations

import csv

from checkout import REPO

RESULTS = REPO / "benchmarks" / "results"
SHAPE_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 65536, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
"""The shape that benchmarks/bench_engine.py measures."""


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))
