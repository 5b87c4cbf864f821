"""Calls of a program of `jobs.h`, and the memory that its jobs work in.

All layers of a process have one workspace, as they run one after another. A call that finds another thread in it waits:
both would run on the same cores.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, NamedTuple

import torch

from .layer import Layer, function_of

ALIGNMENT = 64


class Largest(NamedTuple):
    """The largest step of a decode: requests, query tokens per request, and tokens per request, cached ones included.
    `has_ring`: whether steps have a ring of recent tokens."""

    requests: int
    query_tokens: int
    tokens: int
    has_ring: bool


class Workspace:
    """Memory for one call at a time, used by the thread that holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address(self, size: int) -> int:
        """Return the address of `size` bytes, a multiple of `ALIGNMENT`; it is valid until a call asks for more."""
        if self._memory.shape[0] < size + ALIGNMENT:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before there is other memory
            # Filled, so that vLLM counts these pages as this process's memory when it sizes the KV cache.
            self._memory = torch.full((size + ALIGNMENT,), 0, dtype=torch.uint8)
        return -(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT


_workspaces: weakref.WeakValueDictionary[str, Workspace] = weakref.WeakValueDictionary()
"""The workspace of this process, kept while any layer uses it."""


class Jobs:
    """The functions of a decode's library: `decode`, `decode_workspace_bytes` (memory that a call needs) and
    `decode_largest_workspace_bytes` (memory that is enough for all calls of an engine).

    `arguments`: the structure that they take.
    """

    def __init__(self, library: ctypes.CDLL, arguments: type[ctypes.Structure]) -> None:
        self._function = function_of(library, "decode", arguments)
        self._bytes, self._largest_bytes = library.decode_workspace_bytes, library.decode_largest_workspace_bytes
        self._function.restype, self._bytes.restype, self._largest_bytes.restype = None, ctypes.c_int64, ctypes.c_int64
        self._bytes.argtypes = [ctypes.POINTER(arguments)]
        self._largest_bytes.argtypes = [ctypes.POINTER(arguments), ctypes.c_int64, ctypes.c_int64]
        self.workspace = _workspaces.setdefault("decodes", Workspace())

    def reserve(self, call: Any, layer: Layer, largest: Largest) -> int:
        """Take the workspace of a layer's largest step, and return its bytes. `call`: the layer's call, with its heads
        and options."""
        call.layer, call.requests, call.threads = ctypes.pointer(layer), largest.requests, torch.get_num_threads()
        call.ring.data = int(largest.has_ring)  # no address is read
        size = self._largest_bytes(call, largest.query_tokens, largest.tokens)
        with self.workspace.lock:
            self.workspace.address(size)
        return size

    def run(self, call: ctypes.Structure) -> None:
        """Call the function in the workspace, which grows where nobody reserved it. The caller has the lock."""
        call.workspace = self.workspace.address(self._bytes(call))
        self._function(call)
