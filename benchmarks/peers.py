#!/usr/bin/env python3
"""Disaggregated prefill over NIXL between engines of this host: the figures of docs/lab/disaggregated.md.

    python benchmarks/peers.py isoquant4 isoquant4:1:2 turboquant25:2:1    # demo model, CPU
    python benchmarks/peers.py --devices 2 --shape 8b --dtype bfloat16 --tokens 10240 \\
        --kv-cache-memory 8e9 --csv peers.csv auto isoquant4 isoquant4:1:1:64 isoquant4:1:2

A CASE is DTYPE[:PREFILL_RANKS[:DECODE_RANKS[:BLOCK_SIZE[:DECODE_BLOCK_SIZE]]]].

Each engine is a process of its own; all start at once, then the cases follow one another. In each, a prefill engine
computes a prompt, and a decode engine goes on with it. The prefill engine then answers the same prompt itself, from its
prefix cache: tokens and logprobs are compared with these, and the pages of all full blocks byte for byte. Needs nixl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows
from nixl_engine import Answer, Peer

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Engine:
    """One side of a case."""

    role: str
    kv_cache_dtype: str
    ranks: int
    block_size: int

    def start(self, port: int, log: Path, options: argparse.Namespace, model: str) -> Peer:
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        engine: dict[str, Any] = {
            "kv_cache_dtype": self.kv_cache_dtype, "block_size": self.block_size, "dtype": options.dtype,
            "max_model_len": options.tokens + 64, "max_num_batched_tokens": 8192, "max_num_seqs": 8,
            "kv_cache_memory_bytes": int(options.kv_cache_memory), "skip_tokenizer_init": True,
            "num_gpu_blocks_override": (options.prompts + 2) * (options.tokens // self.block_size + 4),
            "gpu_memory_utilization": 0.1,
            **options.options,
        }  # fmt: skip
        if options.shape == "8b":
            engine["load_format"] = "dummy"
        if self.ranks > 1:
            engine |= {"tensor_parallel_size": self.ranks, "distributed_executor_backend": "mp"}
        if options.devices:
            first = 0 if self.ranks > 1 or self.role == "kv_producer" else options.devices - 1
            visible = range(first, first + self.ranks)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible))
        return Peer(model, self.role, log, environment, engine)


@dataclass(frozen=True)
class Case:
    """Two engines that a prompt goes through."""

    prefill: Engine
    decode: Engine

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse a case as the module's docstring writes it."""
        dtype, *numbers = text.split(":")
        prefill, decode, size = [*map(int, numbers[:3]), *(1, 1, 16)[len(numbers) :]]
        decode_size = int(numbers[3]) if len(numbers) > 3 else size
        return cls(Engine("kv_producer", dtype, prefill, size), Engine("kv_consumer", dtype, decode, decode_size))


@dataclass
class Comparison:
    """A prompt computed by the prefill engine (`sent`), gone on with by the decode engine (`got`), and by the prefill
    engine itself (`own`); digests of the pages of the prompt's full blocks on either side, if all layers have the same
    blocks and both engines blocks of one size."""

    sent: Answer
    got: Answer
    own: Answer
    sent_pages: list[bytes]
    got_pages: list[bytes]


def compare(case: Case, prefill: Peer, decode: Peer, prompt: list[int], count: int) -> Comparison:
    """One prompt through both engines. Raises RuntimeError if the transfer fails."""
    sent = prefill.prefill(prompt)
    got = decode.ask(prompt, sent.params, count)
    if got.finish_reason == "error":
        raise RuntimeError(f"the transfer failed; the decode engine's log ends\n{decode.log.read_text()[-3000:]}")
    own = prefill.ask(prompt, None, count)
    again = decode.prefill(prompt)  # its params name the blocks into which it has read the prompt
    groups = [answer.params["remote_block_ids"] for answer in (sent, again)]  # type: ignore[index]
    pages: list[list[bytes]] = [[], []]
    if len(groups[0]) == 1 and case.prefill.block_size == case.decode.block_size:
        full = len(prompt) // case.decode.block_size
        pages = [peer.pages(blocks[:full]) for peer, (blocks,) in zip((prefill, decode), groups, strict=True)]
    return Comparison(sent, got, own, *pages)


def row(case: Case, found: list[Comparison]) -> dict[str, object]:
    """The figures of some prompts: sums of what is equal, medians of times."""
    reads = [list(zip(*one.got.transfers, strict=True)) for one in found]  # bytes, descriptors, seconds of all ranks
    seconds = statistics.median(max(read[2]) for read in reads)
    pages = [pair for one in found for pair in zip(one.sent_pages, one.got_pages, strict=True)]
    tokens = [pair for one in found for pair in zip(one.got.tokens, one.own.tokens, strict=True)]
    logprobs = [pair for one in found for pair in zip(one.got.logprobs, one.own.logprobs, strict=True)]
    return {
        "dtype": case.decode.kv_cache_dtype,
        "prefill_ranks": case.prefill.ranks,
        "decode_ranks": case.decode.ranks,
        "block_size": case.decode.block_size,
        "bytes": sum(reads[0][0]),
        "descriptors": sum(reads[0][1]),
        "transfer_ms": f"{seconds * 1e3:.2f}",
        "GB_s": f"{sum(reads[0][0]) / seconds / 1e9:.2f}",
        "prefill_ms": f"{statistics.median(one.sent.seconds for one in found) * 1e3:.1f}",
        "pages": len(pages),
        "equal_pages": sum(a == b for a, b in pages),
        "tokens": len(tokens),
        "equal_tokens": sum(a == b for a, b in tokens),
        "max_logprob_difference": f"{max(abs(a - b) for a, b in logprobs):.2g}",
    }


@contextlib.contextmanager
def started(cases: list[Case], options: argparse.Namespace, model: str, logs: Path) -> Iterator[dict[Engine, Peer]]:
    """The engines of all cases, each once, ready."""
    engines = list(dict.fromkeys(engine for case in cases for engine in (case.prefill, case.decode)))
    peers: dict[Engine, Peer] = {}
    try:
        for i, engine in enumerate(engines):
            peers[engine] = engine.start(options.port + 10 * i, logs / f"{i}.log", options, model)
        for peer in peers.values():
            peer.wait()
        yield peers
    finally:
        for peer in peers.values():
            peer.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("cases", nargs="*", type=Case.parse, metavar="CASE")
    add("--shape", choices=["demo", "8b"], default="demo", help="the demo model, or an 8B-shaped one of random weights")
    add("--model", help="folder of another model")
    add("--options", type=json.loads, default={}, metavar="JSON", help="more arguments of all engines, as for `LLM`")
    add("--tokens", type=int, default=256, help="prompt tokens, a multiple of 64, and one more (default: %(default)s)")
    add("--answer", type=int, default=16, help="tokens of an answer (default: %(default)s)")
    add("--prompts", type=int, default=3, help="after one that is not counted (default: %(default)s)")
    add("--dtype", default="float32", help="of the model; GPUs need bfloat16 or float16 (default: %(default)s)")
    add("--kv-cache-memory", type=float, default=64e6, help="bytes of KV cache, at most (default: %(default)g)")
    add("--devices", type=int, default=0, help="GPUs; 0: engines run on the CPU (default: %(default)s)")
    add("--port", type=int, default=5700, help="first of the engines' ports (default: %(default)s)")
    add("--logs", type=Path, help="keep the engines' logs in this folder")
    add("--csv", type=Path, help="append the rows to this file")
    add("--commit", help="for the rows (default: what git says)")
    options = parser.parse_args()
    options.cases = options.cases or [Case.parse(text) for text in ("auto:1:1:32", "isoquant4", "isoquant4:1:2")]
    return options


def main() -> None:
    options = parse_arguments()
    from bench_engine import write_model  # imports torch, in an engine's process before its environment is set

    with tempfile.TemporaryDirectory() as folder:
        demo = options.model or str(REPO / "models" / "demo-7m")
        model = demo if options.shape == "demo" else write_model(folder)
        vocabulary = range(3, json.loads(Path(model, "config.json").read_text())["vocab_size"])
        begun, logs = time.perf_counter(), options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        with started(options.cases, options, model, logs) as peers:
            print(f"{len(peers)} engines ready after {time.perf_counter() - begun:.0f} s", flush=True)
            for case in options.cases:
                seeds = range(options.prompts + 1)
                prompts = [random.Random(seed).choices(vocabulary, k=options.tokens + 1) for seed in seeds]
                pair = peers[case.prefill], peers[case.decode]
                found = [compare(case, *pair, prompt, options.answer) for prompt in prompts]
                figures = row(case, found[1:]) | {"prompt_tokens": options.tokens + 1, "shape": options.shape}
                print(*(f"{name} {value} " for name, value in figures.items()), flush=True)
                if options.csv:
                    machine = {**rows.machine(), "commit": options.commit or rows.commit_here()}
                    rows.append(options.csv, figures | machine)


if __name__ == "__main__":
    main()
