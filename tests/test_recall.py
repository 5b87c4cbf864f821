"""Recall prompts: as long as asked and no longer, the fact where it was asked for."""

from __future__ import annotations

import pytest
from engines import DEMO_MODEL
from recall import recall_prompts
from transformers import AutoTokenizer

TOKENIZER = AutoTokenizer.from_pretrained(DEMO_MODEL)


def count(text: str) -> int:
    return len(TOKENIZER.encode(text))


@pytest.mark.parametrize("seed", [0, 2])
def test_length(seed: int) -> None:
    """A sentence is up to some 60 tokens; a prompt one token too long would lose the end of its answer."""
    for tokens in range(100, 2000, 77):
        lengths = [count(prompt.prompt) for prompt in recall_prompts(count, 4, tokens, seed)]
        assert tokens - 100 < min(lengths) and max(lengths) <= tokens


def test_depth_and_answer() -> None:
    for prompt, depth in zip(recall_prompts(count, 3, 800, depths=(0.0, 0.5, 1.0)), (0.0, 0.5, 1.0), strict=True):
        place = prompt.prompt.index("Remember this") / prompt.prompt.index("Question:")
        assert abs(place - depth) < 0.15
        assert prompt.is_recalled(f" {prompt.answer}.") and not prompt.is_recalled(f" {prompt.answer}1")


def test_too_short() -> None:
    with pytest.raises(ValueError, match="longer than the tokens asked for"):
        recall_prompts(count, 1, 20)
