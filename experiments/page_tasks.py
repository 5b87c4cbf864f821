"""Questions of RULER's kinds that small models can answer, many behind one prompt.

A question is the beginning of a sentence whose rest is in the prompt, word by word, so that looking it up is all it
takes. For page_selection.py, which forces question and answer token by token.

    single        The code that opens the harbour gate is 48213: each sentence of a kind of its own
    multi_key     The secret number of Alice is 48213: the same sentence of many names
    variables     VAR X31 = VAR X12. VAR X12 = 48213: a chain, both links of it in the prompt
    quote         the rest of a line of the prompt's text
    common_words  List: the word ...: a prompt of words, one of which is half of them; one question a prompt
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packed_kv_quality.recall import NAMES
from packed_kv_quality.tasks import WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("single", "multi_key", "variables", "quote", "common_words")
OPENED = (
    "the code that opens the harbour gate", "the price of the old mill", "the number of the night train",
    "the weight of the bronze bell", "the height of the signal tower", "the telephone of the bakery",
    "the licence of the ferry", "the year of the great flood", "the depth of the northern well",
    "the distance to the lighthouse", "the population of the valley", "the serial number of the engine",
    "the page of the lost chapter", "the reward for the stolen painting", "the room of the ambassador",
    "the account of the widow",
)  # fmt: skip
QUOTED, CUE, REST = 40, 20, 8
"""Tokens of a line that is quoted at least, and of it those that are asked with and for."""


@dataclass(frozen=True)
class Question:
    """Tokens behind a prompt; `answers`: the places of those that the model has to find."""

    kind: str
    ids: list[int]
    answers: list[int]


Encode = Callable[[str], list[int]]


def asked(kind: str, encode: Encode, *parts: str) -> Question:
    """Of texts in turn: said, to be found, said, to be found..."""
    ids: list[int] = []
    answers: list[int] = []
    for number, part in enumerate(parts):
        tokens = encode(part)
        if number % 2:
            answers += range(len(ids), len(ids) + len(tokens))
        ids += tokens
    return Question(kind, ids, answers)


def facts(encode: Encode, rng: random.Random, each: int) -> tuple[list[str], list[Question]]:
    """Sentences to plant, and questions for them, `each` of the three kinds that plant any."""
    planted, questions = [], []

    def number() -> str:
        return str(rng.randrange(10_000, 100_000))

    for thing in rng.sample(OPENED, min(each, len(OPENED))):
        found = number()
        planted.append(f"Remember that {thing} is {found}.")
        questions.append(asked("single", encode, f"\nRemember that {thing} is", f" {found}"))
    for name in rng.sample(NAMES, min(each, len(NAMES))):
        found = number()
        planted.append(f"The secret number of {name} is {found}.")
        questions.append(asked("multi_key", encode, f"\nThe secret number of {name} is", f" {found}"))
    names = rng.sample(range(10, 100), 2 * each)
    for first, second in zip(names[::2], names[1::2], strict=True):
        found = number()
        planted += [f"VAR X{first} = {found}.", f"VAR X{second} = VAR X{first}."]
        cue = f"\nVAR X{second} = VAR"
        questions.append(asked("variables", encode, cue, f" X{first}", f".\nVAR X{first} =", f" {found}"))
    rng.shuffle(planted)
    return planted, questions


def haystack(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: int, each: int, seed: int
) -> tuple[list[int], list[Question]]:
    """A prompt of exactly `tokens` tokens of a text's lines, from a place of its own on, with sentences planted between
    them, and the questions for it: `each` of all kinds but common_words. Raises ValueError if the text is short."""
    rng = random.Random(f"haystack {seed} {tokens}")

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    planted, questions = facts(encode, rng, each)
    sentences = [encode(f"\n{sentence}\n") for sentence in planted]
    lines = [encode(line + "\n") for line in text.splitlines() if line.strip()]
    room, begin = tokens - 1 - sum(map(len, sentences)), rng.randrange(len(lines))
    lines = lines[begin:] + lines[:begin]
    if sum(map(len, lines)) < room:
        raise ValueError(f"the text has {sum(map(len, lines)):,} tokens; a prompt of {tokens:,} needs {room:,}")
    filling: list[list[int]] = []
    while room:
        filling.append(lines[len(filling)][:room])
        room -= len(filling[-1])
    long = [line for line in filling[:-8] if len(line) >= QUOTED]
    for line in rng.sample(long, min(each, len(long))):
        at = rng.randrange(len(line) - CUE - REST)
        ids = encode("\n") + line[at : at + CUE + REST]
        questions.append(Question("quote", ids, [*range(len(ids) - REST, len(ids))]))
    places = sorted(rng.randrange(len(filling)) for _ in sentences)
    parts, done = [[tokenizer.bos_token_id]], 0
    for place, sentence in zip(places, sentences, strict=True):
        parts += [*filling[done:place], sentence]
        done = place
    parts += filling[done:]
    return [token for part in parts for token in part], questions


def common_words(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int) -> tuple[list[int], list[Question]]:
    """A prompt of exactly `tokens` tokens: words, and which of them is the most frequent."""
    rng = random.Random(f"common words {seed} {tokens}")
    often, *others = rng.sample(WORDS, len(WORDS))

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    words = [encode(f" {often if rng.random() < 0.5 else rng.choice(others)}") for _ in range(tokens)]
    ids = [tokenizer.bos_token_id, *encode("List of words:"), *(token for word in words for token in word)][:tokens]
    return ids, [asked("common_words", encode, ".\nThe most frequent word of the list is the word", f" {often}")]


def prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int, number: int, each: int
) -> list[tuple[list[int], list[Question]]]:
    """`number` of each: haystacks of the texts in turn, and common words."""
    found = []
    for seed in range(number):
        found.append(haystack(tokenizer, texts[seed % len(texts)], tokens, each, seed))
        found.append(common_words(tokenizer, tokens, seed))
    return found
