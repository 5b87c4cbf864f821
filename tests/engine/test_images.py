"""Prompts with a picture: packed pages hold its tokens, and a batch changes no answer. Weights are random."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import coverage_engine
import pytest
import torch
import transformers
from coverage_models import MODELS
from harness import engine
from packed_kv.formats import FORMATS
from packed_kv_quality.engines import attention_layers
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

pytest.importorskip("torchvision", reason="transformers' image processor of these models asks for it")

ON_GPU = torch.cuda.is_available()
PROCESSORS = {
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
}
"""Architecture -> processor, that of videos, pixels of a patch."""
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}
{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"""
SAMPLING = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def picture(seed: int, width: int = 112, height: int = 84) -> str:
    """A PNG of noise, as a data URL."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def message(text: str, *pictures: str) -> list[dict[str, Any]]:
    """A conversation of the chat endpoint."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


CONVERSATIONS = [
    message("What is this?", picture(0)),
    message("What is this?", picture(1)),
    message("Which of them is larger?", picture(2), picture(3, 224, 140)),
    message("No picture at all: count to ten"),
]


def save(architecture: str, tokenizer: str, folder: Path) -> str:
    """A model of `coverage_models` with a tokenizer, a processor and a chat template."""
    processor, video_processor, patch = PROCESSORS[architecture]
    text = transformers.AutoTokenizer.from_pretrained(tokenizer)
    text.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 224 * 224}
    getattr(transformers, processor)(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes, size=pixels),
        video_processor=getattr(transformers, video_processor)(**sizes),
        tokenizer=text,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    config = json.loads(json.dumps(MODELS[architecture]))
    config["text_config"]["vocab_size"] = len(text)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config |= dict(zip(names, text.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def answers(llm: LLM, conversations: list[list[dict[str, Any]]]) -> list[list[int]]:
    llm.reset_prefix_cache()
    llm.reset_mm_cache()
    results = llm.chat(conversations, SAMPLING, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("architecture", PROCESSORS)
def test_pictures(architecture: str, demo_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DummyModelLoader, "load_weights", coverage_engine.set_weights)
    coverage_engine.register(architecture)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}
    if ON_GPU:
        options |= {"dtype": "bfloat16", "enforce_eager": False, "compilation_config": coverage_engine.GRAPHS}
    with engine(
        save(architecture, demo_model, tmp_path), "tq4", load_format="dummy",
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
