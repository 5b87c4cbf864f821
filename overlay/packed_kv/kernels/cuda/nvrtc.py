"""Compiles the kernel for the GPU at hand and keeps what came out in the user's cache.

NVRTC and its binding, the package cuda-bindings, are what PyTorch for CUDA requires itself (2.10 and later), so no
compiler has to be installed. The kernel includes no headers but its own.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from cuda.bindings import driver, nvrtc

from .source import HEADERS, MAIN, cache_folder, read_source

OPTIONS = ("--gpu-architecture=sm_90", "--std=c++17", "-default-device")


class CompileError(RuntimeError):
    """NVRTC or the driver refused the kernel; the message has their log."""


def compiled_kernel(constants: dict[str, str]) -> bytes:
    """Machine code of the kernel with its `constants`, from the cache or compiled (2 to 3 s)."""
    sources = {name: read_source(name) for name in (MAIN, *HEADERS)}
    options = (*OPTIONS, *(f"-D{name}={value}" for name, value in sorted(constants.items())))
    key = hashlib.sha256(repr((sources, options, compiler_version())).encode()).hexdigest()
    path = cache_folder() / f"decode-{key[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = _compile(sources, options)
    _keep(path, code)
    return code


def compiler_version() -> tuple[int, int]:
    """NVRTC's. Raises RuntimeError where there is none."""
    return _checked(nvrtc.nvrtcVersion())


def _keep(path: Path, code: bytes) -> None:
    """Write so that another process sees all of the file or nothing; a folder that cannot be written to costs only
    time at the next start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        return


def _compile(sources: dict[str, str], options: tuple[str, ...]) -> bytes:
    headers = [sources[name].encode() for name in HEADERS]
    names = [name.encode() for name in HEADERS]
    program = _checked(nvrtc.nvrtcCreateProgram(sources[MAIN].encode(), MAIN.encode(), len(headers), headers, names))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CompileError(f"NVRTC: {status.name}: {log.decode(errors='replace')}")
    code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


def load(code: bytes, name: str, shared_bytes: int) -> driver.CUfunction:
    """The kernel `name` on the current device, allowed `shared_bytes` of shared memory."""
    module = _checked(driver.cuModuleLoadData(code))
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute
    _checked(
        driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    )
    _checked(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
    return function


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of the binding gave besides its status. Raises CompileError."""
    status, *values = result
    if int(status):
        raise CompileError(f"{type(status).__name__}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
