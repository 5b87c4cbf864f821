"""Seconds in which a C++ compiler makes the CPU's kernels of a dtype, and in which a later process loads them.

    python benchmarks/cpu_build.py [--compilers COMMAND ...] [--dtype NAME] [--head-dim N] [--csv FILE]

Each compiler starts with an empty cache; `cold_ms` is as an engine waits for it if it loads its model in no time. The
later process has what the first one left; `warm_ms` leaves out the imports, as an engine has them anyway.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMPILERS = ("g++", "clang++")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compilers", nargs="+", default=list(COMPILERS), help="as CXX has them")
    parser.add_argument("--dtype", default="tq4")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(load(options.dtype, options.head_dim))
        return
    for command in options.compilers:
        with tempfile.TemporaryDirectory() as cache:
            arguments = ["--load", "--dtype", options.dtype, "--head-dim", str(options.head_dim)]
            environment = {**os.environ, "CXX": command, "PACKED_KV_CACHE": cache}
            cold, warm = (
                float(subprocess.check_output([sys.executable, __file__, *arguments], env=environment, text=True))
                for _ in range(2)
            )
        report(options, command, cold, warm)


def load(dtype: str, head_dim: int) -> float:
    """Return the seconds until the libraries of a dtype are there."""
    from packed_kv.attention import cpu
    from packed_kv.formats import FORMATS
    from packed_kv.kernels.served import Pairs
    from packed_kv.layout import page_layout

    fmt, page = FORMATS[dtype], page_layout(FORMATS[dtype], head_dim)
    started = time.perf_counter()
    cpu.compile_ahead(Pairs(fmt, head_dim, group=1), attends=True)
    cpu.wait_for_libraries(page, fmt.rotation, attends=True)
    return time.perf_counter() - started


def report(options: argparse.Namespace, command: str, cold: float, warm: float) -> None:
    """Print a line, and append a row."""
    from packed_kv.kernels.cpu.compiler import find_compiler
    from rows import append, commit_here, machine, processor

    os.environ["CXX"] = command
    version = find_compiler().version
    print(f"{version}: cold {cold:.1f} s, warm {warm:.2f} s", flush=True)
    if options.csv:
        figures = {"cold_ms": f"{cold * 1e3:.0f}", "warm_ms": f"{warm * 1e3:.0f}"}
        of = {"compiler": version, "dtype": options.dtype, "head_dim": options.head_dim}
        append(options.csv, {**of, **figures, "cpu": processor(), **machine(), "commit": commit_here()})


if __name__ == "__main__":
    main()
