"""Decode attention of a layer on a CPU: the library of `attend/` for its layout, and the arguments of its calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ...codecs.pages import PagedCodec
from ...codecs.ring import Ring
from ..checks import check_int32
from .build import Program
from .compiler import Target
from .jobs import Jobs, Largest
from .layer import ELEMENT_TYPES, Cache, KnownCaches, Layer, Pointer, layer_of, load_for

PAIRS, LATENTS = Program("attend/pairs.cpp"), Program("attend/latents.cpp")
_NUMBER, _FLOAT = ctypes.c_int64, ctypes.c_double


class DecodeOptions(Protocol):
    """Options of a layer's attention, as `reference.attention.AttentionOptions` has them."""

    @property
    def scale(self) -> float: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def logits_soft_cap(self) -> float | None: ...
    @property
    def sinks(self) -> torch.Tensor | None: ...


class Requests(ctypes.Structure):
    """`Requests` of attend/arguments.h."""

    _fields_ = (
        ("requests", _NUMBER), ("block_table", Pointer), ("block_table_stride", _NUMBER),
        ("query_start", Pointer), ("seq_lens", Pointer),
        ("ring_table", Pointer), ("ring_table_stride", _NUMBER), ("ring_first", Pointer), ("threads", _NUMBER),
    )  # fmt: skip


class Arguments(ctypes.Structure):
    """`Arguments` of attend/arguments.h."""

    _anonymous_ = ("of_step",)
    _fields_ = (
        ("of_step", Requests), ("layer", ctypes.POINTER(Layer)), ("pages", Cache), ("ring", Cache),
        ("query", Pointer), ("rope_query", Pointer), ("query_type", _NUMBER), ("query_stride", _NUMBER),
        ("query_head_stride", _NUMBER), ("rope_stride", _NUMBER), ("rope_head_stride", _NUMBER),
        ("output", Pointer), ("output_type", _NUMBER), ("output_stride", _NUMBER), ("output_head_stride", _NUMBER),
        ("lse", Pointer), ("kv_heads", _NUMBER), ("group", _NUMBER), ("scale", _FLOAT), ("soft_cap", _FLOAT),
        ("sliding_window", _NUMBER), ("sinks", Pointer), ("constant", Pointer), ("ring_window", _NUMBER),
        ("workspace", Pointer),
    )  # fmt: skip

    def set_vectors(self, query: torch.Tensor, output: torch.Tensor) -> None:
        """Set the fields that depend on dtypes and strides of [tokens, heads, channels]."""
        assert query.stride(2) == output.stride(2) == 1, (query.stride(), output.stride())
        self.query_type, self.output_type = ELEMENT_TYPES[query.dtype], ELEMENT_TYPES[output.dtype]
        self.query_stride, self.query_head_stride, _ = query.stride()
        self.output_stride, self.output_head_stride, _ = output.stride()


class Step(NamedTuple):
    """Requests of a step, which its layers share, and the tensors behind their addresses."""

    requests: Requests
    seq_lens: torch.Tensor
    held: tuple[torch.Tensor, ...]


def prepare_step(
    block_table: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, ring: Ring | None = None
) -> Step:
    """Return the step of these requests; the kernels read the tensors' contents at each call.

    Args:
        block_table: int32 [requests, blocks].
        query_start: int32 [requests + 1], first row of each request in the queries.
        seq_lens: int32 [requests], tokens of each.
        ring: the ring of these requests, of any layer; None: there is none.
    """
    query_start, seq_lens = query_start.to(torch.int32).contiguous(), seq_lens.to(torch.int32).contiguous()
    check_int32(block_table)
    held: tuple[torch.Tensor, ...] = block_table, query_start
    made = Requests(
        seq_lens.shape[0], block_table.data_ptr(), block_table.stride(0), query_start.data_ptr(), seq_lens.data_ptr(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    if ring is not None:
        check_int32(ring.block_table, ring.first)
        made.ring_table, made.ring_table_stride = ring.block_table.data_ptr(), ring.block_table.stride(0)
        made.ring_first, held = ring.first.data_ptr(), (*held, ring.block_table, ring.first)
    return Step(made, seq_lens, held)


class CpuDecode:
    """Decode attention of one layer over packed pages, as `reference.attention.attend` has it.

    Outputs have the same bits whatever the number of threads and the other requests of a batch.

    Args:
        codec: of the layer, on the CPU.
        query_heads, kv_heads: of this rank.
        options: see `DecodeOptions`; `sinks` are read at each call.
        target: what to compile for; None: the best of this processor.

    Raises:
        BuildError: there is no compiler, or it fails; one line.
    """

    def __init__(
        self,
        codec: PagedCodec,
        query_heads: int,
        kv_heads: int,
        options: DecodeOptions,
        *,
        target: Target | None = None,
    ) -> None:
        self.codec, self.query_heads, self.kv_heads, self.options = codec, query_heads, kv_heads, options
        self.layer, self._caches = layer_of(codec), KnownCaches()
        self._jobs = Jobs(load_for(PAIRS, codec, target), Arguments)
        self._call = Arguments(
            layer=ctypes.pointer(self.layer), kv_heads=kv_heads, group=query_heads // kv_heads, scale=options.scale,
            soft_cap=options.logits_soft_cap or 0.0, sliding_window=options.sliding_window or 0,
        )  # fmt: skip
        self._layout: tuple[object, ...] = ()

    def reserve(self, largest: Largest) -> None:
        """Take the workspace of the largest step."""
        self._jobs.reserve(Arguments.from_buffer_copy(self._call), self.layer, largest)

    def bind(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        output: torch.Tensor,
        ring: Ring | None = None,
    ) -> Callable[[], None]:
        """Return a function that attends with requests' newest tokens over all of their cached tokens, the newest
        included. It reads the contents of these tensors at each call.

        Args:
            query: fp32, bf16 or fp16 [tokens or more, query heads, head_dim].
            cache: uint8 [blocks, KV heads, block_size, slot_bytes].
            block_table: int32 [requests, blocks].
            query_start: int32 [requests + 1], first row of each request in `query`.
            seq_lens: int32 [requests], tokens of each.
            output: fp32, bf16 or fp16 [tokens or more, query heads, value_dim]; the rows of these requests are filled,
                with 0 where a query sees nothing.
            ring: of these requests, the new tokens included; None: there is none.
        """
        step = prepare_step(block_table, query_start, seq_lens, ring)
        return lambda: self(step, query, cache, output, ring)

    def __call__(
        self, step: Step, query: torch.Tensor, cache: torch.Tensor, output: torch.Tensor, ring: Ring | None = None
    ) -> None:
        """Attend in a step: see `bind`. `ring`: of the layer; that of the step has the same requests.

        Facts that do not change from step to step are read once: a model calls this for each layer and token.
        """
        with self._jobs.workspace.lock:
            call, layout = self._call, (query.dtype, query.stride(), output.dtype, output.stride())
            if layout != self._layout:
                key_dim, value_dim = self.codec.key.head_dim, self.codec.value.head_dim
                assert query.shape[1:] == (self.query_heads, key_dim), query.shape
                assert output.shape[1:] == (self.query_heads, value_dim), output.shape
                call.set_vectors(query, output)
                self._layout = layout
            call.of_step, call.pages = step.requests, self._caches.of("pages", cache)
            call.query, call.output = query.data_ptr(), output.data_ptr()
            if ring is not None:
                assert step.requests.ring_table, "the step's requests have no ring"
                call.ring, call.ring_window = self._caches.of("ring", ring.cache), ring.window
            elif call.ring.data:
                call.ring = Cache()
            sinks = None
            if self.options.sinks is not None:
                sinks = self.options.sinks.detach().float().contiguous()
                call.sinks = sinks.data_ptr()
            self.layer.grow_means(self.codec, step.seq_lens)
            self._jobs.run(call)
