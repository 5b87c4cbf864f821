"""Launch a kernel, as usual or so that it may begin before the one before it in the stream has ended.

CUDA calls the latter a programmatic dependent launch; graphs hold it. Such a kernel begins when all blocks of the one
before have called `begin_next_kernel` or ended, and itself calls `wait_for_kernel_before` (ptx.cuh), behind which that
one has ended and all that it wrote is seen. What makes this right:

- Every block waits before it ends, so a kernel ends after all that came before it. Behind its wait, a kernel may read
  and write anything: no earlier kernel runs, of this layer or of one before.
- Before its wait a kernel writes nothing to global memory.
- `latent_decode` reads nothing that another kernel writes before it waits, and lets the next kernel begin behind its
  wait. So whatever came before `latent_decode` has ended when `attend_latent_ring` begins, which reads it before it
  waits: queries, the ring, lengths and the schedule, but none of the parts.
- No other kernel here lets the next begin before its end. One of vLLM's that does so before `latent_decode` must itself
  wait in all its blocks; none is known that does not.

The launch is described in an object of its thread: an engine may be profiled in one thread and serve in another, and
two engines of a process may have a thread each. What a layer keeps for its launches (`CudaLatentDecode.arguments`)
belongs to the thread that runs the engine's step, of which vLLM runs one at a time.
"""

from __future__ import annotations

import threading

from cuda.bindings import driver


def launch_kernel(
    kernel: driver.CUfunction, grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int, address: int,
    *, is_early: bool,
) -> None:  # fmt: skip
    """Launch a kernel. `address`: of its parameters' addresses. Raises RuntimeError."""
    launch = _of_thread.launch
    launch.numAttrs = int(is_early)
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = grid
    launch.blockDimX, launch.sharedMemBytes, launch.hStream = threads, shared_bytes, stream
    (status,) = driver.cuLaunchKernelEx(launch, kernel, address, 0)
    if status:
        raise RuntimeError(f"a kernel was not launched: {status.name}")


def _make_launch() -> driver.CUlaunchConfig:
    attribute, launch = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    launch.blockDimY = launch.blockDimZ = launch.numAttrs = 1
    launch.attrs = [attribute]
    return launch


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.launch = _make_launch()


_of_thread = _OfThread()
