"""benchmarks/agents.py: the agents' prompts, the load and its figures, and what is measured again; an engine that
answers at once stands for vLLM's."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import agents
import rows


def options(*more: str) -> argparse.Namespace:
    given = ["--contexts", "20", "40", "--input", "5", "--output", "3", "--commit", "abc1234"]
    return agents.parse_arguments([*given, *more])


def test_turns_stand_behind_all_that_an_agent_had() -> None:
    """Each prompt begins with the one before and its answer, so that the prefix cache may have them; what is new
    differs. A context that would grow too long is given up, and the next one has nothing of it."""
    agent = agents.Agent("seed", 1000, 20, options())
    before: list[int] = agent.context
    for turn in range(2):
        prompt = agent.prompt()
        assert prompt[: len(before)] == before and len(prompt) == 20 + 8 * turn + 5
        agent.answer([1, 2, 3])
        before = [*prompt, 1, 2, 3]
    agent.context = before[:33]
    fresh = agent.prompt()
    assert len(fresh) == 25 and fresh[:20] != before[:20], "33 + 5 + 3 tokens are more than 40"
    assert all(3 <= token < 1000 for token in fresh)


def test_agents_are_the_same_in_each_run_and_others_in_each_case() -> None:
    def prompts(count: int, arrivals: float = 0) -> list[list[int]]:
        return [agent.prompt() for agent in agents.make_agents(count, arrivals, 1000, options())]

    found = prompts(4)
    assert found == prompts(4) and [len(prompt) - 5 for prompt in found] == [20, 23, 26, 29]
    every = [*found, *prompts(3), *prompts(4, 2.0)]
    assert len({tuple(prompt[:20]) for prompt in every}) == len(every)


def test_figures_are_of_what_arrived_meanwhile() -> None:
    seen = agents.Seen(
        outputs=[(0.9, 100), (1.0, 1), (2.0, 1), (2.9, 2), (3.0, 100)],
        ttft=[(0.9, 9.0), *((1.0, i * 1e-3) for i in range(101)), (3.0, 9.0)],
        itl=[(1.5, 0.010)],
        steps=[(0.5, "NONE"), (1.0, "FULL"), (1.2, "FULL"), (1.5, "PIECEWISE"), (2.5, "NONE"), (3.0, "NONE")],
        prompts=[(0.9, 1000, 0), (1.0, 40, 30), (2.0, 60, 45), (2.1, 0, 0)],
    )
    assert seen.figures(1.0, 3.0) == {
        "output_tokens_s": "2.0", "hit_rate": "0.750", "p50_ttft_ms": "50.00", "p99_ttft_ms": "99.00",
        "p50_itl_ms": "10.00", "p99_itl_ms": "10.00", "turns": "101", "steps": "4", "eager": "0.250", "whole": "0.500",
    }  # fmt: skip
    assert {*agents.Seen().figures(1.0, 3.0).values()} == {"", "0", "0.0"}
    with pytest.raises(ValueError, match="no values"):
        rows.percentile([], 50)


class Engine:
    """Answers a token at a time; an empty output stands between, as of a step that only computes a prompt."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.prompts: list[list[int]] = []
        self.names: list[str] = []
        self.running = self.most = 0
        self._seconds = seconds

    async def generate(self, prompt: dict[str, list[int]], sampling: Any, name: str) -> AsyncIterator[Any]:
        self.prompts.append(prompt["prompt_token_ids"])
        self.names.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for tokens in ([7], [], [8, 9]):
                await asyncio.sleep(self._seconds)
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)])
        finally:
            self.running -= 1


class InstantLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to what comes next."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[InstantLoop]:
    found = InstantLoop()
    monkeypatch.setattr(agents, "time", SimpleNamespace(perf_counter=found.time))
    yield found
    found.close()


def loaded(
    loop: InstantLoop, engine: Engine, count: int = 2, arrivals: float = 0
) -> tuple[agents.Seen, list[agents.Agent], dict[str, str]]:
    """Return what arrived in 10 seconds behind 5 of warm-up, the agents, and the figures."""
    seen, given = agents.Seen(), options("--warm-up", "5", "--seconds", "10")
    working = agents.make_agents(count, arrivals, 1000, given)
    begin, end = loop.run_until_complete(agents.load(engine, working, arrivals, seen, given))
    assert (end - begin, loop.now) == (10, pytest.approx(end))
    return seen, working, seen.figures(begin, end)


def test_an_agent_thinks_between_its_turns(loop: InstantLoop) -> None:
    """A turn of 0.3 s and 0.5 s of thinking: 15 s have 19 of an agent, the last one cut off."""
    engine = Engine(0.1)
    _, working, figures = loaded(loop, engine)
    assert len(engine.prompts) == len({*engine.names}) == 2 * 19 and engine.running == 0
    assert working[0].context[-3:] == [7, 8, 9]
    assert (figures["p50_ttft_ms"], figures["p50_itl_ms"], figures["turns"]) == ("100.00", "200.00", "24")


def test_turns_arrive_and_wait_for_an_idle_agent(loop: InstantLoop) -> None:
    """Two turns a second: one of 0.03 s finds its agent idle; of those of 3 s most wait, and TTFT has the wait."""
    engine = Engine(0.01)
    _, _, figures = loaded(loop, engine, arrivals=2)
    assert 20 <= len(engine.prompts) <= 40 and engine.most <= 2 and figures["p50_ttft_ms"] == "10.00"
    slow = Engine(1.0)
    seen, _, _ = loaded(loop, slow, count=1, arrivals=2)
    waits = [seconds for _, seconds in seen.ttft]
    assert slow.most == 1 and len(slow.prompts) == 5 and waits[0] == pytest.approx(1.0)
    assert waits == sorted(waits) and waits[-1] > 8


def test_a_row_of_the_same_settings_is_not_measured_again(tmp_path: Path) -> None:
    given = options("--out", str(tmp_path), "--agents", "24", "48", "--arrivals", "2", "3")
    every = [(24, 0), (48, 0), (24, 2), (24, 3)]
    assert agents.cases(given) == agents.missing("auto:FULL", given) == every
    for done in ((24, 0.0), (24, 3.0)):
        row = {**agents.settings("auto:FULL", *done, given), **agents.Seen().figures(0, 1), "gpu": "card"}
        rows.append(tmp_path / agents.FILE, {**row, "commit": "abc1234"})
    assert agents.missing("auto:FULL", given) == [(48, 0), (24, 2)]
    assert agents.missing("auto", given) == agents.missing("fp8:FULL", given) == every
    for more in (["--again"], ["--think", "1"], ["--kv-cache-memory", "9e9"], ["--commit", "def5678"]):
        assert agents.missing("auto:FULL", options("--out", str(tmp_path), "--agents", "24", *more)) == [(24, 0)]


def test_a_context_has_room_for_a_turn(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--contexts", "35", "40")
    assert "--contexts 35 40: a turn has 8 tokens" in capsys.readouterr().err
