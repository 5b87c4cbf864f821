"""Layers of one layout as C++ reads them (`Layer` of layout/layer.h), and the library that reads their pages."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from ...codecs.codec import Codec
from ...codecs.latent import LatentCodec
from ...codecs.pages import PagedCodec
from ..checks import check_pages
from ..served import Latents, Pairs, cpp_lacks
from .build import Program, load_library
from .compiler import Target
from .constants import constants_header

EXACT = ("-ffp-contract=off",)
"""Flags of programs that reproduce the reference's bytes and numbers."""
PAGES = Program("pages/pages.cpp", EXACT)
ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of dtypes in `enum ElementType` of base/numbers.h."""

Int, Pointer = ctypes.c_int32, ctypes.c_void_p


class Layer(ctypes.Structure):
    """`struct Layer` of layout/layer.h. Keeps the tensors alive whose addresses it holds."""

    _fields_ = (
        ("rotation", Pointer),
        ("dim", Int * 2),
        ("order", Pointer * 2),
        ("order_heads", Int * 2),
        ("table", Pointer * 2),
        ("table_heads", Int * 2),
        ("centres", Int * 2),
        ("scales", Int * 2),
        ("spectrum", Pointer * 2),
        ("blocks", Int * 2),
        ("block_tokens", Int * 2),
    )
    kept: list[torch.Tensor]

    def grow_means(self, codec: PagedCodec, positions: torch.Tensor) -> None:
        """Make sure that the means of K reach up to these positions, int [any]."""
        transform = codec.key.transform
        if transform.grows and positions.numel():
            transform.means(positions.max().view(1))
            self.spectrum[0], self.blocks[0] = transform.spectrum.data_ptr(), transform.mean_blocks


class Cache(ctypes.Structure):
    """`struct Cache` of layer.h."""

    _fields_ = (
        ("data", Pointer),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("block_size", Int),
        ("slot_bytes", Int),
    )

    @classmethod
    def of(cls, cache: torch.Tensor | None) -> Cache:
        """cache: uint8 [blocks, KV heads, block_size, bytes], the last two dimensions contiguous."""
        if cache is None:
            return cls()
        check_pages(cache, 1)
        return cls(cache.data_ptr(), *cache.stride()[:2], *cache.shape[2:])


class KnownCaches:
    """Caches of a layer by name; they are checked when they differ from the last call's."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[weakref.ref[torch.Tensor], Cache]] = {}

    def of(self, name: str, cache: torch.Tensor) -> Cache:
        """Return `Cache.of(cache)`."""
        known = self._known.get(name)
        if known is not None and known[0]() is cache and known[1].data == cache.data_ptr():
            return known[1]
        made = Cache.of(cache)
        self._known[name] = weakref.ref(cache), made
        return made


def layer_of(codec: PagedCodec | LatentCodec) -> Layer:
    """Return a layer's description for the kernels, by its codec on the CPU. Raises ValueError for a codec that is not
    served."""
    if isinstance(codec, LatentCodec):
        lacks = cpp_lacks(Latents(codec.fmt, codec.rank, codec.rope_dim, heads=1))
        fmt, codecs, dims = codec.fmt, (codec.latent,), (codec.rank, codec.rope_dim)
    else:
        lacks = cpp_lacks(Pairs(codec.key.fmt, codec.key.head_dim, group=1))
        fmt, codecs, dims = codec.key.fmt, codec.codecs, (codec.key.head_dim, codec.value.head_dim)
    if lacks:
        raise ValueError(f"{fmt.name}: the CPU's kernels do not serve {lacks}")
    constants = codecs[0].rotation_constants
    layer = Layer(rotation=constants.data_ptr(), dim=dims)
    layer.kept = [constants]
    for role, part in enumerate(codecs):
        _fill_calibration(layer, part, role)
    return layer


def _fill_calibration(layer: Layer, codec: Codec, role: int) -> None:
    transform = codec.transform
    if codec.order is not None:
        order = codec.order.to(torch.int32).contiguous()
        layer.kept.append(order)
        layer.order[role], layer.order_heads[role] = order.data_ptr(), order.numel() // codec.stored_dim
    if transform.changes:
        table = transform.table(codec.channels)
        layer.kept += [table, transform.spectrum]
        layer.table[role], layer.table_heads[role] = table.data_ptr(), len(table)
        layer.centres[role], layer.scales[role] = transform.centres, transform.scale is not None
        layer.spectrum[role], layer.blocks[role] = transform.spectrum.data_ptr(), transform.mean_blocks
        layer.block_tokens[role] = transform.block_tokens


def load_for(program: Program, codec: PagedCodec | LatentCodec, target: Target | None = None) -> ctypes.CDLL:
    """Return the library of a program for a codec's layout. Raises BuildError."""
    fmt = codec.fmt if isinstance(codec, LatentCodec) else codec.key.fmt
    return load_library(program, constants_header(codec.layout, fmt.rotation), target)


def function_of(library: ctypes.CDLL, name: str, call: type[ctypes.Structure]) -> Any:
    """Return a function of a library; it takes the address of a `call` that begins with the layer's address."""
    size_of, function = getattr(library, f"{name}_bytes"), getattr(library, name)
    size_of.restype, function.argtypes = ctypes.c_long, [ctypes.POINTER(call)]
    assert size_of() == ctypes.sizeof(Layer) + ctypes.sizeof(call), "the structures here are not those of the C++"
    return function
