"""Recall prompts: a fact planted in prose and asked for at its end, so that the answer must come from the KV cache.

A prompt holds one fact; the demo model does not tell several apart. The prompts of a set differ in the fact and in
its depth only, so two of them share the prose before the shallower fact, and a prefix cache reuses it. All of a set are
equally long in tokens, so that they can run in lockstep; the last sentence of the prose is cut to fit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .teacher_forced import beginning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROSE = Path(__file__).with_name("prose.txt")
"""The opening of Pride and Prejudice (Jane Austen, 1813; public domain)."""

ANSWER_TOKENS = 7
"""A space and five digits, and one token more to see that the number ends there."""

NAMES = (
    "Victor", "Alice", "Henry", "Martha", "Edward", "Laura", "George", "Clara",
    "Oscar", "Helen", "Walter", "Rose", "Frank", "Emma", "Arthur", "Julia",
    "Samuel", "Nora", "Philip", "Grace", "Daniel", "Ruth", "Simon", "Agnes",
    "Thomas", "Sarah", "Robert", "Ellen", "Charles", "Fanny", "James", "Lucy",
)  # fmt: skip
FACT = "Remember this: the secret number of {name} is {number}."
QUESTION = "Question: what is the secret number of {name}? Answer: the secret number of {name} is"
CHAT_QUESTION = "What is the secret number of {name}?"
CHAT_ANSWER = "The secret number of {name} is"
"""Start of a chat model's answer, so that the number comes next."""


@dataclass(frozen=True)
class RecallPrompt:
    """Token ids of a prompt, the number that it asks for, as text and as the token ids that follow the prompt, and how
    deep the fact lies (0: at the start, 1: before the question)."""

    token_ids: list[int]
    answer: str
    answer_ids: list[int]
    depth: float

    def is_recalled(self, completion: str) -> bool:
        """True if a completion of the prompt begins with the number."""
        return re.match(rf"\W*{self.answer}(?!\d)", completion) is not None


def recall_prompts(
    tokenizer: PreTrainedTokenizerBase,
    facts: int = 20,
    tokens: int = 1800,
    seed: int = 0,
    depths: Sequence[float] | None = None,
    chat: bool = False,
) -> list[RecallPrompt]:
    """Make `facts` prompts of `tokens` tokens.

    Args:
        tokenizer: of the model; the tokens that it puts before a text are counted.
        facts: number of prompts.
        tokens: length of a prompt; at least a fact and a question, some 60 tokens, and the chat template.
        seed: of names and numbers.
        depths: of the facts, one each, 0 to 1; None: evenly spread.
        chat: put prose and question into a user's message of the tokenizer's chat template.

    Raises ValueError if a fact and its question alone are longer than `tokens`, or if the template is of no use.
    """
    rng = random.Random(seed)
    names = [rng.choice(NAMES) for _ in range(facts)]
    numbers = [str(rng.randrange(10_000, 100_000)) for _ in range(facts)]
    depths = [(index + 0.5) / facts for index in range(facts)] if depths is None else depths
    head, tail = _chat_frame(tokenizer) if chat else ("", "")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    before = encode(head) if chat else beginning(tokenizer)
    sentences = sentences_of_prose(tokenizer)
    prompts = []
    for name, number, depth in zip(names, numbers, depths, strict=True):
        fact = encode("\n\n" + FACT.format(name=name, number=number) + "\n\n")
        asked = CHAT_QUESTION + tail + CHAT_ANSWER if chat else QUESTION
        question = encode("\n\n" + asked.format(name=name))
        prose = prose_of(sentences, tokens - len(before) - len(fact) - len(question))
        at = round(depth * len(prose))
        parts = (before, *prose[:at], fact, *prose[at:], question)
        prompts.append(RecallPrompt([token for part in parts for token in part], number, encode(" " + number), depth))
    return prompts


def _chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The chat template's text before and after a user's message, up to the beginning of the answer."""
    mark = "MESSAGE"
    messages = [{"role": "user", "content": mark}]
    rendered = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    head, found, tail = rendered.partition(mark)
    if not found:
        raise ValueError("the chat template does not repeat the message as it is")
    return head, tail


def sentences_of_prose(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each sentence of the prose, with the space before it."""
    sentences = re.split(r'(?:(?<=[.!?])|(?<=[.!?]"))\s+', PROSE.read_text(encoding="utf-8").strip())
    return [tokenizer.encode(f" {sentence}", add_special_tokens=False) for sentence in sentences]


def prose_of(sentences: list[list[int]], tokens: int) -> list[list[int]]:
    """Exactly `tokens` tokens of sentences, from the start of the prose, which is repeated where it is too short."""
    if tokens < 0:
        raise ValueError(f"a fact and its question are {-tokens} tokens longer than the tokens asked for")
    prose: list[list[int]] = []
    while tokens:
        sentence = sentences[len(prose) % len(sentences)][:tokens]
        prose.append(sentence)
        tokens -= len(sentence)
    return prose
