"""Trial of issue 50, form A: time of the kernels over latents with products in e4m3 beside today's, one run, interleaved.

    PYTHONPATH=overlay:SITE python trial_e4m3.py [--quick] [--heads N ...] [--shapes NxCONTEXT ...] [--only NAME ...]

The parent starts one worker; if a variant hangs or kills the CUDA context, the worker says so and ends, and the parent starts
another without it. Works without installation: it puts overlay, benchmarks and tests/support of its own tree first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "overlay"), str(HERE / "benchmarks"), str(HERE / "tests" / "support")]
BUDGET = 240
"""Seconds, of all workers together: what is not done by then is left."""

A4 = dict(E4M3=1, SCORERS=2, STAGES=2, SCORE_REGISTERS=88, SUM_REGISTERS=168)
A3 = dict(E4M3=1, SCORERS=1, STAGES=3, SCORE_REGISTERS=120, SUM_REGISTERS=192)
IN_SUMS = dict(SUMS_SOFTMAX=1)
A4S = {**A4, **IN_SUMS, "COPIES": 2, "PROMOTE": 32}
A3S = {**A3, **IN_SUMS, "PROMOTE": 32, "BUFFERS": 2}
VARIANTS: dict[str, dict[str, int]] = {
    "today": {},
    "A3 64": {**A3, "PROMOTE": 64},
    "A3 none": {**A3, "SCORE_REGISTERS": 168, "SUM_REGISTERS": 168, "PROMOTE": 0},
    "A3s 32x2": A3S,
    "A3s 32x2 p3": {**A3S, "STAGES": 2, "PAGES": 3},
    "A3s 64": {**A3S, "PROMOTE": 64, "BUFFERS": 1},
    "A4 32": {**A4, "PROMOTE": 32},
    "A4s 32": A4S,
    "A4s 16x2": {**A4S, "PROMOTE": 16, "BUFFERS": 2},
    "W none": dict(E4M3=2, PROMOTE=0),
    "W 32": dict(E4M3=2, PROMOTE=32),
    "A3s -sums": {**A3S, "LEAVE_OUT": 1},
    "A3s -scores": {**A3S, "LEAVE_OUT": 2},
    "A3s -decode": {**A3S, "LEAVE_OUT": 4},
    "A3s -softmax": {**A3S, "LEAVE_OUT": 8},
    "A4s -sums": {**A4S, "LEAVE_OUT": 1},
    "A4s -scores": {**A4S, "LEAVE_OUT": 2},
    "A4s -decode": {**A4S, "LEAVE_OUT": 4},
    "A4s -softmax": {**A4S, "LEAVE_OUT": 8},
}
ERROR = 0.12  # relative RMS, of today's outputs; the emulator has 0.03 to 0.05


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--shapes", nargs="+", default=["64x4096", "64x8192"])
    parser.add_argument("--only", nargs="+", default=[], help="variants besides today's")
    parser.add_argument("--quick", action="store_true", help="without the variants that leave parts out")
    parser.add_argument("--compile", action="store_true", help="compile all variants, print resources, and end; no GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--without", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def wanted(asked: argparse.Namespace) -> dict[str, dict[str, int]]:
    found = {n: v for n, v in VARIANTS.items() if n not in asked.without and not (asked.quick and "-" in n)}
    return {n: v for n, v in found.items() if not asked.only or n == "today" or n in asked.only}


# ---- the worker


def compilation_of(codec_layout: object, heads: int, rows: int, block_size: int, extra: dict[str, int]) -> object:
    import torch
    from packed_kv.kernels.cuda import latent_launch
    from packed_kv.kernels.cuda.kernel import Compilation

    variant = latent_launch.Variant(heads, rows, block_size, torch.bfloat16, torch.bfloat16, False, False)
    values = latent_launch.constants(codec_layout, variant) | {name: str(x) for name, x in extra.items()}
    return Compilation.of(latent_launch.LATENT_PROGRAM, values)


def compile_apart(constants: tuple[tuple[str, str], ...]) -> None:
    """Leave machine code in the cache on disk; of a process of its own, as NVRTC compiles one program at a time."""
    from packed_kv.kernels.cuda.nvrtc import compiled_kernel
    from packed_kv.kernels.cuda.source import LATENT

    compiled_kernel(dict(constants), LATENT)


def compile_all(asked: argparse.Namespace, layout: object) -> dict[tuple[str, int], object]:
    """Return the compilations that compile, and print what does not."""
    from packed_kv.kernels.cuda import kernel

    todo = {(name, heads): compilation_of(layout, heads, 64, 64, extra)
            for name, extra in wanted(asked).items() for heads in asked.heads
            if "-" not in name or heads == asked.heads[0]}  # fmt: skip
    try:
        with ProcessPoolExecutor(min(os.cpu_count() or 2, 10), get_context("spawn")) as pool:
            for future in [pool.submit(compile_apart, case.constants) for case in todo.values()]:
                future.exception(timeout=100)  # what fails is compiled again below
    except Exception as error:
        print(f"no processes that compile: {error!r}", flush=True)

    def compiled(case: tuple[str, int]) -> object:
        try:
            code = kernel.machine_code(todo[case])
            threads, shared_bytes = kernel.block_of(code, "latent_decode")
            assert shared_bytes <= 227 * 1024, shared_bytes
            return threads, shared_bytes, code
        except Exception as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        results = dict(zip(todo, pool.map(compiled, todo), strict=True))
    for case, result in results.items():
        if isinstance(result, Exception):
            print(f"NOT COMPILED {case}: {str(result)[:600]}", flush=True)
    return {case: todo[case] for case, result in results.items() if not isinstance(result, Exception)}


def print_resources(asked: argparse.Namespace) -> None:
    sys.path.insert(0, str(HERE / "tests" / "kernels"))
    from machine_code import dump, resources
    from packed_kv.formats import FORMATS
    from packed_kv.kernels.cuda import kernel
    from packed_kv.layout import latent_layout

    found = compile_all(asked, latent_layout(FORMATS["tq4"], 512, 64, 16))
    for (name, heads), compilation in found.items():
        code = kernel.machine_code(compilation)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "latent.cubin"
            file.write_bytes(code)
            registers, stack, _ = resources(file)["latent_decode"]
            sass = dump("--dump-sass", file)
        threads, shared_bytes = kernel.block_of(code, "latent_decode")
        counts = {key: sass.count(f" {key}") for key in ("QGMMA", "HGMMA", "WARPGROUP.DEPBAR", "LDL", "STL", "STSM", "LDSM")}
        print(f"{name:13} {heads:4} heads: {threads} threads, {registers} registers at the start, {stack} bytes of stack, "
              f"{shared_bytes} shared; {counts}", flush=True)  # fmt: skip


def synchronize(what: str, seconds: float, hung: Path) -> None:
    """Wait for the GPU; after `seconds`, say what hangs and end the process."""
    import torch

    event = torch.cuda.Event()
    event.record()
    until = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > until:
            print(f"HANGS: {what}", flush=True)
            hung.write_text(what)
            os._exit(3)
        time.sleep(0.001)


def make_round(batch: object, caches: list, codec: object, compilation: object, output: object) -> object:
    """Return a function that attends in all layers over `caches`, by one variant."""
    import torch
    from latent_kernels import RANK, ROPE, SCALE
    from packed_kv.kernels.cuda import latent_launch as cuda
    from packed_kv.kernels.cuda.latent_schedule import LatentScheduler

    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    shape = cuda.shape_of(batch.heads, sm_count)
    schedule = LatentScheduler(len(batch.lengths), sm_count, torch.device("cuda"))(batch.seq_lens, shape.partitions)
    rows = shape.partial_rows()
    parts = cuda.Parts(shape, schedule, *(torch.empty(rows, size, device="cuda") for size in (RANK, 2)))
    step = cuda.make_step(batch.heads, 1, SCALE, batch.table, batch.start, batch.seq_lens, parts)

    class Decode(cuda.CudaLatentDecode):
        def compilation(self, key: int) -> object:
            assert key == 64, key
            return compilation

    layers = [Decode(codec.layout, cache, batch.heads, batch.query.dtype, output.dtype) for cache in caches]
    query, rope_query = batch.query[..., :RANK], batch.query[..., RANK : RANK + ROPE]

    def round_of_layers(count: int | None = None, kept: object = (batch, parts, caches)) -> None:
        for layer in layers[:count]:
            layer(step, query, rope_query, output)

    return round_of_layers


def work(asked: argparse.Namespace) -> None:
    import torch
    from latent_kernels import RANK, ROPE, Batch, packed_pages
    from packed_kv.codecs.latent import LatentCodec
    from packed_kv.formats import FORMATS
    from pair_kernels import interleaved

    hung = Path(asked.worker)
    started = time.monotonic()
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, flush=True)
    torch.manual_seed(0)
    codec = LatentCodec(FORMATS["tq4"], RANK, ROPE, device="cuda")
    source = packed_pages(codec)
    ready = compile_all(asked, codec.layout)
    print(f"compiled {len(ready)} after {time.monotonic() - started:.0f} s", flush=True)
    dropped: set[str] = set()
    tables: list[str] = []
    # Small batches first: ragged lengths, parts and whole requests; then those that are timed.
    for heads in asked.heads:
        for requests, context, spread in ((5, 700, 0.9), (200, 128, 0.5)):
            batch = Batch(requests, context, heads, 1, spread, codec.slot_bytes)
            batch.seq_lens -= torch.randint(0, 63, batch.seq_lens.shape, dtype=torch.int32, device="cuda")
            caches = batch.pages(source)[:1]
            expected = None
            for name in wanted(asked):
                if (name, heads) not in ready or name in dropped:
                    continue
                run_checked(name, heads, f"{requests} x {context}, ragged", batch, caches, codec, ready, expected, hung, dropped)
                if name == "today" and name not in dropped:
                    expected = run_checked.output
    for heads in asked.heads:
        for requests, context in (map(int, shape.split("x")) for shape in asked.shapes):
            batch = Batch(requests, context, heads, 1, 0, codec.slot_bytes)
            caches = batch.pages(source)
            rounds, expected = {}, None
            for name in wanted(asked):
                if (name, heads) not in ready or name in dropped:
                    continue
                made = run_checked(name, heads, f"{requests} x {context}", batch, caches, codec, ready, expected, hung, dropped)
                if made:
                    rounds[name] = made
                if name == "today":
                    expected = run_checked.output
            hung.write_text(f"timing {', '.join(rounds)}")
            watch = threading.Timer(40, lambda: (print("HANGS: timing", flush=True), os._exit(5)))
            watch.daemon = True
            watch.start()
            times = interleaved(rounds, len(caches))
            watch.cancel()
            hung.write_text("")
            today = times.get("today", [float("nan")] * 3)
            for name, (p20, p50, p80) in times.items():
                line = (f"{heads:4} heads {requests:4} x {context:5}  {name:13} {p50:7.1f} us (p20 {p20:.1f}, p80 {p80:.1f}), "
                        f"{p50 / today[1]:.3f} of today's")  # fmt: skip
                tables.append(line)
                print(line, flush=True)
            del rounds, caches, batch
            torch.cuda.empty_cache()
    print(f"done after {time.monotonic() - started:.0f} s")
    for shape in asked.shapes:
        for heads in asked.heads:
            key = f"{heads:4} heads {int(shape.split('x')[0]):4} x {int(shape.split('x')[1]):5}"
            found = {line[len(key) :].split("us")[0].rsplit(None, 1)[0].strip(): line.rsplit(", ", 1)[1].split()[0]
                     for line in tables if line.startswith(key)}  # fmt: skip
            print(f"{key}: " + ", ".join(f"{name} {ratio}" for name, ratio in found.items()))


def run_checked(
    name: str, heads: int, label: str, batch: object, caches: list, codec: object, ready: dict, expected: object,
    hung: Path, dropped: set[str],
) -> object:  # fmt: skip
    """Launch a variant, check its outputs and return its round; None, and `dropped` has it, where it fails."""
    import torch
    from latent_kernels import RANK

    hung.write_text(name)
    try:
        output = torch.full((len(batch.lengths), heads, RANK), float("nan"), dtype=torch.bfloat16, device="cuda")
        made = make_round(batch, caches, codec, ready[name, heads], output)
        made(1)
        synchronize(f"{name}, {heads} heads, {label}", 5, hung)
        first, same, text = output.clone(), True, ""
        run_checked.output = first
        if "-" not in name:
            for _ in range(5):
                output.fill_(float("nan"))
                made(1)
                synchronize(f"{name}, {heads} heads, {label}, again", 5, hung)
                same = same and torch.equal(output, first)
            finite = bool(first.isfinite().all())
            error = float("nan")
            if expected is not None:
                error = float((first.double() - expected.double()).norm() / expected.double().norm())
            text = f"finite {finite}, same bits each time {same}, error {error:.4f} of today's"
            is_right = finite and same and (expected is None or error < ERROR)
            print(f"{heads:4} heads, {label:22} {name:13} {'' if is_right else 'WRONG: '}{text}", flush=True)
        return made
    except Exception:
        print(f"FAILED: {name}, {heads} heads, {label}: {traceback.format_exc()[-900:]}", flush=True)
        try:
            torch.cuda.synchronize()
        except Exception:
            os._exit(4)  # `hung` names it
        dropped.add(name)
        return None
    finally:
        if sys.exc_info()[0] is None:
            hung.write_text("")


def main() -> None:
    asked = parse()
    if asked.compile:
        print_resources(asked)
        return
    if asked.worker:
        work(asked)
        return
    started, without = time.monotonic(), list(asked.without)
    environment = {"PACKED_KV_CACHE": str(Path(tempfile.gettempdir()) / "trial_e4m3"), **os.environ}
    rest = sys.argv[1:]
    for _ in range(8):
        left = BUDGET - (time.monotonic() - started)
        if left < 20:
            print("no time is left")
            break
        with tempfile.NamedTemporaryFile("r") as hung:
            options = ["--without", *without] if without else []
            command = [sys.executable, str(Path(__file__).resolve()), *rest, "--worker", hung.name, *options]
            try:
                code = subprocess.run(command, env=environment, timeout=left).returncode
            except subprocess.TimeoutExpired:
                code = -1
            what = Path(hung.name).read_text().split(",")[0]
        if code == 0:
            break
        print(f"worker ended with {code} in: {what or '?'}", flush=True)
        if what not in VARIANTS or what == "today":
            break
        without.append(what)
    print(f"all took {time.monotonic() - started:.0f} s; left out: {without or 'none'}")


if __name__ == "__main__":
    main()
