"""A load as agents make it: N of them, each with a context that grows turn by turn, in a closed loop with an engine.

A task begins with instructions that all agents share and a prompt of its own. The model answers; after a while of tool
use the agent sends everything so far and the tool's result, until the context would be longer than a task's last, when
it begins another task:

    task   | shared | own text ... |             first turn:  a prompt of `first` tokens
           | shared | own text ... | answer | tool |          the next: all of it again, and so on up to `last`

The engine is either vLLM's (`live_engine.py`) or a model of it (`simulated_engine.py`). Lengths, thinking times and
tokens are drawn for each agent by itself, so they do not depend on how fast the engine is.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """A step's result for a request: new tokens; whether it is done; prompt tokens that its first pass found cached."""

    name: str
    tokens: list[int]
    finished: bool
    cached: int


class Engine(Protocol):
    """An engine that runs requests. Time is in seconds from any start."""

    block_size: int
    preemptions: int

    def now(self) -> float: ...
    def wait_until(self, time: float) -> None: ...
    def add(self, name: str, tokens: list[int], output: int) -> None: ...
    def abort(self, names: list[str]) -> None: ...
    def is_busy(self) -> bool: ...
    def step(self) -> list[Progress]: ...


@dataclass(frozen=True)
class Load:
    """Lengths in tokens, `think` in seconds. Tools' results and thinking times are half to one and a half of these."""

    agents: int
    shared: int = 1024
    first: int = 8192
    last: int = 12288
    tool: int = 256
    output: int = 128
    think: float = 1.0
    vocabulary: int = 32000


LENGTHS = {
    "shared": "of the instructions that all agents share", "first": "of a task's first prompt",
    "last": "of its last prompt, at most", "tool": "of a tool's result, in the mean", "output": "of an answer",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a load; how many agents there are is a script's own."""
    for name, what in LENGTHS.items():
        parser.add_argument(
            f"--{name}", type=int, default=getattr(Load, name), help=f"tokens {what} (default: %(default)s)"
        )
    parser.add_argument(
        "--think", type=float, default=Load.think, help="mean seconds between turns (default: %(default)s)"
    )


def load_of(number: int, options: argparse.Namespace, vocabulary: int = Load.vocabulary) -> Load:
    """The load of `number` agents that the options ask for."""
    lengths = {name: getattr(options, name) for name in LENGTHS}
    return Load(number, **lengths, think=options.think, vocabulary=vocabulary)


@dataclass(frozen=True)
class Turn:
    """`reusable`: prompt tokens in whole blocks whose keys and values had been computed before."""

    asked: float
    first_token: float
    prompt: int
    cached: int
    reusable: int

    @property
    def ttft(self) -> float:
        return self.first_token - self.asked


class Agent:
    """One agent: its context, and what is drawn for it."""

    def __init__(self, number: int, load: Load) -> None:
        self.number, self.load = number, load
        self._random = random.Random(f"agent {number} of {load.agents}")
        self._shared = random.Random("shared").choices(range(3, load.vocabulary), k=load.shared)
        self.turns = 0
        # The first task is under way already, so that at any time the agents' contexts are of all lengths.
        spread = (load.last - load.first - load.output) * (number + 0.5) / load.agents
        self.context = self._new_task(load.first + int(spread))
        self.computed = 0
        """Tokens of the context whose keys and values have been computed."""
        self.answer: list[int] = []
        self.asked = self.first_token = 0.0

    def _draw(self, tokens: int) -> list[int]:
        return self._random.choices(range(3, self.load.vocabulary), k=tokens)

    def _new_task(self, tokens: int) -> list[int]:
        return self._shared + self._draw(tokens - len(self._shared))

    def thinks(self) -> float:
        """Seconds until the next turn."""
        return self.load.think * self._random.uniform(0.5, 1.5)

    def answered(self) -> None:
        """Take an answer: use a tool, or begin another task."""
        self.computed = len(self.context) + len(self.answer) - 1  # the last token was sampled, and never read
        self.turns += 1
        tool = self._draw(round(self.load.tool * self._random.uniform(0.5, 1.5)))
        self.context, self.answer = self.context + self.answer + tool, []
        if len(self.context) > self.load.last:
            self.context, self.computed = self._new_task(self.load.first), self.load.shared


@dataclass(frozen=True)
class Point:
    """Turns and tokens of N agents in `seconds` of steady state."""

    load: Load
    seconds: float
    turns: list[Turn]
    """Turns whose first token came in this time."""
    finished: int
    output_tokens: int
    preemptions: int
    warm_up: float

    def figures(self) -> dict[str, str]:
        """Columns of a row. Raises ValueError if there are too few turns to say anything."""
        if len(self.turns) < 2:
            raise ValueError(f"{len(self.turns)} turns in {self.seconds:.0f} s: measure longer")
        prompts, cached = sum(turn.prompt for turn in self.turns), sum(turn.cached for turn in self.turns)
        deciles = statistics.quantiles((turn.ttft for turn in self.turns), n=10, method="inclusive")
        return {
            "seconds": f"{self.seconds:.1f}", "warm_up_s": f"{self.warm_up:.1f}", "turns": str(len(self.turns)),
            "prompt_tokens": str(prompts), "hit_rate": f"{cached / prompts:.3f}",
            "recomputed_tokens": str(sum(max(0, turn.reusable - turn.cached) for turn in self.turns)),
            "preemptions": str(self.preemptions), "ttft_p50_s": f"{deciles[4]:.3f}", "ttft_p90_s": f"{deciles[8]:.3f}",
            "turns_s": f"{self.finished / self.seconds:.2f}",
            "output_tokens_s": f"{self.output_tokens / self.seconds:.0f}",
        }  # fmt: skip


def run(engine: Engine, load: Load, seconds: float) -> Point:
    """Let the agents work until each has had an answer, then `seconds` more, in which they are watched.

    What is under way at the end is aborted.
    """
    agents = [Agent(i, load) for i in range(load.agents)]
    started, watched = engine.now(), float("inf")
    due = [(started + load.think * (agent.number + 0.5) / load.agents, agent.number) for agent in agents]
    heapq.heapify(due)
    running: set[str] = set()
    turns: list[Turn] = []
    finished = output_tokens = preemptions = 0
    while engine.now() < watched + seconds:
        while due and due[0][0] <= engine.now():
            asked, number = heapq.heappop(due)
            agents[number].asked, agents[number].first_token = asked, 0.0
            name = f"{number}.{agents[number].turns}"
            engine.add(name, agents[number].context, load.output)
            running.add(name)
        if not engine.is_busy():
            engine.wait_until(due[0][0])
            continue
        news, now = engine.step(), engine.now()
        for progress in news:
            agent = agents[int(progress.name.split(".")[0])]
            if not agent.first_token and progress.tokens:
                agent.first_token, prompt = now, len(agent.context)
                reusable = min(agent.computed, prompt - 1) // engine.block_size * engine.block_size
                if now >= watched:
                    turns.append(Turn(agent.asked, now, prompt, progress.cached, reusable))
            agent.answer += progress.tokens
            output_tokens += len(progress.tokens) * (now >= watched)
            if progress.finished:
                finished += now >= watched
                running.remove(progress.name)
                agent.answered()
                heapq.heappush(due, (now + agent.thinks(), agent.number))
        if watched == float("inf") and all(agent.turns for agent in agents):
            watched, preemptions = now, engine.preemptions
    seconds = engine.now() - watched
    engine.abort(sorted(running))
    return Point(
        load, seconds, turns, finished, output_tokens, engine.preemptions - preemptions, watched - started
    )  # fmt: skip
