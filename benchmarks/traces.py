"""The turns of `agents.py` as a trace that has its times written down, in the format of vLLM's dataset `timed_trace`.

One JSON object a line, in the order of time (here an agent's second turn and its third, which begins with all of the
second's tokens but those of its last, short chunk):

    {"timestamp": 0.0, "input_length": 56, "output_length": 8, "hash_ids": [0, 1, 2, 3]}
    {"timestamp": 5.1, "input_length": 80, "output_length": 8, "hash_ids": [0, 1, 2, 4, 5]}

`timestamp` is in seconds. Each id stands for CHUNK tokens of the prompt, the last one for what is left. vLLM draws the
tokens of a chunk from its id and its length, so prompts that begin with the same ids begin with the same tokens. (It
seeds them with Python's `hash` of a string: another process draws others, unless PYTHONHASHSEED is set. Nothing here
depends on which they are.)

Contexts, tools' results and thinking times are those of `agentic.py`, agent by agent, but **the loop is open**:

- An agent of `agentic.py` waits for its answer. A trace knows no answers: a turn comes an assumed `answer_seconds` and
  the thinking time behind the one before, whether that has been answered or not. A server that is slower than the trace
  gets ever longer queues: its time to the first token depends on how long the trace is, and its output tokens a second
  are what it can do. A server that keeps up makes no more tokens a second than the trace asks for.
- The next prompt has an answer that was drawn, not the one that the server gave. So the tokens of an answer are
  computed again, as a part of the next prompt; in `agentic.py` the cache has them already.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from agents import Agent, Load

CHUNK = 16
"""Tokens of an id: a block of vLLM's KV cache, so that prompts share blocks as far as they share ids."""


@dataclass(frozen=True)
class Request:
    """A line of a trace: seconds, tokens, tokens, and an id for each chunk of the prompt."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def trace_of(load: Load, turns: int, answer_seconds: float) -> tuple[list[Request], list[Request]]:
    """The agents' first turns, which fill the cache, and the trace: the `turns` of each agent behind that.

    Each is in the order of time, and begins at 0 s. The agents' first turns are spread over the time of a turn.
    """
    first: list[tuple[float, list[int]]] = []
    later: list[tuple[float, list[int]]] = []
    for number in range(load.agents):
        agent, asked = Agent(number, load), (answer_seconds + load.think) * number / load.agents
        first.append((asked, agent.context))
        answers = random.Random(f"answers to {number}")
        for _ in range(turns):
            agent.answer = answers.choices(range(3, load.vocabulary), k=load.output)
            agent.answered()
            asked += answer_seconds + agent.thinks()
            later.append((asked, agent.context))
    ids: dict[tuple[int, ...], int] = {}
    return _requests(first, load, ids), _requests(later, load, ids)


def _requests(prompts: list[tuple[float, list[int]]], load: Load, ids: dict[tuple[int, ...], int]) -> list[Request]:
    """`prompts`: when, and their tokens. `ids`: of the chunks so far; chunks that are new are added."""
    began = min(asked for asked, _ in prompts)
    requests = []
    for asked, tokens in sorted(prompts):
        chunks = [tuple(tokens[i : i + CHUNK]) for i in range(0, len(tokens), CHUNK)]
        hash_ids = [ids.setdefault(chunk, len(ids)) for chunk in chunks]
        requests.append(Request(round(asked - began, 3), len(tokens), load.output, hash_ids))
    return requests


def rate(requests: list[Request]) -> float:
    """Requests a second from the first of a trace to its last; 0 if it has but one."""
    return (len(requests) - 1) / requests[-1].timestamp if len(requests) > 1 else 0.0


def best_hit_rate(before: Iterable[Request], requests: list[Request]) -> float:
    """The share of the prompt tokens of `requests` that a cache in which everything fits has, `before` being in it.

    With blocks of CHUNK tokens, whole ones, and never a prompt's last token, which vLLM computes always. Larger blocks
    have a little less.
    """
    seen = {chunk for request in before for chunk in request.hash_ids}
    found = 0
    for request in requests:
        whole = request.hash_ids[: (request.input_length - 1) // CHUNK]
        found += CHUNK * len(list(takewhile(seen.__contains__, whole)))
        seen.update(request.hash_ids)
    return found / sum(request.input_length for request in requests)


def write(file: Path, requests: list[Request]) -> None:
    """Write a trace, a line each request."""
    file.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))
