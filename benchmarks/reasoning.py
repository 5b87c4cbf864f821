"""Worth of a larger KV cache to reasoning: 1k tokens in, 8k out, as many requests at once as the cache holds.

    python benchmarks/reasoning.py [--dtypes NAME ...] [--seconds S] [--kv-bytes BYTES]
    python benchmarks/reasoning.py --predict        the same by arithmetic, and the long run that it stands for

Filling a cache with answers of 8k tokens takes minutes a dtype. So a run begins in the midst of its steady state: as
many requests as fit are under way, the k-th of n with (k + 1/2) / n of its answer, the oldest first, and new prompts
wait. The contexts are not computed; their pages hold what one prompt's do (`bench_engine.py`), and the requests go on
from there. For --seconds the scheduler then does what it does: requests end, new prompts are taken in and computed, the
youngest are preempted and computed again. Rows of reasoning.csv: output tokens a second in all, and in either half
(equal where the state is steady), requests that ended, preemptions, mean and most requests under way.

--predict runs `simulated_engine.py` from the same state for the same time ("arithmetic"), and from an empty cache for
--long seconds, of which the first third is left out ("arithmetic, long").
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import rows
import workers
from packed_kv.layout import MICRO_BLOCK
from simulated_engine import SimulatedEngine, Speed, blocks_of, config_of

if TYPE_CHECKING:
    import bench_engine
    from live_engine import LiveEngine

MAX_REQUESTS = 192
QUEUE = 2
"""Prompts that wait at any time, at least."""
WARM_UP_STEPS = 8


@dataclass(frozen=True)
class Load:
    """Tokens of a prompt and of its answer."""

    prompt: int = 1024
    output: int = 8192
    vocabulary: int = 32000

    def tokens(self, number: int, length: int) -> list[int]:
        return random.Random(f"prompt {number}").choices(range(3, self.vocabulary), k=length)


def add_arguments(parser: argparse.ArgumentParser, *, seconds: float, prefix: str = "") -> None:
    """The options of the load, for a script whose own ones may have the same names."""

    def add(name: str, destination: str, default: float, what: str) -> None:
        options = {"type": type(default), "default": default, "dest": f"reasoning_{destination}"}
        parser.add_argument(f"--{prefix}{name}", help=f"{what} (default: %(default)g)", **options)

    add("seconds", "seconds", float(seconds), "that the load is watched")
    add("kv-bytes", "bytes", 20e9, "bytes of KV cache of each dtype")
    add("prompt", "prompt", Load.prompt, "tokens of a prompt")
    add("output", "output", Load.output, "tokens of an answer")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["auto", "fp8", "isoquant4"], help="default: %(default)s")
    add_arguments(parser, seconds=30)
    add("--predict", action="store_true", help="by arithmetic alone")
    add("--long", type=float, default=600, help="seconds of the long run of arithmetic; 0: none (default: %(default)s)")
    workers.add_engine_arguments(parser)
    workers.add_arguments(parser, timeout=300)
    return parser.parse_args()


def under_way(load: Load, blocks: int, block_size: int, ring_blocks: int) -> list[int]:
    """Tokens of the answers of the requests that fit `blocks`, evenly spread over their lives, the oldest first."""

    def spread(requests: int) -> list[int]:
        return [int(load.output * (requests - k - 0.5) / requests) for k in range(requests)]

    def needed(requests: int) -> int:
        return sum(-(-(load.prompt + made + 1) // block_size) + ring_blocks for made in spread(requests))

    requests = 1
    while needed(requests + 1) <= blocks and requests < MAX_REQUESTS:
        requests += 1
    return spread(requests)


class Watch:
    """Keeps a queue of new prompts before an engine, and counts what it makes."""

    def __init__(self, engine: LiveEngine | SimulatedEngine, load: Load) -> None:
        self.engine, self.load = engine, load
        self.alive: set[str] = set()
        self._begun: set[str] = set()
        self._added = 0

    def begin(self, made: list[int]) -> None:
        """Start in the midst, with requests that have made so many tokens."""
        for tokens in made:
            name = self._next()
            length = self.load.prompt + tokens
            self.engine.add_decoding(name, self.load.tokens(self._added, length), self.load.output - tokens)
            self._begun.add(name)

    def _next(self) -> str:
        self._added += 1
        self.alive.add(str(self._added))
        return str(self._added)

    def run(self, seconds: float) -> dict[str, float]:
        """Figures of the next `seconds`."""
        engine, preempted = self.engine, self.engine.preemptions
        started, tokens, ended, steps, at_once, most = engine.now(), 0, 0, 0, 0, 0
        while engine.now() < started + seconds:
            while len(self.alive) - len(self._begun) < QUEUE:
                name = self._next()
                engine.add(name, self.load.tokens(self._added, self.load.prompt), self.load.output)
            news = engine.step()
            for progress in news:
                self._begun.add(progress.name)
                tokens += len(progress.tokens)
                if progress.finished:
                    ended += 1
                    self.alive.discard(progress.name)
                    self._begun.discard(progress.name)
            steps, at_once, most = steps + 1, at_once + len(news), max(most, len(news))
        return {
            "seconds": engine.now() - started, "tokens": tokens, "ended": ended, "steps": steps, "at_once": at_once,
            "most": most, "preemptions": engine.preemptions - preempted,
        }  # fmt: skip


def figures(first: dict[str, float], second: dict[str, float]) -> dict[str, str]:
    """Columns of a row from the figures of its two halves."""
    total = {key: first[key] + second[key] for key in first}
    rate = {key: f"{half['tokens'] / half['seconds']:.0f}" for key, half in (("first", first), ("second", second))}
    return {
        "seconds": f"{total['seconds']:.1f}", "output_tokens_s": f"{total['tokens'] / total['seconds']:.0f}",
        "first_half_tokens_s": rate["first"], "second_half_tokens_s": rate["second"],
        "mean_requests": f"{total['at_once'] / total['steps']:.1f}",
        "most_requests": f"{max(first['most'], second['most'])}",
        "ended": f"{total['ended']}", "preemptions": f"{total['preemptions']}", "steps": f"{total['steps']}",
    }  # fmt: skip


def row(
    dtype: str, engine: str, load: Load, kv_tokens: int, measured: dict[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    return {
        "engine": engine, "dtype": dtype, **asdict(load), "kv_bytes": int(options.reasoning_bytes),
        "kv_tokens": kv_tokens, **measured,
    }  # fmt: skip


def load_engine(engine: LiveEngine | SimulatedEngine, load: Load, made: list[int], seconds: float) -> dict[str, str]:
    """Figures of `seconds` in the midst of the steady state."""
    watch = Watch(engine, load)
    watch.begin(made)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    halves = [watch.run(seconds / 2) for _ in range(2)]
    engine.abort(sorted(watch.alive))
    return figures(*halves)


def measure_load(dtype: str, device: bench_engine.Engine, engine: LiveEngine, options: argparse.Namespace) -> None:
    """In a worker, whose engine has a prefix cache: emit the row."""
    load = Load(options.reasoning_prompt, options.reasoning_output, device.vocabulary)
    device.fill_pages()
    with engine.serving(int(options.reasoning_bytes)) as blocks:
        _, ring = blocks_of(config_of(options.model), dtype, int(options.reasoning_bytes), engine.block_size)
        made = under_way(load, blocks, engine.block_size, ring)
        measured = load_engine(engine, load, made, options.reasoning_seconds)
    found = row(dtype, workers.engine_name(options), load, blocks * engine.block_size, measured, options)
    workers.emit("reasoning.csv", {**found, **rows.machine()})


def predict(load: Load, options: argparse.Namespace) -> None:
    """Write the rows of arithmetic."""
    options.out.mkdir(parents=True, exist_ok=True)
    block_size = options.block_size or MICRO_BLOCK
    for dtype in options.dtypes:
        blocks, ring = blocks_of(config_of(options.model), dtype, int(options.reasoning_bytes), block_size)
        speed = Speed.measured(options.steps, dtype)
        engine = SimulatedEngine(blocks, block_size, ring, speed, max_requests=MAX_REQUESTS)
        made = under_way(load, blocks, block_size, ring)
        rates = {"arithmetic": load_engine(engine, load, made, options.reasoning_seconds)}
        if options.long:
            engine = SimulatedEngine(blocks, block_size, ring, speed, max_requests=MAX_REQUESTS)
            watch = Watch(engine, load)
            watch.run(options.long / 3)
            rates["arithmetic, long"] = figures(*(watch.run(options.long / 3) for _ in range(2)))
        for name, measured in rates.items():
            found = row(dtype, name, load, blocks * block_size, measured, options)
            print(*(f"{key} {value} " for key, value in found.items()), flush=True)
            commit = options.commit or rows.commit_here()
            rows.append(options.out / "reasoning.csv", {**found, **dict.fromkeys(rows.MACHINE, ""), "commit": commit})


def measure(dtype: str, options: argparse.Namespace) -> None:
    """In a process of its own: measure one dtype."""
    from live_engine import LiveEngine, start

    longest = options.reasoning_prompt + options.reasoning_output
    device = start(dtype, options, int(options.reasoning_bytes), longest, MAX_REQUESTS)
    workers.end_turn()
    if workers.wait_for_device():
        measure_load(dtype, device, LiveEngine(device), options)
        workers.end_turn()


def main() -> int:
    options = parse_arguments()
    if options.predict:
        predict(Load(options.reasoning_prompt, options.reasoning_output), options)
        return 0
    return workers.take_turns(__file__, options, measure, 1)


if __name__ == "__main__":
    sys.exit(main())
