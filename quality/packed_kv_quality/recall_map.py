"""Recall by length of the prompt and depth of the planted fact, through the engine.

Teacher-forced: after the prompt, the answer's tokens are fed one by one, each step a decode. A fact is recalled if
each of them is the likeliest one, so that greedy decoding would write it. The log-probability of the whole answer tells
dtypes apart that recall the same facts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING

import torch

from . import lockstep
from .lockstep import ignore
from .recall import ANSWER_TOKENS, RecallPrompt, recall_prompts
from .teacher_forced import logits

if TYPE_CHECKING:
    from vllm import LLM

CHUNK = 256
"""Tokens of a step. A fact in another chunk than the question is read from the cache at once; the others are from the
answer's second digit on, as digits are decoded one by one."""
LARGEST_BATCH = 192


@dataclass(frozen=True)
class Cell:
    """Prompts of one length in tokens, with the fact at one depth (0: at the start, 1: before the question): how many
    of the facts were recalled, and the mean log-probability of their answers, in nats."""

    length: int
    depth: float
    recalled: int
    facts: int
    log_prob: float


@dataclass(frozen=True)
class RecallSettings:
    """Lengths of prompts in tokens, depths of facts from 0 to 1, facts per length and depth, whether the chat template
    is used, tokens of a prefill step, and the seed."""

    lengths: list[int]
    depths: list[float]
    facts: int
    chat: bool
    chunk: int
    seed: int

    def prompts(self, tokenizer, length: int) -> list[RecallPrompt]:
        """Prompts of one length. Raises ValueError if it cannot hold a fact and its question."""
        places = [depth for depth in self.depths for _ in range(self.facts)]
        return recall_prompts(tokenizer, len(places), length, self.seed, places, self.chat)

    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.lengths) * len(self.depths) * self.facts


def recall_map(llm: LLM, settings: RecallSettings, done: Callable[[int], object] = ignore) -> list[Cell]:
    """Ask for all facts. `done` is called with the tokens of each step."""
    tokenizer = llm.get_tokenizer()
    cells = []
    for length in settings.lengths:
        prompts = settings.prompts(tokenizer, length)
        together = lockstep.at_once(llm, length + ANSWER_TOKENS, settings.chunk, LARGEST_BATCH)
        found = [
            answer
            for at in range(0, len(prompts), together)
            for answer in _answers(llm, prompts[at : at + together], settings.chunk, done)
        ]
        for index, depth in enumerate(settings.depths):
            group = found[index * settings.facts : (index + 1) * settings.facts]
            recalled = sum(right for right, _ in group)
            cells.append(Cell(length, depth, recalled, settings.facts, statistics.fmean(value for _, value in group)))
    return cells


def _answers(
    llm: LLM, prompts: Sequence[RecallPrompt], chunk: int, done: Callable[[int], object]
) -> Iterator[tuple[bool, float]]:
    """Yield, for each of some equally long prompts, True if the fact is recalled, and the answer's log-probability."""
    length = len(prompts[0].token_ids)
    widths = chain(repeat(chunk, length // chunk), [length % chunk] if length % chunk else [], repeat(1))
    found = lockstep.run(llm, [prompt.token_ids + prompt.answer_ids[:-1] for prompt in prompts], widths, done)
    for prompt, hidden in zip(prompts, found, strict=True):
        log_probs = logits(llm, hidden[length - 1 :]).log_softmax(-1)
        answer = torch.tensor(prompt.answer_ids, device=log_probs.device)
        yield torch.equal(log_probs.argmax(-1), answer), log_probs.gather(-1, answer[:, None]).sum().item()


def recalled_share(cells: Sequence[Cell]) -> float | None:
    """Share of the facts that were recalled; None without cells."""
    return sum(cell.recalled for cell in cells) / sum(cell.facts for cell in cells) if cells else None


def answer_log_prob(cells: Sequence[Cell]) -> float | None:
    """Mean log-probability of the answers, in nats; None without cells."""
    total = sum(cell.facts for cell in cells)
    return sum(cell.facts * cell.log_prob for cell in cells) / total if cells else None
