"""A bound launch hands the driver what the JIT would, and asks the JIT where it cannot."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
from packed_kv.kernels.triton import launch
from packed_kv.kernels.triton.launch import RUN, Arguments, Launch, Launches


class Kernel:
    """Stands for a JIT function of (x, table, count, weight, SIZE); keeps what it and its compiled form are given."""

    arg_names = ("x", "table", "count", "weight", "SIZE")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in arg_names)
    do_not_specialize_on_alignment = ("table",)
    __name__ = "kernel"

    def __init__(self, do_not_specialize: tuple[str, ...] = ("count",)) -> None:
        self.do_not_specialize = do_not_specialize
        self.by_jit: list[tuple] = []
        self.direct: list[tuple] = []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.by_jit.append((grid, arguments, constants))
            return SimpleNamespace(run=lambda *a: self.direct.append(a), function="function", packed_metadata="packed")

        return run


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: ("stream", device))
    monkeypatch.setattr(launch.triton.runtime, "driver", SimpleNamespace(active=active))


def bound(kernel: Kernel) -> tuple[Launch, torch.Tensor]:
    weight = torch.zeros(16)
    return Launch(kernel, Arguments(weight), {"SIZE": 32}, num_warps=1), weight


def test_later_calls_do_not_ask_the_jit() -> None:
    kernel, x, table = Kernel(), torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    kept, weight = bound(kernel)
    kept((2, 1, 1), (x,), Arguments(table, 5))
    assert kernel.by_jit == [((2, 1, 1), (x, table, 5, weight), {"SIZE": 32, "num_warps": 1})]
    other = torch.zeros(64)
    kept((7, 1, 1), (other,), Arguments(table[1:], 6))  # of a table, any address will do
    assert len(kernel.by_jit) == 1
    pointers = (other.data_ptr(), table.data_ptr() + 4, 6, weight.data_ptr())
    stream = ("stream", 3)
    assert kernel.direct == [(7, 1, 1, stream, "function", "packed", None, None, None, *pointers, 32)]


def test_an_odd_address_goes_through_the_jit() -> None:
    kernel, step = Kernel(), Arguments(torch.zeros(4, dtype=torch.int32), 5)
    kept, weight = bound(kernel)
    x = torch.zeros(64)
    kept((1, 1, 1), (x,), step)
    kept((1, 1, 1), (x[1:],), step)
    assert len(kernel.by_jit) == 2 and kernel.by_jit[1][1][1:] == (*step.values, weight) and not kernel.direct


def test_an_odd_address_of_a_step_goes_through_the_jit() -> None:
    kernel, table = Kernel(), torch.zeros(64, dtype=torch.int32)
    kernel.do_not_specialize_on_alignment = ()
    kept, _ = bound(kernel)
    for step in (Arguments(table, 5), Arguments(table[1:], 5), Arguments(table, 7)):
        kept((1, 1, 1), (torch.zeros(64),), step)
    assert len(kernel.by_jit) == 2 and len(kernel.direct) == 1


def test_a_first_call_with_an_odd_address_is_not_kept() -> None:
    kernel, step = Kernel(), Arguments(torch.zeros(4, dtype=torch.int32), 5)
    kept, _ = bound(kernel)
    for x in (torch.zeros(64)[1:], torch.zeros(64), torch.zeros(64)):
        kept((1, 1, 1), (x,), step)
    assert len(kernel.by_jit) == 2 and len(kernel.direct) == 1


def test_a_number_that_changes_may_not_be_specialized_on() -> None:
    kept, _ = bound(Kernel(do_not_specialize=()))
    with pytest.raises(TypeError, match="kernel: count changes from step to step"):
        kept((1, 1, 1), (torch.zeros(64),), Arguments(torch.zeros(4, dtype=torch.int32), 5))


class Record(NamedTuple):
    weight: torch.Tensor
    stride: int


def test_records_are_handed_over_field_by_field() -> None:
    kernel, weight = Kernel(), torch.zeros(16)
    kept = Launch(kernel, Arguments(Record(weight, 16)), {"SIZE": 32}, num_warps=1)
    pair = torch.zeros(64), torch.zeros(64)
    for table in (pair, pair, (pair[0], pair[1][1:])):  # in a record, alignment counts
        kept((1, 1, 1), (torch.zeros(64),), Arguments(table, 5))
    assert len(kernel.by_jit) == 2 and kernel.by_jit[1][1][1][0] is pair[0]
    (direct,) = kernel.direct
    assert direct[10:] == (tuple(x.data_ptr() for x in pair), 5, (weight.data_ptr(), 16), 32)


def test_a_number_in_a_record_may_not_change_from_step_to_step() -> None:
    kept, _ = bound(Kernel(do_not_specialize=("table", "count")))  # Triton specializes on it nevertheless
    with pytest.raises(TypeError, match="kernel: table changes from step to step"):
        kept((1, 1, 1), (torch.zeros(64),), Arguments((torch.zeros(4), 5), 5))


def test_triton_launches_as_bound_launches_do() -> None:
    launch.can_bind.cache_clear()
    assert launch.can_bind()


@pytest.mark.parametrize(
    "source",
    [
        f"def run(self):\n    kernel.run({', '.join(RUN[:-2])}, {RUN[-1]})",  # a hook less
        f"def run(self):\n    kernel.launch({', '.join(RUN)})",
        OSError("could not get source code"),
        TypeError("module, class, method, function, traceback, frame, or code object was expected"),
    ],
)
def test_another_triton_launches_through_its_jit(
    source: str | Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch.inspect, "getsource", Mock(side_effect=[source]))
    monkeypatch.setattr(launch.logger, "propagate", True)  # vLLM's loggers keep their lines to themselves
    launch.can_bind.cache_clear()
    try:
        kernel, step = Kernel(), Arguments(torch.zeros(4, dtype=torch.int32), 5)
        kept, _ = bound(kernel)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                kept((1, 1, 1), (torch.zeros(64),), step)
        assert len(kernel.by_jit) == 3 and not kernel.direct
        assert [record.getMessage().startswith("Triton ") for record in caplog.records] == [True]
    finally:
        launch.can_bind.cache_clear()


def test_launches_are_bound_anew_for_other_tensors_alone() -> None:
    launches, made = Launches(), []

    def get(name: str, binding_key: int) -> int:
        return launches.get(name, binding_key, lambda: made.append((name, binding_key)) or len(made))

    assert [get("a", 5), get("a", 5), get("b", 5), get("a", 6), get("a", 6), get("b", 5), get("a", 5)] == [
        1, 1, 2, 3, 3, 2, 4,
    ]  # fmt: skip
    assert made == [("a", 5), ("b", 5), ("a", 6), ("a", 5)] and len(launches.held) == 2


def test_launches_that_are_bound_again_and_again_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides of a tensor that alternate cost time, and are nothing that a log would show."""
    lines: list[str] = []
    monkeypatch.setattr(launch.logger, "warning", lambda line, *parts: lines.append(line % parts))
    launches = Launches()
    for number in range(3 * launch.MANY):
        launches.get("often", number % 2, object)
        launches.get("once", 0, object)
    (line,) = lines
    assert f"has bound its launch 'often' {launch.MANY} times" in line
