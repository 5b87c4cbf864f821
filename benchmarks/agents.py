"""Agents at equal memory: turns behind contexts that grow, on vLLM's engine without a server.

    python benchmarks/agents.py [--dtypes NAME ...] [--agents N ...] [--kv-cache-memory BYTES] [--arrivals RATE ...]

Each dtype, or a dtype in a mode of CUDA graphs such as `fp8:FULL`, gets an `AsyncLLM` in a process of its own, which
runs the engine in another, as a server does. An agent has a context of random tokens of its own, of the lengths
--contexts; a turn adds --input random tokens to it, and the --output tokens that the model answers. The next turn comes
--think seconds later. An agent whose context would grow too long begins a new one of the shortest length; at first the
agents' lengths are spread evenly. Each of --arrivals is a further case, the same load for all dtypes: turns come as a
Poisson process of RATE a second, not after --think, each is of the agent, of the first of --agents, that has been idle
for longest, and they wait while none is.

A row of agents.csv has what came in --seconds, behind --warm-up seconds, by this process's clock as outputs arrive:
tokens a second; TTFT from when a turn is due; `itl`, the time between outputs of a turn; the share of prompt tokens
that the prefix cache had; and of the engine's steps the share that ran without a CUDA graph, as they had more tokens
than the largest one (`eager`), and the share that ran as one (`whole`). A case of which --out has a row of the same
settings and commit is left out, its dtype's engine, too, unless --again: a folder is for one card.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import async_engine
import rows
import workers

FILE = "agents.csv"
DTYPES = ("auto:FULL", "fp8:FULL", "tq4", "turboquant25", "auto", "fp8")
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 128, 192, 256, 272, 288, 304, 320, 384, 448, 512, 576, 640)
"""Tokens of the CUDA graphs: fewer than vLLM's own, to start sooner, dense where one turn stands beside the decodes."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=list(DTYPES), metavar="NAME[:MODE]", help="default: %(default)s")
    add("--agents", nargs="+", type=int, default=[24], help="default: %(default)s")
    add("--contexts", nargs=2, type=int, default=[8000, 12000], help="least and most tokens (default: %(default)s)")
    add("--input", type=int, default=256, help="new prompt tokens of a turn (default: %(default)s)")
    add("--output", type=int, default=128, help="output tokens of a turn (default: %(default)s)")
    add("--think", type=float, default=0.5, help="seconds from an answer to the next turn (default: %(default)s)")
    add("--arrivals", nargs="+", type=float, default=[], help="turns a second, in further cases (default: none)")
    add("--warm-up", type=float, default=20, help="seconds before the measured ones (default: %(default)s)")
    add("--seconds", type=float, default=30, help="measured seconds (default: %(default)s)")
    add("--step-tokens", type=int, default=8192, help="most tokens of a step (default: %(default)s)")
    add("--kv-cache-memory", type=float, default=12e9, help="bytes of KV cache (default: %(default)g)")
    add("--model", help="folder of another model, for its shape (default: 8B-shaped)")
    add("--together", action="store_true", help="start all engines at once, to save time; measure a case each in turns")
    add("--no-compile", action="store_true", help="neither torch.compile nor piecewise graphs, to start sooner")
    add("--again", action="store_true", help="measure cases that have a row, too")
    workers.add_arguments(parser, timeout=400)
    options = parser.parse_args(arguments)
    least, most = options.contexts
    if least + options.input + options.output > most:
        parser.error(f"--contexts {least} {most}: a turn has {options.input + options.output} tokens")
    return options


class Agent:
    """A context that grows by turns, and begins anew before it has more than `most` tokens."""

    def __init__(self, seed: str, vocabulary: int, start: int, options: argparse.Namespace) -> None:
        self._source, self._vocabulary = random.Random(seed), range(3, vocabulary)
        self._options = options
        self.context = self._random(start)

    def _random(self, tokens: int) -> list[int]:
        return self._source.choices(self._vocabulary, k=tokens)

    def prompt(self) -> list[int]:
        """The tokens of the next turn's prompt."""
        least, most = self._options.contexts
        if len(self.context) + self._options.input + self._options.output > most:
            self.context = self._random(least)
        self.context = self.context + self._random(self._options.input)
        return self.context

    def answer(self, tokens: list[int]) -> None:
        """Take the model's tokens into the context."""
        self.context = self.context + tokens


def cases(options: argparse.Namespace) -> list[tuple[int, float]]:
    """Agents and turns a second of each case; 0: as many as the agents take."""
    return [(count, 0.0) for count in options.agents] + [(options.agents[0], rate) for rate in options.arrivals]


def make_agents(count: int, arrivals: float, vocabulary: int, options: argparse.Namespace) -> list[Agent]:
    """Agents whose contexts have lengths spread evenly. No two cases share prompts."""
    least, most = options.contexts
    room = most - options.input - options.output - least
    case = f"{count} {arrivals}"
    return [Agent(f"{case} {number}", vocabulary, least + room * number // count, options) for number in range(count)]


@dataclass
class Seen:
    """Arrivals: the clock in seconds, then tokens of an output; seconds to a first token; seconds between
    outputs; the mode of a step's CUDA graphs; prompt tokens, and those that the cache had."""

    outputs: list[tuple[float, int]] = field(default_factory=list)
    ttft: list[tuple[float, float]] = field(default_factory=list)
    itl: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, str]] = field(default_factory=list)
    prompts: list[tuple[float, int, int]] = field(default_factory=list)

    def figures(self, begin: float, end: float) -> dict[str, str]:
        """The row's figures, of what arrived from `begin` to `end`."""

        def within(found: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
            return [values for when, *values in found if begin <= when < end]

        ttft, itl = ([seconds for (seconds,) in within(found)] for found in (self.ttft, self.itl))
        modes, prompts = [mode for (mode,) in within(self.steps)], within(self.prompts)
        asked = sum(tokens for tokens, _ in prompts)
        tokens = sum(count for (count,) in within(self.outputs))
        return {
            "output_tokens_s": f"{tokens / (end - begin):.1f}",
            "hit_rate": f"{sum(hits for _, hits in prompts) / asked:.3f}" if asked else "",
            **{f"p{p}_ttft_ms": milliseconds(ttft, p) for p in (50, 99)},
            **{f"p{p}_itl_ms": milliseconds(itl, p) for p in (50, 99)},
            "turns": str(len(ttft)),
            "steps": str(len(modes)),
            **{name: share(modes, mode) for name, mode in (("eager", "NONE"), ("whole", "FULL"))},
        }


def milliseconds(seconds: list[float], percent: int) -> str:
    """A percentile of a row; "" of nothing."""
    return f"{rows.percentile(seconds, percent) * 1e3:.2f}" if seconds else ""


def share(modes: list[str], mode: str) -> str:
    """The share of a mode in a row; "" of nothing."""
    return f"{modes.count(mode) / len(modes):.3f}" if modes else ""


def recorder(seen: list[Seen]) -> Callable[..., Any]:
    """The class of vLLM's logger that puts an engine's steps into the last of `seen`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def log_engine_initialized(self) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is None:
                return
            now = time.perf_counter()
            found = scheduler_stats.prefix_cache_stats
            seen[-1].prompts.append((now, found.queries, found.hits))
            if graph := scheduler_stats.cudagraph_stats:
                seen[-1].steps.append((now, graph.runtime_mode))

    return Recorder


async def turn(engine: Any, agent: Agent, name: str, due: float, seen: Seen, output: int) -> None:
    """A turn of an agent that was due at a time of the clock."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    tokens: list[int] = []
    last = 0.0
    async for result in engine.generate({"prompt_token_ids": agent.prompt()}, sampling, name):
        now, found = time.perf_counter(), result.outputs[0].token_ids
        if not found:
            continue
        seen.outputs.append((now, len(found)))
        if tokens:
            seen.itl.append((now, now - last))
        else:
            seen.ttft.append((now, now - due))
        tokens += found
        last = now
    agent.answer(tokens)


async def load(
    engine: Any, agents: list[Agent], arrivals: float, seen: Seen, options: argparse.Namespace
) -> tuple[float, float]:
    """Let the agents work for the warm-up and the measured seconds; the clock at the begin and the end of these."""
    begin = time.perf_counter() + options.warm_up
    end = begin + options.seconds
    numbers = iter(range(sys.maxsize))
    case = f"{len(agents)}-{arrivals}"

    async def take(agent: Agent, due: float) -> None:
        await turn(engine, agent, f"{case}-{next(numbers)}", due, seen, options.output)

    async def think(agent: Agent) -> None:
        while True:
            await take(agent, time.perf_counter())
            await asyncio.sleep(options.think)

    async def arrive() -> None:
        idle: asyncio.Queue[Agent] = asyncio.Queue()
        for agent in agents:
            idle.put_nowait(agent)

        async def wait(due: float) -> None:
            agent = await idle.get()
            await take(agent, due)
            idle.put_nowait(agent)

        source = random.Random(0)
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while True:
                due += source.expovariate(arrivals)
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(wait(due))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(end - time.perf_counter()), asyncio.TaskGroup() as group:
            for work in [arrive()] if arrivals else [think(agent) for agent in agents]:
                group.create_task(work)
    return begin, end


def settings(name: str, agents: int, arrivals: float, options: argparse.Namespace) -> dict[str, object]:
    """The columns that name a case."""
    dtype, mode = workers.split_mode(name)
    return {
        "dtype": dtype, "mode": mode or "default", "agents": agents, "arrivals": arrivals or "",
        "think": "" if arrivals else options.think, "contexts": "-".join(map(str, options.contexts)),
        "input": options.input, "output": options.output, "seconds": options.seconds, "warm_up": options.warm_up,
        "step_tokens": options.step_tokens, "kv_bytes": int(options.kv_cache_memory),
    }  # fmt: skip


def missing(name: str, options: argparse.Namespace) -> list[tuple[int, float]]:
    """The cases that have no row with these settings yet."""
    commit = options.commit or rows.commit_here()
    return [
        case
        for case in cases(options)
        if options.again or not rows.has(options.out / FILE, {**settings(name, *case, options), "commit": commit})
    ]


async def measure_engine(name: str, model: str, options: argparse.Namespace) -> None:
    dtype, mode = workers.split_mode(name)
    mode, additional_config = workers.options_of_mode(mode)
    started = time.monotonic()
    seen = [Seen()]
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": list(GRAPH_SIZES)}
    if options.no_compile:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if mode:
        compilation["cudagraph_mode"] = mode
    engine = async_engine.start(
        model, dtype, options, [recorder(seen)], enable_prefix_caching=True, max_model_len=options.contexts[1] + 64,
        max_num_batched_tokens=options.step_tokens, max_num_seqs=max(options.agents), disable_log_stats=False,
        cudagraph_metrics=True, compilation_config=compilation, additional_config=additional_config,
    )  # fmt: skip
    try:
        print(f"{name}: engine ready after {time.monotonic() - started:.0f} s", flush=True)
        if options.together and not workers.wait_for_device():
            return
        for count, arrivals in missing(name, options):
            if options.together and not workers.hand_over():
                return
            seen.append(Seen())
            agents = make_agents(count, arrivals, engine.model_config.get_vocab_size(), options)
            begin, end = await load(engine, agents, arrivals, seen[-1], options)
            case = settings(name, count, arrivals, options)
            workers.emit(FILE, {**case, **seen[-1].figures(begin, end), **rows.machine()})
    finally:
        engine.shutdown()


def measure(name: str, options: argparse.Namespace) -> None:
    """In a process of its own: measure one dtype in one mode."""
    async_engine.measure(name, options, measure_engine)


def main() -> int:
    options = parse_arguments()
    if not options.worker:
        options.dtypes = [name for name in options.dtypes if missing(name, options)]
    return workers.run(__file__, options, measure, options.together)


if __name__ == "__main__":
    sys.exit(main())
