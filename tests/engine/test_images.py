"""Prompts with a picture: packed pages hold its tokens, and a batch changes no answer. Weights are random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coverage_engine
import exact_products
import pytest
import torch
from harness import engine
from packed_kv.formats import FORMATS
from packed_kv_quality.engines import attention_layers
from vllm import LLM, SamplingParams

pytest.importorskip("torchvision", reason="image processors ask for it; requirements.txt says why it is not there")

import picture_models
from picture_models import message, picture

ON_GPU = torch.cuda.is_available()
SAMPLING = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
CONVERSATIONS = [
    message("What is this?", picture(0)),
    message("What is this?", picture(1)),
    message("Which of them is larger?", picture(2), picture(3, 224, 140)),
    message("No picture at all: count to ten"),
]


def answers(llm: LLM, conversations: list[list[dict[str, Any]]]) -> list[list[int]]:
    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    results = llm.chat(conversations, SAMPLING, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("architecture", picture_models.PROCESSORS)
def test_pictures(architecture: str, demo_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coverage_engine.register(architecture)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}
    if ON_GPU:
        options |= {"dtype": "bfloat16", "enforce_eager": False, "compilation_config": coverage_engine.GRAPHS}
    else:
        exact_products.install(monkeypatch)
    with engine(
        picture_models.save(architecture, demo_model, tmp_path), "tq4",
        limit_mm_per_prompt={"image": 2, "video": 0}, **options,
    ) as llm:  # fmt: skip
        layers = [layer for layer in attention_layers(llm) if hasattr(layer, "kv_cache_dtype")]
        assert len(layers) == 4
        for layer in layers:
            assert layer.kv_cache.dtype == torch.uint8
            assert layer.kv_cache.shape[-1] == FORMATS["tq4"].slot_bytes(layer.head_size)
        alone = [tokens for conversation in CONVERSATIONS for tokens in answers(llm, [conversation])]
        together = answers(llm, CONVERSATIONS)
    assert alone[0] != alone[1], "the picture does not matter"
    if ON_GPU:  # rounds a row otherwise in another batch
        equal = [tokens[0] == other[0] for tokens, other in zip(alone, together, strict=True)]
        assert sum(equal) >= len(equal) - 1
    else:
        assert together == alone
