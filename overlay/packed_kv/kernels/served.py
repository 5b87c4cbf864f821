"""Decides which kernel serves the decodes of a layer, up to how many query tokens of a request, and why no faster one
does.

No other place decides it: layers, the metadata's CUDA graphs, the metrics, `packed-kv plan`, `doctor` and `selftest`
ask here. No torch, as most of these have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..formats import Format, stored_dim
from ..gpu_generations import GENERATIONS, Generation, generation_of
from . import cpu, cuda
from .cpu.compiler import BuildError, best_target, find_compiler

CUDA, TRITON, CPP, PYTORCH = "CUDA", "Triton", "C++", "PyTorch"
"""Kernels: `kernels/cuda`, `kernels/triton`, `kernels/cpu`, and the reference."""
TRITON_COLUMNS = 64
"""Most columns (query heads per KV head times query tokens of a request) that the Triton kernel serves. It decodes a
request's pages again for each tile of columns; the prefill route decodes them once, but through memory. In tiles of 8
the kernel is faster at every measured shape with 64 columns, but not with 128 (docs/lab/tried.md). The CUDA kernel,
which decodes them once for 64 columns, takes more (`kernels.cuda.longest_query`). The C++ kernel has the same limit."""
SHORT_WINDOW = 256
"""Tokens of a sliding window up to which the Triton kernel reads what it leaves of a prefix in passes."""
ANY = 1 << 30
"""No limit on the query tokens of a request."""


class Engine(NamedTuple):
    """The facts about an engine that decide which kernel serves.

    `platform`: vLLM's, "cuda" or "cpu". `capability`: of the GPU; None: there is none, or it is not known. `option`:
    `decode_kernel`. `is_fp32`: whether activations are. `longest_decode`: most query tokens of a request, drafts
    included. `requests`: the most of a step. `ranks`: ranks that split the tokens of a request. `is_here`: whether it
    runs on this machine; then this machine's compilers are looked for.
    """

    platform: str
    capability: tuple[int, int] | None = None
    option: str = "auto"
    is_fp32: bool = False
    longest_decode: int = 1
    requests: int = 1
    ranks: int = 1
    is_here: bool = True


class Pairs(NamedTuple):
    """A layer of K and V.

    `fmt`: None: any format whose codes all kernels read. `head_dim`: channels of K. `group`: query heads per KV head of
    this rank, or of all ranks that split tokens. `value_dim`: channels of V; None: as K. `sliding_window`: tokens; None
    or 0: there is none. `soft_cap`: of scores; None or 0: there is none. `has_sinks`: whether heads have sinks.
    """

    fmt: Format | None
    head_dim: int
    group: int
    value_dim: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


class Latents(NamedTuple):
    """A layer of latent attention.

    `fmt`: as of `Pairs`. `rank`, `rope_dim`: channels of a latent, and of RoPE, of 16 bits or 8. `heads`: query heads
    of this rank, or of all ranks that split tokens. `are_picked`: whether an indexer picks the tokens.
    """

    fmt: Format | None
    rank: int
    rope_dim: int
    heads: int
    are_picked: bool = False


class Served(NamedTuple):
    """The kernel of a layer's decodes; the most query tokens of a request that it serves; and the log's reason why no
    faster kernel of the platform serves the layer, or "". Longer requests take the prefill route."""

    kernel: str
    longest: int
    reason: str = ""


def who_serves(engine: Engine, layer: Pairs | Latents) -> Served:
    """Return the kernel that serves the decodes of `layer`."""
    if engine.platform == "cpu":
        lacks = cpp_lacks(layer, engine.ranks)
        reason = f"the kernels do not serve {lacks}" if lacks else _no_compiler() if engine.is_here else ""
        if engine.is_fp32 or reason:
            return Served(PYTORCH, ANY, "activations are in fp32" if engine.is_fp32 else reason)
        return Served(CPP, longest_of(CPP, layer))
    if engine.is_fp32:
        return Served(PYTORCH, ANY, "activations are in fp32")
    lacks, reason = cuda_lacks(engine, layer), ""
    if engine.option == "triton":
        reason = "the CUDA kernel is disabled by decode_kernel=triton"
    elif lacks:
        reason = f"the CUDA kernel does not support {lacks}"
    elif engine.option != "cuda" and engine.capability and not cuda.runs_on(engine.capability):
        reason = (
            f"the CUDA kernel compiles for {_capability(engine.capability)}, but has not been seen to run there: "
            "decode_kernel=cuda takes it, packed-kv selftest compares and times it"
        )
    if reason or engine.capability is None:
        return Served(TRITON, longest_of(TRITON, layer), reason)
    return Served(CUDA, longest_of(CUDA, layer, generation_of(engine.capability).cuda_columns))


def who_reads_prefixes(engine: Engine, layer: Pairs, *, mixed_graphs: bool) -> str | None:
    """Return the kernel that reads the prefixes of a layer's chunks in the pages, in passes (`attention/passes.py`):
    CUDA, TRITON, or None: the prefill route gathers them. `mixed_graphs`: whether steps with prompts may be whole CUDA
    graphs.

    Layers with sinks are like others here: a chunk's attention gets its sinks as a whole. Triton's kernel reads the few
    tokens of a prefix that a short sliding window leaves, for steps that are whole CUDA graphs. Nobody has timed it
    over heads of 256 channels, and neither kernel on GPUs where the CUDA kernel lacks some of its columns.
    """
    if engine.capability is None or engine.is_fp32 or engine.ranks > 1 or engine.option == "triton":
        return None
    without_window = layer._replace(has_sinks=False, sliding_window=None)
    has_all_columns = generation_of(engine.capability).cuda_columns == cuda.COLUMNS
    if not has_all_columns or cuda_lacks(engine, without_window):
        return None
    if not layer.sliding_window:
        return CUDA
    is_short = layer.sliding_window <= SHORT_WINDOW and layer.head_dim != cuda.LARGE_HEAD
    return TRITON if is_short and mixed_graphs else None


def longest_of(kernel: str, layer: Pairs | Latents, columns: int = cuda.COLUMNS) -> int:
    """Return the most query tokens of a request that a kernel serves in a layer. For pairs it is at least one, as CUDA
    graphs need it. For picked latents there is no limit, as each query token is a request to the kernel. columns: the
    most columns of the CUDA kernel on the GPU."""
    if isinstance(layer, Pairs):
        return max(1, cuda.longest_query(layer.group, columns) if kernel == CUDA else TRITON_COLUMNS // layer.group)
    return cuda.LATENT_ROWS // layer.heads if kernel == CUDA and not layer.are_picked else ANY


def cuda_lacks(engine: Engine, layer: Pairs | Latents) -> str | None:
    """Return the property of a layer that `kernels/cuda` does not serve, or None."""
    if engine.capability is None:
        return "a GPU of unknown compute capability"
    generation = generation_of(engine.capability)
    if not generation.cuda_columns:
        return f"{_capability(engine.capability)} (only {_those(lambda x: x.cuda_columns)})"
    if isinstance(layer, Pairs):
        lacks = _pairs_cuda_lacks(engine, layer, generation)
    elif not generation.has_wgmma:
        lacks = f"latents on {_capability(engine.capability)} (only {_those(lambda x: x.has_wgmma)}, for its wgmma)"
    else:
        lacks = _latents_cuda_lacks(engine, layer)
    return lacks or _unknown_codes(layer, cuda.BITS) or (cuda.missing(engine.capability) if engine.is_here else None)


def _capability(capability: tuple[int, int]) -> str:
    return f"compute capability {capability[0]}.{capability[1]}"


def _those(serves: Callable[[Generation], object]) -> str:
    """Return the compute capabilities that the CUDA kernels serve, in words."""
    *others, last = ("{}.{}".format(*x.capability) for x in GENERATIONS if serves(x))
    return f"{', '.join(others)} and {last}" if others else last


def _pairs_cuda_lacks(engine: Engine, layer: Pairs, generation: Generation) -> str | None:
    group, query_len = layer.group, engine.longest_decode
    longest = cuda.longest_query(group, generation.cuda_columns)
    if layer.head_dim not in cuda.HEAD_DIMS:
        *others, last = cuda.HEAD_DIMS
        return f"head size {layer.head_dim} (only {', '.join(map(str, others))} and {last})"
    if layer.head_dim == cuda.LARGE_HEAD and not generation.is_seen:
        lacks = f"head size {layer.head_dim} on {_capability(generation.capability)}"
        return f"{lacks} (only {_those(lambda x: x.is_seen)})"
    if layer.value_dim not in (None, layer.head_dim):
        return f"value heads of {layer.value_dim} channels beside key heads of {layer.head_dim}"
    if query_len > longest:
        return f"{group} query heads per KV head times {query_len} query tokens (at most {longest} tokens)"
    passes = -(-query_len // cuda.pass_tokens(group))
    if engine.requests * passes > cuda.MAX_REQUESTS:
        return f"{engine.requests} requests at once (at most {cuda.MAX_REQUESTS // passes})"
    if layer.sliding_window:
        return "a sliding window"
    if layer.soft_cap:
        return "a soft cap"
    return "attention sinks" if layer.has_sinks else None


def _latents_cuda_lacks(engine: Engine, layer: Latents) -> str | None:
    query_len = 1 if layer.are_picked else engine.longest_decode
    if (layer.rank, layer.rope_dim) != cuda.LATENT:
        rank, rope_dim = cuda.LATENT
        return f"latents of {layer.rank} channels with {layer.rope_dim} of RoPE (only {rank} with {rope_dim})"
    if layer.heads * query_len > cuda.LATENT_ROWS:
        return f"{layer.heads} query heads times {query_len} query tokens (at most {cuda.LATENT_ROWS})"
    return None


def cpp_lacks(layer: Pairs | Latents, ranks: int = 1) -> str | None:
    """Return the property of a layer that `kernels/cpu` does not serve, or None. ranks: ranks that split the tokens of
    a request."""
    if isinstance(layer, Pairs):
        if ranks > 1:
            return f"{ranks} ranks that split the tokens of a request"
        if stored_dim(layer.head_dim) > cpu.VECTOR_CHANNELS:
            return f"heads of {layer.head_dim} channels (at most {cpu.VECTOR_CHANNELS})"
    elif layer.are_picked:
        return "picked latents"
    elif layer.rope_dim > cpu.MOST_ROPE:
        return f"{layer.rope_dim} RoPE channels (at most {cpu.MOST_ROPE})"
    elif layer.rank > cpu.MOST_CHANNELS:
        return f"latents of {layer.rank} channels (at most {cpu.MOST_CHANNELS})"
    if reason := _unknown_codes(layer, cpu.BITS):
        return reason
    unknown = layer.fmt is not None and layer.fmt.rotation not in cpu.ROTATIONS
    return f"the rotation {layer.fmt.rotation}" if layer.fmt is not None and unknown else None


def _unknown_codes(layer: Pairs | Latents, known: tuple[int, ...]) -> str | None:
    channels = layer.head_dim if isinstance(layer, Pairs) else layer.rank
    unknown = set(() if layer.fmt is None else layer.fmt.group_bits(channels)) - set(known)
    return f"codes of {max(unknown)} bits" if unknown else None


def _no_compiler() -> str:
    """Return why no kernel can be compiled for this machine's CPU, or ""."""
    try:
        find_compiler()
        best_target()
    except BuildError as error:
        return str(error)
    return ""
