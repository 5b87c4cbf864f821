"""Recall prompts: a fact planted in prose and asked for at its end, so that the answer must come from the KV cache.

A prompt holds one fact; the demo model does not tell several apart. The prompts of a set differ in the fact and in
its depth only, so two of them share the prose before the shallower fact, and a prefix cache reuses it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class RecallPrompt:
    """A prompt, the number that it asks for, and how deep the fact lies (0: at the start, 1: before the question)."""

    prompt: str
    answer: str
    depth: float

    def is_recalled(self, completion: str) -> bool:
        """Whether a completion of the prompt begins with the number."""
        return re.match(rf"\W*{self.answer}(?!\d)", completion) is not None


def recall_prompts(
    count_tokens: Callable[[str], int],
    facts: int = 20,
    tokens: int = 1800,
    seed: int = 0,
    depths: Sequence[float] | None = None,
) -> list[RecallPrompt]:
    """Make `facts` prompts of about `tokens` tokens (never more).

    Args:
        count_tokens: counts the tokens of a text, special tokens included.
        facts: number of prompts.
        tokens: length of a prompt; at least a fact and a question, some 60 tokens.
        seed: of names and numbers.
        depths: of the facts, one each, 0 to 1; None: evenly spread.

    Raises ValueError if a fact and its question alone are longer than `tokens`.
    """
    rng = random.Random(seed)
    names = [rng.choice(NAMES) for _ in range(facts)]
    numbers = [str(rng.randrange(10_000, 100_000)) for _ in range(facts)]
    longest = max((_join([], 0, name, number) for name, number in zip(names, numbers, strict=True)), key=count_tokens)
    prose = _prose(count_tokens, tokens - count_tokens(longest))
    depths = [(index + 0.5) / facts for index in range(facts)] if depths is None else depths
    prompts = []
    for name, number, depth in zip(names, numbers, depths, strict=True):
        sentences = prose
        while count_tokens(prompt := _join(sentences, round(depth * len(sentences)), name, number)) > tokens:
            sentences = sentences[:-1]  # a sentence's tokens depend on what stands before it
        prompts.append(RecallPrompt(prompt, number, depth))
    return prompts


def _join(prose: list[str], position: int, name: str, number: str) -> str:
    """The prose with the fact before sentence `position`, and the question; both in lines of their own."""
    fact = f"Remember this: the secret number of {name} is {number}."
    question = f"Question: what is the secret number of {name}? Answer: the secret number of {name} is"
    parts = (" ".join(prose[:position]), fact, " ".join(prose[position:]), question)
    return "\n\n".join(part for part in parts if part)


def _prose(count_tokens: Callable[[str], int], tokens: int) -> list[str]:
    """As many sentences as `tokens` hold, from the start of the prose, which is repeated where it is too short."""
    if tokens < 0:
        raise ValueError(f"a fact and its question are {-tokens} tokens longer than the tokens asked for")
    sentences = re.split(r'(?:(?<=[.!?])|(?<=[.!?]"))\s+', PROSE.read_text().strip())
    text: list[str] = []
    while True:
        for sentence in sentences:
            tokens -= count_tokens(" " + sentence)
            if tokens < 0:
                return text
            text.append(sentence)
