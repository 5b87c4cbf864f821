"""Processes that compile the kernels of the self-test's dtypes side by side, before its own process makes the layers.

The first part of a Triton compilation is Python code, which runs in one thread of a process at a time: for all dtypes,
on 16 cores beside an H200, one process took 104 s and four take 58 s, which keeps the cores busy. Compiled kernels stay
in the caches on disk, where the self-test finds them. The processes are forked, as importing vLLM takes 19 s there. A
forked process lacks its parent's threads, so PyTorch's parallel operations would wait for them forever: each process
uses one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

import torch

from ..child_process import end_with
from ..formats import FORMATS

HEAD_DIM = 128
MOST_SECONDS = 500
"""Seconds after which processes that still compile are ended."""


class Compilers:
    """A process for each width of codes, as dtypes of one width share most kernels; none if all have the same width.

    Made before this process uses the GPU, as a process that has cannot be forked for it. Each waits for `run`, so that
    memory that is free on the GPU can be looked at before.

    Args:
        names: dtypes.
        compile_kernels: compiles for dtypes on a device, in these processes.
    """

    def __init__(self, names: Iterable[str], compile_kernels: Callable[[list[str], torch.device], None]) -> None:
        widths: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            widths.setdefault(FORMATS[name].group_bits(HEAD_DIM), []).append(name)
        context, parent = multiprocessing.get_context("fork"), os.getpid()
        self.started = []
        for group in widths.values() if len(widths) > 1 else ():
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_compile, args=(parent, reader, group, compile_kernels), daemon=True)
            process.start()
            self.started.append((process, writer))

    def run(self, device: torch.device) -> None:
        """Have all compile, and return when they have ended. A failed compilation is left to the layer that needs
        it."""
        for _, writer in self.started:
            writer.send(device)
        end = time.monotonic() + MOST_SECONDS
        for process, _ in self.started:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()


def _compile(
    parent: int, reader: Connection, names: list[str], compile_kernels: Callable[[list[str], torch.device], None]
) -> None:
    end_with(parent)
    torch.set_num_threads(1)
    compile_kernels(names, reader.recv())
