"""The load of the benchmarks of capacity, and the model of vLLM's scheduler and prefix cache that serves it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import DEMO_MODEL, REPO

BENCHMARKS = REPO / "benchmarks"
BLOCK = 16


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def simulated(blocks: int, ring_blocks: int = 0, **options):
    from simulated_engine import SimulatedEngine, Speed

    return SimulatedEngine(blocks, BLOCK, ring_blocks, Speed(1e-3, 1e-6, 1e-5), **options)


def finish(engine) -> dict[str, int]:
    """Run until all is done; prompt tokens that each request found cached."""
    cached = {}
    while engine.is_busy():
        cached |= {progress.name: progress.cached for progress in engine.step() if progress.finished}
    return cached


def test_blocks_are_given_up_as_vllm_does() -> None:
    """Those without content first, then the least recently freed, of a request its last block first."""
    from simulated_engine import BlockPool

    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    for block, content in zip(first + second, (10, 11, 20, 21), strict=True):
        pool.fill(block, content)
    pool.release(first)
    pool.release(second)
    assert pool.hits([10, 11, 12]) == first and pool.hits([11, 99]) == first[1:]
    pool.use(first[:1])
    empty = pool.take(1)
    assert empty[0] not in first + second
    pool.release(empty)
    assert pool.take(1) == empty
    assert pool.take(2) == [first[1], second[1]]
    assert pool.hits([10, 11]) == first[:1] and pool.hits([20, 21]) == second[:1]
    with pytest.raises(KeyError):
        pool.take(2)  # one is in use, one is left


def test_a_prefix_is_found_in_whole_blocks_and_never_whole() -> None:
    engine = simulated(40)
    prompt = list(range(100, 100 + 4 * BLOCK))
    cached = {}
    for name, tokens in (("new", prompt), ("same", prompt), ("longer", [*prompt, 1]), ("other", [0, *prompt])):
        engine.add(name, tokens, 2)
        cached |= finish(engine)
    assert cached == {"new": 0, "same": 3 * BLOCK, "longer": 4 * BLOCK, "other": 0}
    assert engine.pool.free_blocks == 40


def test_a_step_takes_what_it_reads_and_computes() -> None:
    engine = simulated(40, chunk=24)
    engine.add("a", list(range(40)), 2)
    engine.step()
    assert engine.now() == pytest.approx(1e-3 + 24 * 1e-6 + 24 * 1e-5)
    (progress,) = engine.step()
    assert engine.now() == pytest.approx(2e-3 + (24 + 40) * 1e-6 + 40 * 1e-5) and not progress.finished
    (progress,) = engine.step()
    assert engine.now() == pytest.approx(3e-3 + (24 + 40 + 41) * 1e-6 + 40 * 1e-5) and progress.finished


def test_the_youngest_is_preempted_and_comes_again() -> None:
    """Two requests of 4 blocks and a ring of 1 each in 8 blocks: both are taken in, one has to go for a while."""
    engine = simulated(8, ring_blocks=1)
    for name in ("old", "young"):
        engine.add(name, [hash((name, i)) for i in range(2 * BLOCK)], 2 * BLOCK)
    finished = []
    while engine.is_busy():
        finished += [progress.name for progress in engine.step() if progress.finished]
    assert finished == ["old", "young"] and engine.preemptions == 1 and engine.pool.free_blocks == 8
    # The old one takes a block of the young one's; the other, whole, is found again.
    assert engine.computed_tokens < 2 * (4 * BLOCK - 1) + 2 * BLOCK + BLOCK


@pytest.fixture
def load():
    from agents import Load

    return Load(4, shared=64, first=256, last=512, tool=32, output=16, think=0.05)


def test_agents_find_all_that_they_had_computed(load) -> None:
    from agents import run

    point = run(simulated(4 * 512 // BLOCK * 4), load, 3.0)
    assert len(point.turns) > 50 and all(turn.cached >= turn.reusable for turn in point.turns)
    assert point.figures()["recomputed_tokens"] == "0" and float(point.figures()["hit_rate"]) > 0.7
    assert all(256 <= turn.prompt <= 512 for turn in point.turns)
    assert point.finished / point.seconds == pytest.approx(float(point.figures()["turns_s"]), abs=0.01)


def test_agents_in_a_small_cache_share_the_instructions_alone(load) -> None:
    from agents import run

    point = run(simulated(40), load, 3.0)
    figures = point.figures()
    assert float(figures["hit_rate"]) < 0.3 < 0.5 < int(figures["recomputed_tokens"]) / int(figures["prompt_tokens"])


def test_agents_do_the_same_however_fast_the_engine_is(load) -> None:
    from agents import Agent

    def prompts(answer: int) -> list[int]:
        agent, lengths = Agent(1, load), []
        for _ in range(20):
            lengths.append(len(agent.context))
            agent.answer += [answer] * load.output
            agent.answered()
        return lengths

    assert prompts(7) == prompts(8) and len(set(prompts(7))) > 10


def test_too_few_turns_are_no_figures(load) -> None:
    from agents import Point

    with pytest.raises(ValueError, match="0 turns in 1 s: measure longer"):
        Point(load, 1.0, [], 0, 0, 0, 0.0).figures()


def test_speed_comes_from_rows(tmp_path: Path) -> None:
    from rows import append
    from simulated_engine import Speed

    for requests, context, step in ((1, 2048, 6.0), (32, 8192, 16.0)):
        append(tmp_path / "decode.csv", {"dtype": "tq4", "requests": requests, "context": context, "p50_ms": step})
    append(tmp_path / "prefill.csv", {"dtype": "tq4", "tokens": 8192, "tokens_s": 20_000})
    speed = Speed.measured(tmp_path, "tq4")
    assert speed.base + 2048 * speed.kv_second == pytest.approx(6e-3)
    assert speed.base + 32 * 8192 * speed.kv_second == pytest.approx(16e-3) and speed.prompt_second == 1 / 20_000
    with pytest.raises(ValueError, match=r"has no steps or prompts of .* for tq3: measure them"):
        Speed.measured(tmp_path, "tq3")


def test_a_reasoning_load_begins_where_a_long_run_would_be() -> None:
    """Output a second from the midst, and from an empty cache after a while, differ by less than 5 %."""
    from reasoning import Load, Watch, load_engine, under_way

    load = Load(prompt=64, output=512)
    made = under_way(load, 200, BLOCK, 1)
    assert made == sorted(made, reverse=True) and sum(made) / len(made) == pytest.approx(256, rel=0.01)
    midst = load_engine(simulated(200, 1), load, made, 3.0)
    watch = Watch(simulated(200, 1), load)
    watch.run(5.0)
    long = watch.run(10.0)
    assert int(midst["preemptions"]) > 0
    assert float(midst["output_tokens_s"]) == pytest.approx(long["tokens"] / long["seconds"], rel=0.05)


def test_blocks_and_rings_are_the_plans() -> None:
    """8 GB: an 8B-shaped token takes 147,456 bytes in bf16, and 136/512 of that at 4 bits, with a ring of 10 blocks."""
    from simulated_engine import blocks_of, config_of

    config = config_of(None)
    assert blocks_of(config, "auto", int(8e9), 16) == (int(8e9) // (16 * 147_456), 0)
    assert blocks_of(config, "isoquant4", int(8e9), 16) == (int(8e9) // (16 * 147_456 * 136 // 512), 10)


TURNS = """
import argparse, sys
import workers
parser = argparse.ArgumentParser()
parser.add_argument("--dtypes", nargs="+")
workers.add_engine_arguments(parser)
workers.add_arguments(parser, timeout=60)

def measure(dtype, options):
    workers.end_turn()
    for turn in (1, 2):
        if not workers.wait_for_device():
            return
        if (dtype, turn) == ("b", 1):
            raise SystemExit(3)
        workers.emit("turns.csv", {"dtype": dtype, "turn": turn})
        workers.end_turn()

if __name__ == "__main__":
    sys.exit(workers.take_turns(__file__, parser.parse_args(), measure, 2))
"""


def test_engines_take_turns_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    from rows import read

    script = tmp_path / "script.py"
    script.write_text(TURNS)
    command = [sys.executable, str(script), "--dtypes", "a", "b", "c", "--out", str(tmp_path), "--commit", "abc1234"]
    environment = {**os.environ, "PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert done.returncode == 1 and done.stdout.endswith("failed: b\n"), done.stdout + done.stderr
    assert [(row["dtype"], row["turn"]) for row in read(tmp_path / "turns.csv")] == [
        ("a", "1"), ("c", "1"), ("a", "2"), ("c", "2"),
    ]  # fmt: skip


def test_the_model_finds_what_vllm_finds(tmp_path: Path) -> None:
    """vLLM's scheduler and ours, with equally many blocks: the same hits, request by request, while blocks are evicted;
    then a load that begins in its midst, of which all runs at once."""
    import random

    import bench_engine
    from live_engine import LiveEngine
    from reasoning import Load, Watch, under_way
    from simulated_engine import SimulatedEngine, Speed, blocks_of, config_of
    from vllm.distributed import cleanup_dist_env_and_memory

    budget, dtype = 3_000_000, "isoquant4"
    llm = bench_engine.start(
        str(DEMO_MODEL), dtype, max_model_len=512, max_requests=16, kv_cache_memory=budget + (4 << 20),
        enable_prefix_caching=True, block_size=32,
    )  # fmt: skip
    try:
        device = bench_engine.Engine(llm)
        live = LiveEngine(device)
        blocks, ring = blocks_of(config_of(str(DEMO_MODEL)), dtype, budget, live.block_size)
        draw = random.Random(0)
        texts = [draw.choices(range(3, 4000), k=500) for _ in range(8)]
        trace = [(draw.randrange(8), draw.randint(100, 500)) for _ in range(24)]
        model, roomy = (SimulatedEngine(size, live.block_size, ring, Speed(1, 0, 0)) for size in (blocks, 1000))
        found: list[list[int]] = [[], [], []]
        device.fill_pages()
        with live.serving(budget) as given:
            assert given == blocks == 57
            for hits, engine in zip(found, (live, model, roomy), strict=True):
                for number, (text, length) in enumerate(trace):
                    engine.add(str(number), texts[text][:length], 1)
                    hits += finish(engine).values()
            load = Load(prompt=32, output=128, vocabulary=4000)
            watch = Watch(live, load)
            watch.begin(under_way(load, 50, live.block_size, ring))
            steps = [len(live.step()) for _ in range(3)]
            live.abort(sorted(watch.alive))
        assert found[0] == found[1]
        assert 0 < sum(found[1]) < sum(found[2]), "nothing was found, or nothing was evicted"
        assert len(watch.alive) > 4 and max(steps) == len(watch.alive)
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
