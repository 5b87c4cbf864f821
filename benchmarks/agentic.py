"""Worth of a larger KV cache to agents: N contexts that grow turn by turn, in caches of equal bytes.

    python benchmarks/agentic.py [--dtypes NAME ...] [--agents N ...] [--offload GIB]
    python benchmarks/agentic.py --predict          the same by arithmetic; no device is needed

The load is that of `agents.py`: contexts of 8k to 12k tokens, answers of 128, tools' results of 128 to 384, half a
second to one and a half between an answer and the next turn, prefix caching on. Each dtype gets one engine with
dummy weights and CUDA graphs for decodes; all start at once, and when all have started they are measured one at a time,
each with all its `--kv-bytes`, first the first number of agents for every dtype, then the next. The prefix cache is
emptied between the points. A point is watched for --seconds after every agent has had an answer; then what is under way
is aborted. Rows of agentic.csv: the share of prompt tokens that the cache had (`hit_rate`), prompt tokens that were
computed again though they had been before (`recomputed_tokens`; not those behind a preemption), seconds to the first
token of a turn, turns and output tokens a second. `engine` says "vllm" ("vllm, compiled" with --compile) or
"arithmetic": `simulated_engine.py`, with the seconds a step of --steps. --offload adds host memory behind the cache
(vLLM's `kv_offloading_size`), which arithmetic does not know. --reasoning-seconds measures the load of `reasoning.py`
in the same engines afterwards, to save a start.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import agents
import reasoning
import rows
import workers
from packed_kv.layout import MICRO_BLOCK
from simulated_engine import SimulatedEngine, Speed, blocks_of, config_of


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["auto", "fp8", "isoquant4"], help="default: %(default)s")
    add("--agents", type=int, nargs="*", default=[16, 12, 20, 24], help="a point each (default: %(default)s)")
    add("--seconds", type=float, default=15.0, help="that a point is watched (default: %(default)s)")
    add("--kv-bytes", type=float, default=8e9, help="of the KV cache of each dtype (default: %(default)g)")
    agents.add_arguments(parser)
    reasoning.add_arguments(parser, seconds=0, prefix="reasoning-")
    add("--predict", action="store_true", help="by arithmetic alone")
    workers.add_engine_arguments(parser)
    workers.add_arguments(parser, timeout=300)
    return parser.parse_args()


def load_of(number: int, options: argparse.Namespace) -> agents.Load:
    return agents.load_of(number, options, config_of(options.model)["vocab_size"])


def row(
    dtype: str, engine: str, blocks: int, block_size: int, point: agents.Point, options: argparse.Namespace
) -> dict:
    return {
        "engine": engine, "dtype": dtype, **asdict(point.load), "kv_bytes": int(options.kv_bytes),
        "kv_tokens": blocks * block_size, "block_size": block_size, "offload_gib": options.offload or 0,
        **point.figures(),
    }  # fmt: skip


def predict(options: argparse.Namespace) -> None:
    """Write the rows of arithmetic."""
    options.out.mkdir(parents=True, exist_ok=True)
    commit, block_size = options.commit or rows.commit_here(), options.block_size or MICRO_BLOCK
    for number in options.agents:
        for dtype in options.dtypes:
            blocks, ring = blocks_of(config_of(options.model), dtype, int(options.kv_bytes), block_size)
            engine = SimulatedEngine(blocks, block_size, ring, Speed.measured(options.steps, dtype))
            point = agents.run(engine, load_of(number, options), options.seconds)
            figures = row(dtype, "arithmetic", blocks, block_size, point, options)
            print(*(f"{key} {value} " for key, value in figures.items()), flush=True)
            rows.append(options.out / "agentic.csv", {**figures, **dict.fromkeys(rows.MACHINE, ""), "commit": commit})


def measure(dtype: str, options: argparse.Namespace) -> None:
    """In a process of its own: measure one dtype."""
    from live_engine import LiveEngine, start

    budget, longest, most = int(options.kv_bytes), options.last + options.output, max([1, *options.agents])
    if options.reasoning_seconds:
        budget = max(budget, int(options.reasoning_bytes))
        longest = max(longest, options.reasoning_prompt + options.reasoning_output)
        most = max(most, reasoning.MAX_REQUESTS)
    device = start(dtype, options, budget, longest, most)
    engine = LiveEngine(device)
    workers.end_turn()
    for number in options.agents:
        if not workers.wait_for_device():
            return
        with engine.serving(int(options.kv_bytes)) as blocks:
            point = agents.run(engine, load_of(number, options), options.seconds)
        measured = row(dtype, workers.engine_name(options), blocks, engine.block_size, point, options)
        workers.emit("agentic.csv", {**measured, **rows.machine()})
        workers.end_turn()
    if options.reasoning_seconds and workers.wait_for_device():
        reasoning.measure_load(dtype, device, engine, options)
        workers.end_turn()


def main() -> int:
    options = parse_arguments()
    if options.predict:
        predict(options)
        return 0
    return workers.take_turns(__file__, options, measure, len(options.agents) + bool(options.reasoning_seconds))


if __name__ == "__main__":
    sys.exit(main())
