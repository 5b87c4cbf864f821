"""Calls of a program of `jobs.h`, and the memory that its jobs work in."""

from __future__ import annotations

import ctypes

import torch


class Jobs:
    """Functions of one layer's program: `name`, and `name`_workspace_bytes, which says what memory a call needs.

    `arguments`: the structure that both take, with a field `workspace`.
    """

    def __init__(self, library: ctypes.CDLL, name: str, arguments: type[ctypes.Structure]) -> None:
        self.function, self._workspace_bytes = getattr(library, name), getattr(library, f"{name}_workspace_bytes")
        self.function.restype, self._workspace_bytes.restype = None, ctypes.c_int64
        self.function.argtypes = self._workspace_bytes.argtypes = [ctypes.POINTER(arguments)]
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def reserve(self, call: ctypes.Structure) -> int:
        """Return the address, a multiple of 64, of the memory that a call needs. It holds until the next `reserve`."""
        size = self._workspace_bytes(call) + 64
        if self._workspace.shape[0] < size:
            self._workspace = torch.empty(size + size // 4, dtype=torch.uint8)
        return -(-self._workspace.data_ptr() // 64) * 64
