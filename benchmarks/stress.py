"""The CUDA kernels launched again and again from a graph, bits compared: a difference is a race.

    python benchmarks/stress.py latents [--heads N ...] [--requests N ...] [--rounds N] [--seconds S]
    python benchmarks/stress.py pairs [--requests N ...] [--rounds N] [--seconds S]

A round is a graph of several layers; every second one runs beside a copy of 128 MB. Its outputs are compared with those
of the same launches outside of a graph, each of which latents wait for. A case is a batch, a dtype and, for latents, 16
or 8 bits of RoPE, pages alone and with the recent window; for pairs, the columns of a pass, with the window and
without. Cases that the time cut off are named. Exit code 1: a round differs, a case fails, or none ran.
`tests/kernels/test_repeated_launches.py` has more kernels at fewer shapes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))
from repeated import rounds_that_differ

LATENT_SHAPES = ((64, 4096), (8, 32768), (132, 1984), (7, 8960), (1, 32768), (300, 704))
LATENT_CODES = (("tq4", 16), ("tq4", 8), ("turboquant25", 16), ("tq3", 16), ("turboquant35", 16))
PAIR_SHAPES = ((32, 4096), (5, 16384), (97, 1280))
COLUMNS = ((4, 1), (4, 2), (4, 4), (16, 1), (4, 8), (4, 16), (16, 4), (16, 8), (8, 3), (12, 1))
"""Query heads a KV head, query tokens a request."""
PAIR_CODES = ("isoquant4", "turboquant25", "tq3", "turboquant35")
SETTINGS = ((0, 0.8, None), (64, 0, "blocks"))
"""Tokens of the recent window, spread of lengths, means of keys."""

Round = tuple[Callable[[], None], Callable[[], None] | None, list[torch.Tensor]]
"""A graph's launches, the same one by one if they can be, and the outputs."""
Case = tuple[str, Callable[[], Iterator[Round]]]
"""A name, and what makes its rounds."""
Shapes = list[tuple[int, int]]
"""Requests of a batch, and tokens of each."""


def latents(shapes: Shapes, heads: list[int]) -> Iterator[Case]:
    from latent_kernels import RANK, ROPE
    from latent_layer import Case as Layers
    from packed_kv.codecs.latent import LatentCodec
    from packed_kv.formats import FORMATS

    for count, (requests, context), (name, bits) in itertools.product(heads, shapes, LATENT_CODES):
        if count > 32 and (name, bits) != ("tq4", 16):
            continue

        def make(count=count, requests=requests, context=context, name=name, bits=bits):
            codec = LatentCodec(FORMATS[name], RANK, ROPE, device="cuda", rope_bits=bits)
            layers = Layers(codec, count, requests, context, 64)
            for launches, has_window in ((("pages",), False), (("pages", "ring"), True)):
                run = layers.round_of(launches, has_window=has_window)
                yield run, partial(run, True), [layers.output]

        yield f"{count} heads, {requests} x {context}, {name}, RoPE at {bits} bits", make


def pairs(shapes: Shapes) -> Iterator[Case]:
    from pair_kernels import Heads, Layers

    cases = itertools.product(shapes, COLUMNS, PAIR_CODES, SETTINGS)
    for (requests, context), (group, queries), name, (recent, spread, means) in cases:

        def make(of=(name, requests, context, recent, spread, means), group=group, queries=queries):
            layers = Layers(*of, Heads(group=group), queries)
            yield layers.rounds("cuda")["cuda"], None, layers.outputs

        yield f"{requests} x {context}, {group} x {queries} columns, {name}, window {recent}, means {means}", make


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("latents", "pairs"))
    parser.add_argument("--heads", nargs="+", type=int, default=[32, 24, 20, 16, 8, 64, 128], help="of latents")
    parser.add_argument("--requests", nargs="+", type=int, help="of a batch (default: all)")
    parser.add_argument("--rounds", type=int, default=40, help="of each case (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=180)
    asked = parser.parse_args()
    is_latent = asked.kind == "latents"
    contexts = dict(LATENT_SHAPES if is_latent else PAIR_SHAPES)
    if unknown := {*(asked.requests or ())} - {*contexts}:
        parser.error(
            f"--requests: no batch of {asked.kind} has {min(unknown)}; those have {', '.join(map(str, contexts))}"
        )
    shapes = [(requests, contexts[requests]) for requests in asked.requests or contexts]
    end, rounds, differ, failed, cut_off = time.monotonic() + asked.seconds, 0, 0, 0, 0
    for number, (name, make) in enumerate(latents(shapes, asked.heads) if is_latent else pairs(shapes)):
        if time.monotonic() > end:
            print(*([] if cut_off else ["time is up; cut off:\n"]), name)
            cut_off += 1
            continue
        torch.manual_seed(number)
        try:
            for run, one_by_one, outputs in make():
                wrong = rounds_that_differ(run, outputs, asked.rounds, one_by_one)
                rounds, differ = rounds + asked.rounds, differ + len(wrong)
                if wrong:
                    print(f"DIFFERS {name}: {len(wrong)} of {asked.rounds} rounds, first {wrong[:5]}", flush=True)
        except (AssertionError, RuntimeError) as error:
            print(f"FAILED {name}: {error!r}", flush=True)
            failed += 1
    print(f"{torch.cuda.get_device_name()}: {rounds} rounds, {differ} differ; {failed} cases failed, {cut_off} cut off")
    return int(differ > 0 or failed > 0 or rounds == 0)


if __name__ == "__main__":
    sys.exit(main())
