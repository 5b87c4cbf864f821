"""The kernels of a layer of latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocols import DecodeKernel
from ..store import LatentStore, reference_latent_store
from .in_pytorch import Attended, ReferenceLatentPrefix, ReferenceLatents

if TYPE_CHECKING:
    from ..layouts import LatentLayout
    from .prefix import TritonLatentPrefix


class LatentKernels(NamedTuple):
    """Kernels of a layer's attention: all writes, decodes, and the gathering of prompts' prefixes."""

    store: LatentStore
    decode: DecodeKernel[Any, Attended]
    prefix: ReferenceLatentPrefix | TritonLatentPrefix


def reference_kernels(layer: LatentLayout) -> LatentKernels:
    """Return the kernels of a layer in PyTorch."""
    codec, decode = layer.codec, ReferenceLatents(layer.codec, layer.scale, layer.constant, is_shard=layer.is_shard)
    return LatentKernels(LatentStore(reference_latent_store(codec), decode.kind), decode, ReferenceLatentPrefix(codec))
