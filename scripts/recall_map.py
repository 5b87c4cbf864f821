"""Recall by length of the prompt and depth of the planted fact, through the engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines import chunked
from recall import ANSWER_TOKENS, recall_prompts
from tqdm import tqdm

if TYPE_CHECKING:
    from vllm import LLM

CHUNK = 256
"""Tokens of a step. A fact in another chunk than the question is read from the cache at once; the others are from the
answer's second digit on, as digits are decoded one by one."""


@dataclass(frozen=True)
class Cell:
    """Prompts of one length in tokens, with the fact at one depth (0: at the start, 1: before the question)."""

    length: int
    depth: float
    recalled: int
    facts: int


def recall_map(
    llm: LLM, lengths: Sequence[int], depths: Sequence[float], facts: int, seed: int, title: str
) -> list[Cell]:
    """Ask for `facts` facts at each length and depth, with a progress bar named `title`.

    Raises ValueError if a length cannot hold a fact and its question.
    """
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    places = [depth for depth in depths for _ in range(facts)]
    prompts = [
        (length, depth, prompt)
        for length in lengths
        for depth, prompt in zip(
            places,
            recall_prompts(lambda text: len(tokenizer.encode(text)), len(places), length, seed, places),
            strict=True,
        )
    ]
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)

    def named_bar(*items: Any, **options: Any) -> tqdm:
        return tqdm(*items, **{**options, "desc": title, "leave": False})

    with chunked(llm, CHUNK):
        answers = llm.generate(
            [prompt.prompt for *_, prompt in prompts],
            sampling,
            use_tqdm=named_bar if sys.stderr.isatty() else False,
        )
    counts = {(length, depth): 0 for length in lengths for depth in depths}
    for (length, depth, prompt), answer in zip(prompts, answers, strict=True):
        counts[length, depth] += prompt.is_recalled(answer.outputs[0].text)
    return [Cell(length, depth, recalled, facts) for (length, depth), recalled in counts.items()]


def recalled_share(cells: Sequence[Cell]) -> float | None:
    """Share of the facts that were recalled; None without cells."""
    return sum(cell.recalled for cell in cells) / sum(cell.facts for cell in cells) if cells else None
