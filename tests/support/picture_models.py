"""Tiny models of text and pictures, with all that a chat needs, and conversations with pictures."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from coverage_models import MODELS
from PIL import Image

PROCESSORS = {
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
}
"""Architecture -> processor, that of videos, pixels of a patch."""
MERGED = 2
"""Patches in a row, and in a column, that become one token."""
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}
{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"""


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


def save(architecture: str, tokenizer: str, folder: Path) -> str:
    """A checkpoint of a model of `coverage_models`, in fp32 and with random weights that let the tokens before matter;
    its tokenizer, processor and chat template."""
    processor, video_processor, patch = PROCESSORS[architecture]
    text = transformers.AutoTokenizer.from_pretrained(tokenizer)
    text.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    sizes = {"patch_size": patch, "merge_size": MERGED, "temporal_patch_size": 2}
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 224 * 224}
    getattr(transformers, processor)(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes, size=pixels),
        video_processor=getattr(transformers, video_processor)(**sizes),
        tokenizer=text,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    config = json.loads(json.dumps(MODELS[architecture]))
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config |= dict(zip(names, text.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    config["text_config"]["vocab_size"] = len(text)
    for part in (config["text_config"], config["vision_config"]):
        part["initializer_range"] = part["hidden_size"] ** -0.5
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    read = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForImageTextToText.from_config(read, dtype=torch.float32).save_pretrained(folder)
    return str(folder)
