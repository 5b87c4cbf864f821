"""Launches again and again, compared bit by bit: what a race changes now and then is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

REPEATS = 200
MOST_BYTES = 1 << 26
"""Most bytes of a launch's tensors. Larger ones, as of tests of offsets, are launched once."""


def repeat_launches(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a `Launch.__call__` that launches `REPEATS` times from the same memory, and asserts the same bits."""
    from packed_kv.kernels.precompile import current

    def repeated(self: Any, grid: tuple[int, int, int], tensors: tuple[torch.Tensor, ...], step: Any) -> None:
        values = (*tensors, *step.values, *self.fixed.values)
        storages = {x.untyped_storage().data_ptr(): x for x in values if isinstance(x, torch.Tensor) and x.is_cuda}
        memory = [torch.empty(0, dtype=torch.uint8, device="cuda").set_(x.untyped_storage()) for x in storages.values()]
        is_small = sum(x.numel() for x in memory) <= MOST_BYTES
        if current() is not None or torch.cuda.is_current_stream_capturing() or not is_small:
            launch(self, grid, tensors, step)
            return
        before = [x.clone() for x in memory]
        launch(self, grid, tensors, step)
        after = [x.clone() for x in memory]
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(REPEATS):
            for x, old in zip(memory, before, strict=True):
                x.copy_(old)
            launch(self, grid, tensors, step)
            for x, new in zip(memory, after, strict=True):
                differ += (x != new).any()
        count = int(differ)
        assert not count, f"{self.kernel.__name__}: {count} tensors of {REPEATS} launches differ from the first"

    return repeated


def rounds_that_differ(
    run: Callable[[], None], outputs: list[torch.Tensor], repeats: int = REPEATS,
    one_by_one: Callable[[], None] | None = None, lse: torch.Tensor | None = None,
) -> list[int]:  # fmt: skip
    """Return the replays of a graph of `run` after which outputs are not, bit by bit, those of the same launches
    outside of a graph: of `one_by_one`, which waits for each, if it is given.

    Beside every second replay a copy of 128 MB keeps memory busy. Outputs are overwritten with NaN before each.
    `lse`: an output of log-sum-exps, which are -inf where a query sees no key.
    """
    (one_by_one or run)()
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in outputs)
    if lse is not None:
        assert (lse.isfinite() | lse.isneginf()).all()
        outputs = [*outputs, lse]
    expected = [x.clone() for x in outputs]
    stream, source = torch.cuda.Stream(), torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    target, graph = torch.empty_like(source), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    differ = torch.zeros(repeats, dtype=torch.bool, device="cuda")
    for i in range(repeats):
        for x in outputs:
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        if i % 2:
            with torch.cuda.stream(stream):
                target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        for x, want in zip(outputs, expected, strict=True):
            differ[i] |= (x != want).any()
    return differ.nonzero().flatten().tolist()
