"""Launch a kernel, as usual or so that it may begin before the one before it in the stream has ended.

CUDA calls the latter a programmatic dependent launch; graphs support it. Such a kernel begins when all blocks of the
kernel before have called `begin_next_kernel` or ended. It calls `wait_for_kernel_before` (ptx.cuh), which returns once
the kernel before has ended and all its writes are visible. That holds for this one kernel only: if it began early
itself and did not wait, kernels before it may still run. vLLM 0.33.0 has kernels that begin early and never wait
(`_lora_shrink_kernel` with two streams) and ones that let the next begin before they have written their output
(FlashInfer's all-reduce of few tokens); cuBLAS and NCCL do not say. So the only kernel here that begins early follows a
kernel of ours that does not:

- `latent_decode` is launched as usual. When it begins, all earlier kernels in the stream have ended, whoever launched
them. It lets the next kernel begin at once.
- `attend_latent_ring` is launched early, directly behind it (`HopperLatents.attend`). Data that it reads before it
waits were written by kernels before `latent_decode`: queries (vLLM's products and RoPE), the ring
(`store_latents_kernel`),
  lengths (vLLM's metadata, `split_lens`), block tables and the schedule (`LatentScheduler`). `latent_decode` writes
  only partial results, which the ring's kernel reads after its wait. Before the wait, the ring's kernel writes nothing
  to global memory.
- Every block of `attend_latent_ring` waits before it ends, so it ends after `latent_decode`. It does not let the next
kernel begin early, so later kernels see a usual kernel. `latent_merge`, which follows where there is no ring, is
launched as usual, too.

An early launch is described in an object per thread: an engine may be profiled in one thread and serve in another, and
two engines of a process may use two threads. A layer's arguments (`CudaKernel.arguments`) have a lock.
"""

from __future__ import annotations

import threading

from cuda.bindings import driver


def launch_kernel(
    kernel: driver.CUfunction, grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int, address: int,
    *, is_early: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel. `address`: address of the array of its parameters' addresses. Raises RuntimeError."""
    if is_early:
        launch = _of_thread.launch
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = grid
        launch.blockDimX, launch.sharedMemBytes, launch.hStream = threads, shared_bytes, stream
        (status,) = driver.cuLaunchKernelEx(launch, kernel, address, 0)
    else:  # the shorter call
        x, y, z = grid
        (status,) = driver.cuLaunchKernel(kernel, x, y, z, threads, 1, 1, shared_bytes, stream, address, 0)
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
