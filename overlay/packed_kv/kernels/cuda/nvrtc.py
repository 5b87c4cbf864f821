"""Compile the kernel for the GPU at hand with NVRTC.

PyTorch for CUDA (2.10 and later) requires NVRTC and its binding, the package cuda-bindings, so no compiler has to be
installed. The kernel includes no headers but its own.
"""

from __future__ import annotations

import hashlib
from typing import Any

from cuda.bindings import driver, nvrtc

from ..kernel_cache import load_or_compile
from .source import DECODE, Source, read_sources

OPTIONS = ("--std=c++17", "-default-device")


class CompileError(RuntimeError):
    """NVRTC or the driver refused the kernel; the message has their log."""


def compiled_kernel(constants: dict[str, str], source: Source = DECODE) -> bytes:
    """Return the machine code of a kernel with these definitions, from the cache or compiled (2 to 3 s)."""
    sources = read_sources(source)
    target = f"--gpu-architecture={source.architecture}"
    options = (target, *OPTIONS, *(f"-D{name}={value}" for name, value in sorted(constants.items())))
    key = hashlib.sha256(repr((sources, options, compiler_version())).encode()).hexdigest()
    name = source.main.removesuffix(".cu")
    return load_or_compile(f"{name}-{key[:32]}.cubin", lambda: _compile(source, sources, options))


def compiler_version() -> tuple[int, int]:
    """Return the version of NVRTC. Raises RuntimeError if there is none."""
    return _checked(nvrtc.nvrtcVersion())


def known_architectures() -> list[int]:
    """Return the architectures that NVRTC compiles for, as 90 for compute capability 9.0."""
    return _checked(nvrtc.nvrtcGetSupportedArchs())


def _compile(source: Source, sources: dict[str, str], options: tuple[str, ...]) -> bytes:
    headers = [sources[name].encode() for name in source.headers]
    names = [name.encode() for name in source.headers]
    main = sources[source.main].encode()
    program = _checked(nvrtc.nvrtcCreateProgram(main, source.main.encode(), len(headers), headers, names))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"NVRTC: {status.name}: {log.decode(errors='replace')}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def load(code: bytes, name: str, shared_bytes: int) -> driver.CUfunction:
    """Load the kernel `name` on the current device, and allow it `shared_bytes` of dynamic shared memory."""
    module = _checked(driver.cuModuleLoadData(code))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute
    _checked(
        driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    )
    _checked(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
    return function


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the results of a call of the binding without its status. Raises CompileError."""
    status, *values = result
    if int(status):
        raise CompileError(f"{type(status).__name__}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
