"""Long-context tasks of RULER's kinds, generated from a seed: prompts of an exact length, each with one known answer.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024. The answer is forced
token by token behind the prompt, so a task gives the log-probability of its answer, and is solved if each of the
answer's tokens is the likeliest one, so that greedy decoding would write it.

    single        one number in prose, asked for
    far           the same, in the first fifteenth of the prose: about as far back as the prompt is long
    multi_key     one of several numbers in prose, asked for by name
    multi_value   several numbers of one name, asked for in the order of the prose
    multi_query   several numbers of several names, asked for in turn
    variables     a chain of assignments in prose: the last variable's value
    common_words  a list of words: the most frequent one
    json          a record in prose, asked for as JSON with the fields of a schema
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .recall import FACT, NAMES, QUESTION, prose_of, sentences_of_prose
from .teacher_forced import beginning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANY = 4
"""Facts in a prompt with several."""
ASKED = 2
"""Numbers that a question for several asks for."""
HOPS = 3
"""Assignments of a chain of variables."""
FAR = 1 / 15
"""Share of the prose, from its beginning, in which a far number lies."""
WORDS = (
    "apple", "river", "stone", "cloud", "table", "garden", "window", "bridge", "candle", "forest", "mirror", "pocket",
    "bottle", "hammer", "island", "jacket", "kettle", "ladder", "market", "needle", "orange", "pencil", "rabbit",
    "saddle", "tunnel",
)  # fmt: skip
CITIES = ("Paris", "London", "Madrid", "Vienna", "Dublin", "Lisbon", "Geneva", "Naples")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}, "number": {"type": "integer"}},
    "required": ["name", "city", "number"],
}


@dataclass(frozen=True)
class Task:
    """A prompt and the answer that must follow it, as token ids."""

    kind: str
    token_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Puzzle:
    """A task in words: what is planted in the prose, the question at its end, and the answer. `words`: the words that
    fill the prompt in place of prose, each followed by a space. `within`: the share of the prose, from its beginning,
    in which all that is planted lies."""

    planted: Sequence[str]
    question: str
    answer: str
    words: Sequence[str] = ()
    within: float = 1


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def _single(rng: random.Random) -> Puzzle:
    name, number = rng.choice(NAMES), _number(rng)
    return Puzzle([FACT.format(name=name, number=number)], QUESTION.format(name=name), f" {number}")


def _far(rng: random.Random) -> Puzzle:
    return replace(_single(rng), within=FAR)


def _multi_key(rng: random.Random) -> Puzzle:
    numbers = {name: _number(rng) for name in rng.sample(NAMES, MANY)}
    facts = [FACT.format(name=name, number=number) for name, number in numbers.items()]
    name = rng.choice([*numbers])
    return Puzzle(facts, QUESTION.format(name=name), f" {numbers[name]}")


def _multi_value(rng: random.Random) -> Puzzle:
    name, numbers = rng.choice(NAMES), [_number(rng) for _ in range(ASKED)]
    facts = [f"Remember this: one of the secret numbers of {name} is {number}." for number in numbers]
    question = f"Question: what are the secret numbers of {name}? Answer: the secret numbers of {name} are"
    return Puzzle(facts, question, " " + " and ".join(numbers))


def _multi_query(rng: random.Random) -> Puzzle:
    numbers = {name: _number(rng) for name in rng.sample(NAMES, MANY)}
    facts = [FACT.format(name=name, number=number) for name, number in numbers.items()]
    first, second = rng.sample([*numbers], ASKED)
    question = (
        f"Question: what are the secret numbers of {first} and of {second}? Answer: the secret number of {first} is"
    )
    return Puzzle(facts, question, f" {numbers[first]} and the secret number of {second} is {numbers[second]}")


def _variables(rng: random.Random) -> Puzzle:
    names, number = [f"VAR X{value}" for value in rng.sample(range(10, 100), HOPS)], _number(rng)
    assigned = [f"{name} = {value}." for name, value in zip(names, [number, *names[:-1]], strict=True)]
    question = f"Question: what is the value of {names[-1]}? Answer: the value of {names[-1]} is"
    return Puzzle(assigned, question, f" {number}")


def _common_words(rng: random.Random) -> Puzzle:
    often, *others = rng.sample(WORDS, len(WORDS))
    words = [word for other in others for word in (other, often if rng.random() < 0.3 else other)]
    rng.shuffle(words)
    return Puzzle([], "Question: which word is the most frequent in the list? Answer: the word", f" {often}", words)


def _json(rng: random.Random) -> Puzzle:
    record = {"name": rng.choice(NAMES), "city": rng.choice(CITIES), "number": int(_number(rng))}
    fact = f"Remember this: {record['name']} lives in {record['city']} and has the number {record['number']}."
    question = f"Question: write the record as JSON with this schema: {json.dumps(SCHEMA)}. Answer:"
    return Puzzle([fact], question, " " + json.dumps(record))


KINDS: dict[str, Callable[[random.Random], Puzzle]] = {
    "single": _single,
    "far": _far,
    "multi_key": _multi_key,
    "multi_value": _multi_value,
    "multi_query": _multi_query,
    "variables": _variables,
    "common_words": _common_words,
    "json": _json,
}


def tasks(
    tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str], number: int, tokens: int, seed: int = 0
) -> list[Task]:
    """`number` tasks of each kind, with prompts of exactly `tokens` tokens; the same ones for the same seed.

    Raises ValueError if what is planted and its question alone are longer than `tokens`.
    """
    made = []
    for kind in kinds:
        rng = random.Random(f"{seed} {kind} {tokens}")
        made += [_task(tokenizer, kind, KINDS[kind](rng), tokens, rng) for _ in range(number)]
    return made


def _task(tokenizer: PreTrainedTokenizerBase, kind: str, puzzle: Puzzle, tokens: int, rng: random.Random) -> Task:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    before, question = beginning(tokenizer), encode("\n\n" + puzzle.question)
    planted = [encode(f"\n\n{fact}\n\n") for fact in puzzle.planted]
    sentences = [encode(f" {word}") for word in puzzle.words] or sentences_of_prose(tokenizer)
    filling = prose_of(sentences, tokens - len(before) - len(question) - sum(map(len, planted)))
    places = sorted(rng.randrange(int(puzzle.within * len(filling)) + 1) for _ in planted)
    parts, start = [before], 0
    for place, fact in zip(places, planted, strict=True):
        parts += [*filling[start:place], fact]
        start = place
    parts += [*filling[start:], question]
    return Task(kind, [token for part in parts for token in part], encode(puzzle.answer))
