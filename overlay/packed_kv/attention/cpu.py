"""The kernels of a CPU, in C++: which of them serve a layer, and its decodes. Prefill is in `cpu_prefill.py`.

Stored bytes equal the reference's, so `kernels/cpu` stores every layer that it knows. It serves decodes in fp16 and
bf16. With fp32 activations a result must not depend on how the scheduler cut, batched or cached a request; only
`reference/attention.py` guarantees that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from ..formats import Format
from ..kernels.cpu import decode, store
from ..kernels.cpu.build import Program, load_library
from ..kernels.cpu.compiler import BuildError
from ..kernels.cpu.constants import constants_header
from ..kernels.cpu.decode import LATENTS, PAIRS
from ..kernels.cpu.jobs import Largest
from ..kernels.cpu.layer import PAGES
from ..kernels.precompile import Precompiler, wait_for
from ..kernels.served import CPP, Engine, Latents, Pairs, cpp_lacks, longest_of, who_serves
from ..layout import PageLayout, latent_layout, page_layout
from ..reference.attention import AttentionOptions
from .cpu_prefill import CpuPrefill
from .cpu_prefill import refusal as prefill_refusal
from .protocols import DecodeBatch, DecodeKernel, StoreKernel
from .store import FunctionStore, reference_pair_store

if TYPE_CHECKING:
    from ..codecs.pages import PagedCodec
    from ..codecs.ring import Ring
    from .layouts import PairLayout
    from .limits import EngineLimits

logger = init_logger("vllm.packed_kv")

SLOWER = "10 to 25 times"
"""Ratio of a decode step's time in PyTorch to its time in these kernels, as benchmarks/cpu.py measures it."""


class CpuPairs(DecodeKernel[decode.Step, None]):
    """The C++ decode kernel of one layer of pairs. It rotates queries, and knows nothing of context parallelism.

    Args:
        codec: of the layer, on the CPU.
        query_heads, kv_heads: of this rank.
        options: see `AttentionOptions`.
        largest: the largest step; the workspace is sized for it.

    Raises:
        BuildError: no compiler, or one that fails.
    """

    language, kind, bound = CPP, "cpu", None

    def __init__(
        self, codec: PagedCodec, query_heads: int, kv_heads: int, options: AttentionOptions, largest: Largest
    ) -> None:
        self.decode = decode.CpuDecode(codec, query_heads, kv_heads, options)
        self.decode.reserve(largest)
        self.longest = longest_of(CPP, Pairs(codec.key.fmt, codec.key.head_dim, query_heads // kv_heads))

    def prepare(self, batch: DecodeBatch) -> decode.Step:
        return decode.prepare_step(batch.block_table, batch.query_start, batch.seq_lens, batch.ring)

    def attend(
        self, step: decode.Step, cache: torch.Tensor, queries: tuple[torch.Tensor, ...], ring: Ring | None = None,
        output: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert output is not None
        self.decode(step, queries[0], cache, output, ring)


def find_kernels(
    fmt: Format, layer: PairLayout, engine: EngineLimits
) -> tuple[StoreKernel, CpuPairs | None, CpuPrefill | None]:
    """Return the kernels that store, decode and prefill for a layer of this format. Where C++ does not serve the layer,
    the log says so, and the kernel is PyTorch's or None. With several ranks, all runs in PyTorch."""
    attends = engine.dtype != torch.float32
    in_pytorch = reference_pair_store(layer.codec), None, None
    served = who_serves(Engine("cpu", ranks=layer.shard.ranks), layer.asked())
    if served.kernel != CPP:
        warn_of_pytorch(fmt.name, served.reason)
        return in_pytorch
    wait_for_libraries(layer.codec.layout, fmt.rotation, attends=attends)
    sizes = layer.codec, layer.query_heads, layer.kv_heads, layer.options
    try:
        library = FunctionStore(store.CpuStore(layer.codec))
        if not attends:
            return library, None, None
        pairs = CpuPairs(*sizes, engine.largest)
        if refused := prefill_refusal(layer.codec.key.head_dim):
            logger.warning_once(
                "%s: vLLM's attention op does not support %s; prefill runs in PyTorch, many times slower",
                fmt.name,
                refused,
                scope="local",
            )
            return library, pairs, None
        most = max(engine.request_tokens, engine.limits.max_tokens)
        return library, pairs, CpuPrefill(*sizes, most, engine.dtype, engine.number)
    except BuildError as error:
        warn_of_pytorch(fmt.name, str(error))
        return in_pytorch


def compile_ahead(
    asked: Pairs | Latents, *, attends: bool, rope_bits: int = 16, key_bits: tuple[int, ...] | None = None
) -> None:
    """Begin to compile what such layers need, in other threads, while vLLM loads the model.

    `rope_bits`: bits of latents' RoPE channels. `key_bits`: bits of K's groups, where a calibration file has some.
    """
    if asked.fmt is None or cpp_lacks(asked):
        return
    if isinstance(asked, Pairs):
        page = page_layout(asked.fmt, asked.head_dim, key_bits=key_bits)
    else:
        page = latent_layout(asked.fmt, asked.rank, asked.rope_dim, rope_bits)
    with Precompiler() as ahead:
        for name, load in _libraries(page, asked.fmt.rotation, attends=attends).items():
            ahead.note(name, load)


def wait_for_libraries(page: PageLayout, rotation: str, *, attends: bool) -> None:
    """Wait until these libraries are compiled or have failed; loading a failed one raises the reason."""
    for name in _libraries(page, rotation, attends=attends):
        wait_for(name)


def _libraries(page: PageLayout, rotation: str, *, attends: bool) -> dict[Hashable, Callable[[], object]]:
    constants = constants_header(page, rotation)
    decodes = LATENTS if page.rope else PAIRS
    programs = (decodes, PAGES) if attends else (PAGES,)  # the one that takes longest first
    return {(program, constants): partial(_load_or_pass, program, constants) for program in programs}


def _load_or_pass(program: Program, constants: str) -> None:
    """Ignore a library that cannot be built: loading it later raises the reason."""
    with suppress(BuildError):
        load_library(program, constants)


def warn_of_pytorch(name: str, reason: str, slower: str = SLOWER) -> None:
    """Log, once, that attention runs in PyTorch, why, and what it costs."""
    logger.warning_once(
        "KV cache dtype %s: attention runs in PyTorch, a decode step takes %s as long: %s",
        name,
        slower,
        reason,
        scope="local",
    )
