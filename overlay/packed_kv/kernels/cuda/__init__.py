"""The second implementation of decode attention: CUDA C++ for Hopper, compiled at run time; on Blackwell by request.

`kernels/triton/decode.py` is the portable one; read it first. `kernels/served.py` says which layers this one
serves.
"""

from __future__ import annotations

import functools
import importlib.util

from ...gpu_generations import generation_of

HEAD_DIMS = (64, 128, 256)
BITS = (5, 4, 3, 2)
"""Widths that `codes.cuh` decodes."""
COLUMNS = 64
"""The most query heads per KV head times query tokens that one pass over a request's keys serves."""
LARGE_HEAD = 256
"""Channels of heads that only Hopper serves."""
MAX_PASSES = 4
"""The most passes over the keys of a request. Beyond, the prefill route is faster, as it unpacks once."""
MAX_REQUESTS = 1 << 14
"""The most requests of a step, each counted once per pass: a schedule's words have room for twice as many."""
LATENT = 512, 64
"""Rank and RoPE channels of the latents that `latent.cu` attends over."""
LATENT_ROWS = 128
"""The most query heads times query tokens of a request over latents."""


def pass_tokens(group: int) -> int:
    """Return the most query tokens of a request that one pass over its keys serves.

    group: query heads per KV head.
    """
    return COLUMNS // group


def longest_query(group: int, columns: int = COLUMNS) -> int:
    """Return the most query tokens of a request, drafts included, that the kernel serves; 0: it serves none.

    group: query heads per KV head. columns: `cuda_columns` of the GPU; below `COLUMNS` a request has one pass.
    """
    return MAX_PASSES * pass_tokens(group) if columns == COLUMNS else columns // group


def runs_on(capability: tuple[int, int]) -> bool:
    """Return whether `decode_kernel` "auto" chooses these kernels on a GPU."""
    return generation_of(capability).is_seen


@functools.cache
def missing(capability: tuple[int, int]) -> str | None:
    """Return what this machine lacks to compile these kernels for a GPU, in words, or None."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "a machine without the package cuda-bindings"
    from .nvrtc import compiler_version, known_architectures

    try:
        major, minor = compiler_version()
    except RuntimeError as error:  # the binding raises it if it cannot load the library
        return f"a machine without NVRTC ({str(error).splitlines()[0]})"
    if 10 * capability[0] + capability[1] not in known_architectures():
        return f"compute capability {capability[0]}.{capability[1]} with NVRTC {major}.{minor}, which does not know it"
    return None
