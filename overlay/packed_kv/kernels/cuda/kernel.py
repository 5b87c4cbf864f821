"""The host side that all CUDA kernels share: variants, compiled ahead, and the block of a launch's parameters.

A variant is a source with constants. It is compiled once per machine (`kernel_cache.py`) and loaded once per process
and device, whichever layers launch it. Each layer has a parameter block of its own, which a launch reads as it is
issued: the arguments of the call and the step are written to it, those of the layer stay.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..precompile import current, wait_for
from .source import Source

Key = TypeVar("Key", bound=Hashable)
ELF_SYMBOLS = 2


class Compilation(NamedTuple):
    """A source and the constants that it is compiled with, by name."""

    source: Source
    constants: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, source: Source, constants: Mapping[str, str]) -> Compilation:
        """Return the compilation with these constants."""
        return cls(source, tuple(constants.items()))


class Function(NamedTuple):
    """A kernel on a device, its launch function (`launch_kernel`), and the threads and shared memory of its blocks."""

    launch: Callable[..., None]
    kernel: Any
    threads: int
    shared_bytes: int


class CudaKernel(ABC, Generic[Key]):
    """The kernels of a source over the memory of one layer. A key tells its variants apart.

    Args:
        layer_at: bytes of the arguments of the call and the step, which stand before the layer's.
        layer: the layer's arguments, which are fixed.
        device: index of the device; None: a CPU's, where nothing is launched.
    """

    def __init__(self, layer_at: int, layer: bytes, device: int | None) -> None:
        self.layer_at, self.device = layer_at, device
        self.arguments = bytearray(layer_at) + layer
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(ctypes.c_char.from_buffer(self.arguments)))
        self.address = ctypes.addressof(self.parameters)
        self.lock = threading.Lock()
        """Lock held from writing a call's arguments until its launches have copied them."""
        self.functions: dict[Key, tuple[Function, ...]] = {}

    @abstractmethod
    def compilation(self, key: Key) -> Compilation:
        """Return what a variant is compiled from."""

    def functions_of(self, key: Key) -> tuple[Function, ...] | None:
        """Return a variant's kernels, in the order of `Source.entries`; None in a `Precompiler` block, which launches
        nothing."""
        functions = self.functions.get(key)
        if functions is None and current() is None:
            functions = self.functions[key] = load(self.compilation(key), self.device)
        return functions

    def compile(self, keys: Iterable[Key]) -> None:
        """Compile and load variants, so that no step waits for them. In a `Precompiler` block, note them."""
        for key in keys:
            if (ahead := current()) is None:
                self.functions_of(key)
            else:
                wanted = self.compilation(key)
                ahead.note(wanted, functools.partial(machine_code, wanted))


@functools.cache
def machine_code(wanted: Compilation) -> bytes:
    """Return the compiled program. Any thread may ask; only a thread with a CUDA context can load it."""
    from .nvrtc import compiled_kernel

    return compiled_kernel(dict(wanted.constants), wanted.source)


@functools.cache
def load(wanted: Compilation, device: int | None) -> tuple[Function, ...]:
    """Return the kernels of a compilation, which all layers of a process share."""
    from . import nvrtc
    from .early_launch import launch_kernel

    wait_for(wanted, wanted.source.main)
    code, found = machine_code(wanted), []
    with torch.cuda.device(device):
        for name in wanted.source.entries:
            threads, shared_bytes = block_of(code, name)
            found.append(Function(launch_kernel, nvrtc.load(code, name, shared_bytes), threads, shared_bytes))
    return tuple(found)


def block_of(code: bytes, kernel: str) -> tuple[int, int]:
    """Return the threads of a kernel's block and its bytes of shared memory: `BLOCK_OF` (ptx.cuh) in machine code."""
    ((start,), (size, count)) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count)]
    (symbols,) = (section for section in sections if section[1] == ELF_SYMBOLS)
    names, name = sections[symbols[6]][4], f"{kernel}_block\0".encode()
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name_at, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", code, at)
        if code.startswith(name, names + name_at):
            return struct.unpack_from("<2I", code, sections[section][4] + value)
    raise AssertionError(f"no block of {kernel}")
