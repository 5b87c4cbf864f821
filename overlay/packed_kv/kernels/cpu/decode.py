"""Decode attention of a layer on a CPU: `decode.cpp` for its format and heads, and what it is called with."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from ...codecs.pages import PagedCodec
from ...codecs.ring import Ring
from ..checks import check_int32, check_pages
from ..kernel_layout import kernel_layout
from .build import SIMD, Program, load_library
from .compiler import Target
from .constants import constants_header
from .jobs import Jobs, Largest
from .tables import ELEMENT_TYPES

PROGRAM = Program(
    "decode.cpp",
    (*SIMD, "arguments.h", "jobs.h", "numbers.h", "pages.h", "queries.h", "ranges.h", "ring.h", "rotation.h",
     "softmax.h", "threads.h", "tile.h"),
)  # fmt: skip
_ADDRESS, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


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
    """`Requests` of arguments.h."""

    _fields_ = (
        ("requests", _NUMBER), ("block_table", _ADDRESS), ("block_table_stride", _NUMBER),
        ("query_start", _ADDRESS), ("seq_lens", _ADDRESS),
        ("ring_table", _ADDRESS), ("ring_table_stride", _NUMBER), ("ring_first", _ADDRESS), ("threads", _NUMBER),
    )  # fmt: skip


class Arguments(ctypes.Structure):
    """`Arguments` of arguments.h."""

    _anonymous_ = ("of_step",)
    _fields_ = [
        ("of_step", Requests),
        ("cache", _ADDRESS), ("cache_block_stride", _NUMBER), ("cache_head_stride", _NUMBER), ("block_size", _NUMBER),
        ("query", _ADDRESS), ("query_type", _NUMBER), ("query_stride", _NUMBER), ("query_head_stride", _NUMBER),
        ("output", _ADDRESS), ("output_type", _NUMBER), ("output_stride", _NUMBER), ("output_head_stride", _NUMBER),
        ("kv_heads", _NUMBER), ("group", _NUMBER), ("head_dim", _NUMBER), ("value_dim", _NUMBER),
        ("scale", _FLOAT), ("soft_cap", _FLOAT), ("sliding_window", _NUMBER), ("sinks", _ADDRESS),
        ("rotation_constants", _ADDRESS), ("key_channels", _ADDRESS), ("value_channels", _ADDRESS),
        ("key_channels_stride", _NUMBER), ("value_channels_stride", _NUMBER),
        ("key_scale", _ADDRESS), ("value_scale", _ADDRESS), ("key_scale_stride", _NUMBER),
        ("value_scale_stride", _NUMBER),
        ("means", _ADDRESS), ("means_stride", _NUMBER), ("spectrum", _ADDRESS), ("mean_blocks", _NUMBER),
        ("mean_block_tokens", _NUMBER),
        ("ring", _ADDRESS), ("ring_block_stride", _NUMBER), ("ring_head_stride", _NUMBER),
        ("ring_token_stride", _NUMBER), ("ring_block_size", _NUMBER), ("ring_window", _NUMBER),
        ("workspace", _ADDRESS),
    ]  # fmt: skip


class Step(NamedTuple):
    """Requests of a step, as the layers that it serves share them, and the tensors that their addresses are of."""

    requests: Requests
    seq_lens: torch.Tensor
    held: tuple[torch.Tensor, ...]


def prepare_step(
    block_table: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, ring: Ring | None = None
) -> Step:
    """Return the step of these requests, for `CpuDecode`; it reads the tensors' contents at each call.

    Args:
        block_table: int32 [requests, blocks].
        query_start: int32 [requests + 1], first row of each request in the queries.
        seq_lens: int32 [requests], tokens of each.
        ring: of these requests, of any of the layers; None: there is none.
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
        options: see `DecodeOptions`; `sinks` are read at each `bind`.
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
        header = constants_header(kernel_layout(codec.layout), codec.key.fmt.rotation)
        library = load_library(PROGRAM, header, target)
        self._jobs = Jobs(library, "decode", Arguments)
        self._held: dict[str, torch.Tensor] = {}
        self._call = self._fixed_arguments()
        self._layout: tuple[object, ...] = ()
        self._pages: weakref.ref[torch.Tensor] | None = None
        self._ring: weakref.ref[torch.Tensor] | None = None
        transform: Any = codec.key.transform
        self._has_means = transform.centres

    def reserve(self, largest: Largest) -> None:
        """Take the workspace of the largest step."""
        call = Arguments.from_buffer_copy(self._call)
        call.ring, call.means = int(largest.has_ring), int(self._has_means)
        call.threads = torch.get_num_threads()
        self._jobs.reserve(call, largest)

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

        What does not change from step to step is looked at once: a model calls this for each layer and token.
        """
        with self._jobs.workspace.lock:
            call, layout = self._call, (query.dtype, query.stride(), output.dtype, output.stride())
            call.of_step = step.requests
            if layout != self._layout:
                self._set_vectors(query, output)
                self._layout = layout
            if self._pages is None or self._pages() is not cache:
                self._set_pages(cache)
            if ring is None:
                call.ring = None
            else:
                assert step.requests.ring_table, "the step's requests have no ring"
                if self._ring is None or self._ring() is not ring.cache:
                    self._set_ring(ring)
                call.ring = ring.cache.data_ptr()
            call.cache, call.query, call.output = cache.data_ptr(), query.data_ptr(), output.data_ptr()
            sinks = None
            if self.options.sinks is not None:
                sinks = self.options.sinks.detach().float().contiguous()
                call.sinks = sinks.data_ptr()
            if self._has_means:
                self._add_means(call, step.seq_lens)
            self._jobs.run(call)

    def _set_vectors(self, query: torch.Tensor, output: torch.Tensor) -> None:
        key_dim, value_dim, call = self.codec.key.head_dim, self.codec.value.head_dim, self._call
        assert query.shape[1:] == (self.query_heads, key_dim) and query.stride(2) == 1, (query.shape, query.stride())
        assert output.shape[1:] == (self.query_heads, value_dim) and output.stride(2) == 1, (output.shape,)
        call.query_type, call.output_type = ELEMENT_TYPES[query.dtype], ELEMENT_TYPES[output.dtype]
        call.query_stride, call.query_head_stride, _ = query.stride()
        call.output_stride, call.output_head_stride, _ = output.stride()

    def _set_pages(self, cache: torch.Tensor) -> None:
        assert cache.shape[1] == self.kv_heads and cache.shape[3] == self.codec.slot_bytes, cache.shape
        check_pages(cache, 1)
        call = self._call
        call.block_size, call.cache_block_stride, call.cache_head_stride = cache.shape[2], *cache.stride()[:2]
        self._pages = weakref.ref(cache)

    def _set_ring(self, ring: Ring) -> None:
        call, cache = self._call, ring.cache
        assert cache.stride(3) == 1, cache.stride()
        call.ring_block_size, call.ring_window = cache.shape[2], ring.window
        call.ring_block_stride, call.ring_head_stride, call.ring_token_stride, _ = cache.stride()
        self._ring = weakref.ref(cache)

    def _fixed_arguments(self) -> Arguments:
        """Return the arguments that are the same in all calls."""
        key, value, fixed = self.codec.key, self.codec.value, Arguments()
        fixed.kv_heads, fixed.group = self.kv_heads, self.query_heads // self.kv_heads
        fixed.head_dim, fixed.value_dim = key.head_dim, value.head_dim
        fixed.scale, fixed.soft_cap = self.options.scale, self.options.logits_soft_cap or 0.0
        fixed.sliding_window = self.options.sliding_window or 0
        self._table(fixed, "rotation_constants", key.rotation_constants)
        for name, codec in (("key", key), ("value", value)):
            self._table(fixed, f"{name}_channels", codec.channels.to(torch.int32))
            self._table(fixed, f"{name}_scale", codec.transform.scale)
        return fixed

    def _table(self, arguments: Arguments, name: str, table: torch.Tensor | None) -> None:
        """Set a table [heads, stored_dim] or [stored_dim], which is held, and its stride."""
        if table is None:
            return
        self._held[name] = table = table.contiguous()
        setattr(arguments, name, table.data_ptr())
        if hasattr(arguments, f"{name}_stride"):
            setattr(arguments, f"{name}_stride", table.stride(0) if table.ndim == 2 else 0)

    def _add_means(self, arguments: Arguments, seq_lens: torch.Tensor) -> None:
        transform: Any = self.codec.key.transform
        if transform.grows and seq_lens.shape[0]:
            transform.means(seq_lens.max().view(1))
        if "means" not in self._held:
            self._held["means"] = transform.mean_rows()
        means = self._held["means"]
        arguments.means, arguments.means_stride = means.data_ptr(), means.stride(0) if means.shape[0] > 1 else 0
        arguments.spectrum, arguments.mean_blocks = transform.spectrum.data_ptr(), transform.mean_blocks
        arguments.mean_block_tokens = transform.block_tokens
