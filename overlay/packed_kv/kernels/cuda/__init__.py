"""The second implementation of decode attention: CUDA C++ for Hopper, compiled at run time.

`kernels/triton/decode.py` is the portable one; read it first. `refusal` says which layers this one does not serve.
"""

from __future__ import annotations

import functools
import importlib.util

HEAD_DIMS = (64, 128)
BITS = (4, 3, 2)
"""Widths that `codes.cuh` decodes."""
COLUMNS = 64
"""The most query heads per KV head times query tokens that one pass over a request's keys serves."""
MAX_PASSES = 4
"""The most passes over the keys of a request. With more, the prefill route is faster, which unpacks once."""
MAX_REQUESTS = 1 << 14
"""The most requests of a step, each counted once per pass: a schedule's words have room for twice as many."""
LATENT = 512, 64
"""Rank and RoPE channels of the latents that `latent.cu` attends over."""
LATENT_ROWS = 128
"""The most query heads times query tokens of a request over latents."""
CAPABILITY = (9, 0)


def pass_tokens(group: int) -> int:
    """Return the most query tokens of a request that one pass over its keys serves.

    group: query heads per KV head.
    """
    return COLUMNS // group


def longest_query(group: int) -> int:
    """Return the most query tokens of a request, drafts included, that the kernel serves; 0: it serves none.

    group: query heads per KV head.
    """
    return MAX_PASSES * pass_tokens(group)


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
    group_bits: tuple[int, ...] = BITS,
    requests: int = 1,
) -> str | None:
    """Return what of a layer this kernel does not serve, for the log, or None if it serves the layer.

    Args:
        capability: compute capability of the GPU.
        head_dim: channels of K.
        group: query heads per KV head.
        query_len: most query tokens of a request, drafts included.
        sliding_window: tokens; None or 0: there is none.
        logits_soft_cap: None or 0: there is none.
        has_sinks: whether the layer has attention sinks.
        value_dim: channels of V; None: `head_dim`.
        group_bits: bits of the format's groups.
        requests: the most of a step.
    """
    if capability != CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} (only 9.0)"
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} (only 64 and 128)"
    if value_dim not in (None, head_dim):
        return f"value heads of {value_dim} channels beside key heads of {head_dim}"
    if query_len > longest_query(group):
        return f"{group} query heads per KV head times {query_len} query tokens (at most {longest_query(group)} tokens)"
    passes = -(-query_len // pass_tokens(group))
    if requests * passes > MAX_REQUESTS:
        return f"{requests} requests at once (at most {MAX_REQUESTS // passes})"
    if sliding_window:
        return "a sliding window"
    if logits_soft_cap:
        return "a soft cap"
    if has_sinks:
        return "attention sinks"
    return _unknown_codes(group_bits) or _missing()


def latent_refusal(
    capability: tuple[int, int],
    rank: int,
    rope_dim: int,
    heads: int,
    query_len: int,
    group_bits: tuple[int, ...] = BITS,
) -> str | None:
    """Return what of a layer `latent.cu` does not serve, for the log, or None if it serves the layer.

    Args:
        capability: compute capability of the GPU.
        rank, rope_dim: channels of a latent, and RoPE's, of 16 bits or 8.
        heads: query heads of this rank.
        query_len: most query tokens of a request, drafts included; over picked latents 1, as each reads its own.
        group_bits: bits of the format's groups.
    """
    if capability != CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} (only 9.0)"
    if (rank, rope_dim) != LATENT:
        return f"latents of {rank} channels with {rope_dim} of RoPE (only {LATENT[0]} with {LATENT[1]})"
    if heads * query_len > LATENT_ROWS:
        return f"{heads} query heads times {query_len} query tokens (at most {LATENT_ROWS})"
    return _unknown_codes(group_bits) or _missing()


def _unknown_codes(group_bits: tuple[int, ...]) -> str | None:
    unknown = set(group_bits) - set(BITS)
    return f"codes of {max(unknown)} bits" if unknown else None


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "a machine without the package cuda-bindings"
    from .nvrtc import compiler_version

    try:
        compiler_version()
    except RuntimeError as error:  # what the binding raises if it cannot load the library
        return f"a machine without NVRTC ({str(error).splitlines()[0]})"
    return None
