"""Recall prompts: as long as asked, the fact where it was asked for, in plain text and in a chat template."""

from __future__ import annotations

import pytest
from packed_kv_quality.engines import DEMO_MODEL
from packed_kv_quality.recall import recall_prompts
from transformers import AutoTokenizer, PreTrainedTokenizerBase

TOKENIZER = AutoTokenizer.from_pretrained(DEMO_MODEL)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("seed", [0, 2])
def test_length(seed: int) -> None:
    """All prompts of a set run in lockstep: they are equally long, whatever their names and numbers."""
    for tokens in range(100, 2000, 77):
        assert {len(prompt.token_ids) for prompt in recall_prompts(TOKENIZER, 4, tokens, seed)} == {tokens}


def test_depth_and_answer() -> None:
    depths = (0.0, 0.5, 1.0)
    for prompt, depth in zip(recall_prompts(TOKENIZER, 3, 800, depths=depths), depths, strict=True):
        text = TOKENIZER.decode(prompt.token_ids)
        place = text.index("Remember this") / text.index("Question:")
        assert abs(place - depth) < 0.15
        assert f"is {prompt.answer}." in text
        assert TOKENIZER.decode(prompt.token_ids + prompt.answer_ids).endswith(f" is {prompt.answer}")
        assert prompt.is_recalled(f" {prompt.answer}.") and not prompt.is_recalled(f" {prompt.answer}1")


def test_chat_template(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    (prompt,) = recall_prompts(chat_tokenizer, 1, 300, chat=True)
    assert len(prompt.token_ids) == 300
    text = chat_tokenizer.decode(prompt.token_ids).strip()
    assert text.startswith("<user>") and text.count("Remember this") == 1
    message, answer = text.split("</user>")
    assert message.endswith("?")
    assert answer.startswith("<assistant>The secret number of ") and answer.endswith(" is")


def test_a_template_that_changes_the_message(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    chat_tokenizer.chat_template = "{{ messages[0].content | lower }}"
    with pytest.raises(ValueError, match="does not repeat the message"):
        recall_prompts(chat_tokenizer, 1, 300, chat=True)


def test_too_short() -> None:
    with pytest.raises(ValueError, match="longer than the tokens asked for"):
        recall_prompts(TOKENIZER, 1, 20)
