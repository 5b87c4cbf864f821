"""Time of the CUDA kernels beside those of other sources, in one process: us a layer, p20 and p50.

    git archive COMMIT overlay/packed_kv/kernels/cuda | tar -x -C FOLDER
    python benchmarks/beside.py FOLDER/overlay/packed_kv/kernels/cuda [--heads N ...] [--pairs CASE ...]

Latents have 64 requests of 4,096 and 8,192 tokens, pages alone. A CASE of pairs is DTYPE:REQUESTS:CONTEXT:GROUP:QUERIES
with :WINDOW if there is a recent window, as tq4:32:8192:4:1:64. Files that the other sources lack are the present ones;
sources from before `BLOCK_OF` (ptx.cuh) do not say how they are launched: compare these with packages of that time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from latent_kernels import RANK, ROPE
from latent_layer import LAYERS, Case
from packed_kv.codecs.latent import LatentCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import kernel, nvrtc
from packed_kv.kernels.cuda.source import Source
from pair_kernels import Heads, Layers, interleaved

Round = Callable[[], None]


def with_sources(folder: Path | None, make: Callable[[], Round]) -> Round:
    """Make a round and launch it once, with kernels from `folder`; None: the present ones."""
    read = nvrtc.read_sources

    def read_there(source: Source) -> dict[str, str]:
        here = read(source)
        there = {name: folder / name for name in here} if folder else {}
        return here | {name: path.read_text() for name, path in there.items() if path.exists()}

    kernel.load.cache_clear(), kernel.machine_code.cache_clear()
    nvrtc.read_sources = read_there
    try:
        round_of_layers = make()
        round_of_layers()
        torch.cuda.synchronize()
    finally:
        nvrtc.read_sources = read
    return round_of_layers


def compare(label: str, folder: Path, layers: int, make: Callable[[], Round]) -> None:
    rounds = {"there": with_sources(folder, make), "here": with_sources(None, make)}
    times = {name: [round(x, 1) for x in found[:2]] for name, found in interleaved(rounds, layers).items()}
    print(f"{label:40} there {times['there']}, here {times['here']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--heads", nargs="*", type=int, default=[16, 20, 32, 64], help="of latents")
    parser.add_argument("--pairs", nargs="*", default=["tq4:32:8192:4:1", "tq4:8:1024:4:1"], metavar="CASE")
    asked = parser.parse_args()
    print(torch.cuda.get_device_name())
    codec = LatentCodec(FORMATS["tq4"], RANK, ROPE, device="cuda")
    for heads in asked.heads:
        for requests, context in ((64, 4096), (64, 8192)):
            case = Case(codec, heads, requests, context, 64)
            make = lambda case=case: case.round_of(("pages",), has_window=False)  # noqa: E731
            compare(f"{heads} heads of latents, {requests} x {context}", asked.sources, LAYERS, make)
    for words in asked.pairs:
        name, *numbers = words.split(":")
        requests, context, group, queries, *recent = map(int, numbers)
        pairs = Layers(name, requests, context, *(recent or [0]), heads=Heads(group=group), query_tokens=queries)
        compare(words, asked.sources, len(pairs.caches), lambda pairs=pairs: pairs.rounds("cuda")["cuda"])


if __name__ == "__main__":
    main()
