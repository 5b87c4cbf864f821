"""The trace of agents that `serve.py --trace` sends: what vLLM reads of it, and what of it is measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from checkout import DEMO_MODEL, REPO

BENCHMARKS = REPO / "benchmarks"
TURNS, ANSWER_SECONDS, CHUNK = 6, 2.0, 16


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def load():
    from agents import Load

    return Load(3, shared=64, first=200, last=330, tool=32, output=16, think=0.5)


def closed_loop(load) -> dict[int, list[list[int]]]:
    """The first prompts of each agent in the loop of `agentic.py`."""
    from agents import run
    from simulated_engine import SimulatedEngine, Speed

    asked = defaultdict(list)

    class Recorder(SimulatedEngine):
        def add(self, name: str, tokens: list[int], output: int) -> None:
            asked[int(name.split(".")[0])].append(tokens)
            super().add(name, tokens, output)

    run(Recorder(4096, CHUNK, 0, Speed(1e-3, 1e-6, 1e-5)), load, 10.0)
    return {number: prompts[: TURNS + 1] for number, prompts in asked.items()}


def read_by_vllm(file: Path) -> list:
    """The requests that `vllm bench serve` makes of a trace."""
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets import get_samples
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = f"--dataset-name timed_trace --dataset-path {file} --timed-trace-chunk-hash-size {CHUNK}"
    return get_samples(parser.parse_args(options.split()), AutoTokenizer.from_pretrained(DEMO_MODEL))


def shared_chunks(one: list[int], other: list[int]) -> int:
    """Tokens with which both begin, in whole chunks."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    return same // CHUNK * CHUNK


def test_vllm_reads_the_prompts_of_the_closed_loop(load, tmp_path: Path) -> None:
    """As long, and sharing as much with the prompts before; an agent's second task shares the instructions alone."""
    import traces

    read, told = [], traces.trace_of(load, TURNS, ANSWER_SECONDS)
    for requests in told:
        traces.write(tmp_path / "trace.jsonl", requests)
        read.append(read_by_vllm(tmp_path / "trace.jsonl"))
        assert [request.timestamp for request in read[-1]] == [request.timestamp for request in requests]
        assert {request.expected_output_len for request in read[-1]} == {load.output}
    expected, tasks = [], 0
    agents = closed_loop(load).values()
    for prompts in agents:
        for before, prompt in pairwise(prompts):
            tasks += len(prompt) <= len(before)
            expected.append((len(prompt), shared_chunks(before, prompt)))
    assert tasks >= load.agents
    first, later = ([request.prompt for request in requests] for requests in read)
    assert sorted(map(len, first)) == sorted(len(prompts[0]) for prompts in agents)
    found = []
    for i, prompt in enumerate(later):
        found.append((len(prompt), max(shared_chunks(before, prompt) for before in first + later[:i])))
    assert sorted(found) == sorted(expected)
    assert traces.best_hit_rate(*told) == sum(same for _, same in found) / sum(map(len, later))


def test_turns_come_an_answer_and_a_thought_apart(load) -> None:
    from dataclasses import replace

    from agents import Agent
    from traces import trace_of

    first, later = trace_of(load, TURNS, ANSWER_SECONDS)
    period = ANSWER_SECONDS + load.think
    assert [request.timestamp for request in first] == pytest.approx([0, period / 3, period * 2 / 3], abs=1e-3)
    times = [request.timestamp for request in later]
    assert len(times) == TURNS * load.agents and times == sorted(times) and times[0] == 0

    alone = replace(load, agents=1)
    agent, thoughts = Agent(0, alone), []
    for _ in range(TURNS):
        agent.answer = [7] * load.output
        agent.answered()
        thoughts.append(agent.thinks())
    times = [request.timestamp for request in trace_of(alone, TURNS, ANSWER_SECONDS)[1]]
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == pytest.approx([ANSWER_SECONDS + thought for thought in thoughts[1:]], abs=2e-3)


def test_a_trace_is_the_same_each_time(load) -> None:
    from traces import trace_of

    assert trace_of(load, TURNS, ANSWER_SECONDS) == trace_of(load, TURNS, ANSWER_SECONDS)


def test_first_turns_are_sent_and_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own parser takes the arguments; the hits are those of the trace alone."""
    import serve
    from rows import read
    from vllm.benchmarks import serve as vllm_serve

    names = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
    sent, counters = [], dict.fromkeys(names, 0.0)

    class FakeServer:
        port = 1234

        def wait_until_healthy(self, seconds: float) -> None: ...

        def counters(self) -> dict[str, float]:
            return dict(counters)

    def fake(arguments: argparse.Namespace) -> dict[str, float]:
        sent.append((arguments, len(Path(arguments.dataset_path).read_text().splitlines())))
        for name, tokens in zip(names, (10, 1000) if len(sent) == 1 else (700, 800), strict=True):
            counters[name] += tokens
        percentiles = {f"p{p}_{metric}_ms": 1.0 for metric in ("ttft", "tpot") for p in (50, 90)}
        return {"completed": arguments.num_prompts, "output_throughput": 1, "total_token_throughput": 2, **percentiles}

    monkeypatch.setattr(vllm_serve, "main", fake)
    csv = tmp_path / "trace.csv"
    options = serve.parse_arguments(["--trace", "2", "--turns", "3", "--csv", str(csv)])
    serve.measure("tq4", [], FakeServer(), serve.agents_turns(str(tmp_path), options), options, "abc1234")
    assert [(arguments.num_prompts, lines) for arguments, lines in sent] == [(2, 2), (6, 6)]
    for arguments, _ in sent:
        assert (arguments.dataset_name, arguments.timed_trace_chunk_hash_size) == ("timed_trace", CHUNK)
        assert arguments.max_concurrency is None and arguments.num_warmups == 0 and arguments.ignore_eos
    (row,) = read(csv)
    assert (row["dtype"], row["concurrency"], row["requests"]) == ("tq4", "2", "6")
    lines = Path(sent[1][0].dataset_path).read_text().splitlines()
    assert float(row["request_rate"]) == pytest.approx(5 / json.loads(lines[-1])["timestamp"], abs=0.006)
    assert row["hit_rate"] == "0.875" and 0.5 < float(row["best_hit_rate"]) < 1 and row["p90_ttft_ms"] == "1.00"


def test_best_hit_rate_has_whole_blocks_and_no_last_token() -> None:
    from traces import Request, best_hit_rate

    twice = [Request(0.0, 40, 8, [0, 1, 2]), Request(1.0, 40, 8, [0, 1, 2])]
    assert best_hit_rate([], twice) == 32 / 80
    whole = [Request(0.0, 32, 8, [0, 1]), Request(1.0, 48, 8, [0, 1, 3])]
    assert best_hit_rate([], whole) == 32 / 80
    assert best_hit_rate(whole, whole[:1]) == 16 / 32


@pytest.mark.parametrize("wrong", [["--turns", "0"], ["--answer-seconds", "0"]])
def test_a_trace_has_turns_and_answers_take_time(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import serve

    assert serve.parse_arguments(["--trace", "3"]).concurrency == [3]
    with pytest.raises(SystemExit):
        serve.parse_arguments(["--trace", "2", *wrong])
    assert "--trace 2 takes --turns and --answer-seconds above 0" in capsys.readouterr().err


def test_options_of_another_load_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where they have the default's value; those that are not given have it."""
    import serve

    trace = ["--trace", "2"]
    for load, other in ((trace, serve.NOT_OF_A_TRACE), ([], serve.OF_A_TRACE)):
        defaults = serve.parse_arguments(load)
        assert None not in [getattr(defaults, name) for name in serve.NOT_OF_A_TRACE + serve.OF_A_TRACE]
        for name in other:
            flag = "--" + name.replace("_", "-")
            with pytest.raises(SystemExit):
                serve.parse_arguments([*load, flag, "2"])
            which = "with --trace 2" if load else "without --trace"
            assert f"error: {flag} would not be read {which}: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        serve.parse_arguments([*trace, "--rounds", "3", "--input", "8"])
    assert "error: --rounds, --input would not be read" in capsys.readouterr().err
