"""The second implementation of decode attention: CUDA C++ for Hopper, compiled at run time.

`kernels/triton/decode.py` is the portable one; read it first. This one takes what `refusal` does not name.
"""

from __future__ import annotations

import functools
import importlib.util

HEAD_DIMS = (64, 128)
COLUMNS = 8
"""Query heads of a KV head times query tokens of a request."""
CAPABILITY = (9, 0)


def refusal(
    capability: tuple[int, int],
    head_dim: int,
    group: int,
    query_len: int,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    *,
    has_sinks: bool = False,
    value_dim: int | None = None,
) -> str | None:
    """Why this kernel does not serve a layer, in words for the log; None: it does.

    capability: of the GPU. group: query heads a KV head. query_len: tokens of the longest decode, drafts included.
    value_dim: channels of V, None: `head_dim`.
    """
    if capability != CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} (it is written for 9.0)"
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} (it takes 64 and 128)"
    if value_dim not in (None, head_dim):
        return f"V of {value_dim} channels beside K of {head_dim}"
    if group * query_len > COLUMNS:
        return f"{group} query heads a KV head times {query_len} query tokens (it takes up to {COLUMNS})"
    if sliding_window:
        return "a sliding window"
    if logits_soft_cap:
        return "a soft cap"
    if has_sinks:
        return "attention sinks"
    return _missing()


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "a machine without the package cuda-bindings"
    from .nvrtc import compiler_version

    try:
        compiler_version()
    except RuntimeError as error:  # the binding's word for a library that it cannot load
        return f"a machine without NVRTC ({str(error).splitlines()[0]})"
    return None
