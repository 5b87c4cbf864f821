"""Launch a Triton kernel again and again without asking its JIT.

`kernel[grid](...)` looks at every argument each time to find the variant that was compiled for it: 16 to 42 us on the
host of an H200, of which the launch itself is 5 to 7. A step that mixes prompts with decodes is not in a CUDA graph,
and has four to ten launches in each layer. So arguments that are the same in all calls are bound once, arguments that
all layers of a step share are made once a step (`Arguments`), and only addresses change with each call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from ..precompile import current, wait_for

Bound = TypeVar("Bound")
logger = logging.getLogger("vllm.packed_kv")
MANY = 1000
"""Number of bindings of a layer's launch from which the log has a line: profiling, sleep and other caches take a
few."""
Value = Any
"""A tensor, a number, or a record (tuple) of values, whose fields a kernel reads by name."""
RUN = (
    "grid_0", "grid_1", "grid_2", "stream", "kernel.function", "kernel.packed_metadata", "launch_metadata",
    "knobs.runtime.launch_enter_hook", "knobs.runtime.launch_exit_hook", "*bound_args.values()",
)  # fmt: skip
"""Arguments that Triton's JIT, and a bound launch, pass to a compiled kernel's private `run`."""


class Arguments:
    """Arguments of a kernel, in its order: tensors, numbers and records of both; and in a launch's form: addresses and
    numbers. Triton specializes on each number in a record, so a record must not hold a number that changes from step to
    step."""

    def __init__(self, *values: Value) -> None:
        self.values = values
        self.raw: tuple[Any, ...] = tuple(map(_raw, values))
        self._aligned: dict[tuple[int, ...], bool] = {}

    def are_aligned(self, places: tuple[int, ...]) -> bool:
        """Return whether the addresses at these places are multiples of 16. Kept, as the layers of a step ask for the
        same places."""
        if (found := self._aligned.get(places)) is None:
            found = self._aligned[places] = not any(x % 16 for x in _leaves(tuple(self.raw[i] for i in places)))
        return found


def _raw(value: Value) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_raw, value))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _leaves(values: tuple[Value, ...]) -> Iterator[Any]:
    """Flatten values into tensors and numbers, or into addresses and numbers."""
    for value in values:
        if isinstance(value, tuple):
            yield from _leaves(value)
        else:
            yield value


@functools.cache
def can_bind() -> bool:
    """Return whether Triton's JIT launches compiled kernels as a bound launch does. If not, say so once in the log."""
    try:
        given = _given_to_run(inspect.getsource(triton.runtime.jit.JITFunction.run))
    except (OSError, TypeError):  # compiled, or installed without sources
        given = ("its source is missing",)
    if given == RUN:
        return True
    logger.warning(
        "Triton %s launches compiled kernels in an unknown way (%s), so each launch goes through its JIT: 10 to 40 us "
        "slower. Install the Triton that your PyTorch requires, or report this to packed-kv",
        triton.__version__, ", ".join(given) or "no call of run",
    )  # fmt: skip
    return False


def _given_to_run(source: str) -> tuple[str, ...]:
    """Return the arguments that a method's source gives `kernel.run`."""
    calls = [node for node in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func) == "kernel.run"]
    return tuple(ast.unparse(x) for call in found for x in (*call.args, *call.keywords))


Grid = tuple[int, int, int]


class StepLaunch(NamedTuple):
    """The step's half of a launch, which its layers share."""

    grid: Grid
    arguments: Arguments


class Launch:
    """A kernel with the arguments and constants that stay.

    Each kernel has a class derived from this: the constructor binds a layer's tensors, the static method `step` makes
    the grid and the arguments that a step's layers share, a call launches. Its docstring names the tensors of the call;
    the kernel's own docstring has the shapes and dtypes of all.

    Args:
        kernel: a JIT function, whose parameters come in this order: tensors that differ from call to call, what a step
            decides, `fixed`, and the constexpr ones. It may specialize on the dtype of the first two, and on the
            alignment of tensors to 16 bytes, but on no number (`do_not_specialize`).
        fixed: arguments that stay.
        constants: values of the constexpr parameters, by name.
        options: of the compilation: `num_warps` and so on.

    Raises TypeError in the first call if the kernel is specialized on a number that is not in `fixed`. In a block of
    `Precompiler`, the first call only notes what is to be compiled.
    """

    def __init__(self, kernel: Any, fixed: Arguments, constants: dict[str, Any], **options: Any) -> None:
        self.kernel, self.fixed, self.constants, self.options = kernel, fixed, constants, options
        self.compiled: Any = None
        self.checked: Arguments | None = None
        self.has_met_odd_address = False
        self.last: tuple[Any, ...] = ()

    def __call__(self, grid: Grid, tensors: tuple[torch.Tensor, ...], arguments: Arguments) -> None:
        """Launch on the current stream of the current device, which must be that of the tensors.

        Args:
            grid: programs in each dimension.
            tensors: the first arguments; of the same dtypes in each call.
            arguments: the following ones, which the layers of a step share; also of the same dtypes.
        """
        compiled = self.compiled
        if compiled is None:
            ahead = current()
            if ahead is None:
                wait_for(self.variant(tensors, arguments), self.kernel.__name__)
                self._first(grid, tensors, arguments)
            else:
                ahead.note(self.variant(tensors, arguments), self._compilation(grid, tensors, arguments))
            return
        addresses = [x.data_ptr() for x in tensors]
        unaligned = 0
        for i in self.aligned:
            unaligned |= addresses[i]
        if arguments is not self.checked:  # the layers of a step share it
            self.checked = arguments
            self.checked_is_aligned = arguments.are_aligned(self.aligned_of_step)
        if unaligned & 15 or not self.checked_is_aligned:
            if not self.has_met_odd_address:
                self.has_met_odd_address = True
                wait_for(self.variant(tensors, arguments), self.kernel.__name__)
            self._by_jit(grid, tensors, arguments)
            return
        stream = self.stream_of(self.device)
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *addresses, *arguments.raw, *self.last
        )  # fmt: skip

    def _by_jit(self, grid: Grid, tensors: tuple[torch.Tensor, ...], arguments: Arguments) -> Any:
        values = (*tensors, *arguments.values, *self.fixed.values)
        return self.kernel[grid](*values, **self.constants, **self.options)

    def variant(self, tensors: tuple[torch.Tensor, ...], arguments: Arguments) -> tuple[Any, ...]:
        """Key of the variant that the JIT compiles for these arguments."""
        kernel, unspecialized = self.kernel, self._names("do_not_specialize")
        any_address = unspecialized | self._names("do_not_specialize_on_alignment")
        kinds: list[Any] = []
        for name, value in zip(kernel.arg_names, (*tensors, *arguments.values, *self.fixed.values), strict=False):
            for x in _leaves((value,)):  # in a record, a name does not count
                if isinstance(x, torch.Tensor):
                    kinds.append((x.dtype, name in any_address or x.data_ptr() % 16 == 0))
                else:
                    is_special = isinstance(x, int) and name not in unspecialized
                    kinds.append((type(x), is_special and x == 1, is_special and x % 16 == 0))
        return kernel, *kinds, *self.constants.items(), *self.options.items()

    def _compilation(self, grid: Grid, tensors: tuple[torch.Tensor, ...], arguments: Arguments) -> Callable[[], None]:
        """A function that compiles the kernel for these arguments, in any thread. It holds no tensor. Under the
        interpreter it does nothing."""
        warmup, values = getattr(self.kernel, "warmup", None), (*tensors, *arguments.values, *self.fixed.values)
        device = next((x.device.index for x in _leaves(values) if isinstance(x, torch.Tensor) and x.is_cuda), -1)
        values = tuple(map(_stand_in, values))
        caches = getattr(self.kernel, "device_caches", None)
        if caches is not None and device >= 0:
            caches[device]  # makes one cache for all threads; threads would each make another

        def compile_variant() -> None:
            with torch.cuda.device(device):  # of this thread; -1: unchanged
                compiled = warmup and warmup(*values, grid=grid, **self.constants, **self.options)
                if compiled is not None:
                    _ = compiled.run  # has a C compiler make the launcher, and the device load the kernel

        return compile_variant

    def _first(self, grid: Grid, tensors: tuple[torch.Tensor, ...], arguments: Arguments) -> None:
        """Compile, launch, and keep the bound launch for later calls. Under the interpreter there is nothing to
        keep."""
        compiled = self._by_jit(grid, tensors, arguments)
        unspecialized = self._names("do_not_specialize")
        any_address = unspecialized | self._names("do_not_specialize_on_alignment")
        aligned, addresses = [], [x.data_ptr() for x in tensors] + list(arguments.raw)
        for i, (name, value) in enumerate(zip(self.kernel.arg_names, (*tensors, *arguments.values), strict=False)):
            tensors_of = [isinstance(x, torch.Tensor) for x in _leaves((value,))]
            if all(tensors_of):
                if isinstance(value, tuple) or name not in any_address:
                    aligned.append(i)
            elif isinstance(value, tuple) or name not in unspecialized:
                raise TypeError(f"{self.kernel.__name__}: {name} changes from step to step: do not specialize on it")
        if compiled is None or not can_bind():
            return
        if any(x % 16 for x in _leaves(tuple(addresses[i] for i in aligned))):
            return  # compiled with weaker alignment than later calls: the next call compiles again
        self.aligned = [i for i in aligned if i < len(tensors)]
        self.aligned_of_step = tuple(i - len(tensors) for i in aligned if i >= len(tensors))
        self.checked, self.checked_is_aligned = arguments, True
        constants = [self.constants[parameter.name] for parameter in self.kernel.params if parameter.is_constexpr]
        self.last = (*self.fixed.raw, *constants)
        driver = triton.runtime.driver.active
        self.device, self.stream_of = driver.get_current_device(), driver.get_current_stream
        self.compiled = compiled

    def _names(self, option: str) -> set[str]:
        """Parameters that the kernel's decorator names; the interpreter keeps them elsewhere."""
        kept = getattr(self.kernel, "kwargs", None)
        return set((getattr(self.kernel, option) if kept is None else kept[option]) or ())


class Launches:
    """Launches that a layer has bound, by name, with the tensors that each is bound to.

    A launch does not check dtypes and strides again, so `binding_key` has everything that its kernel is bound to:
    addresses and strides of fixed tensors, and dtypes and strides of each call's tensors.
    """

    def __init__(self) -> None:
        self.held: dict[Any, tuple[Any, Any]] = {}
        self.bindings: Counter[Any] = Counter()

    def get(self, name: Any, binding_key: Any, bind: Callable[[], Bound]) -> Bound:
        """Return the last launch bound under `name`, if it is for the same tensors; else bind again. Only the last
        tensors are kept, as vLLM may have freed earlier ones."""
        held = self.held.get(name)
        if held is None or held[0] != binding_key:
            held = self.held[name] = binding_key, bind()
            self.bindings[name] += 1
            if self.bindings[name] == MANY:
                logger.warning(
                    "KV cache: a layer has bound its launch %r %d times, as its tensors change from step to step: "
                    "right, but slower than to bind it once; please report the model and its options",
                    name,
                    MANY,
                )
        return held[1]

    def clear(self) -> None:
        """Forget all launches, before other tensors may get the same addresses with other strides."""
        self.held.clear()


def _stand_in(value: Value) -> Value:
    """A value for which the JIT compiles the same variant; for a tensor, one on the host with the same dtype and
    alignment."""
    if isinstance(value, tuple):
        fields = map(_stand_in, value)
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    if not isinstance(value, torch.Tensor):
        return value
    pair = torch.empty(2, dtype=value.dtype, device="cpu")
    return pair if value.data_ptr() % 16 == 0 else pair[1:]
