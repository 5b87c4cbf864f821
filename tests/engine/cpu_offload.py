"""vLLM's offloading on the CPU: its own scheduler side, tiers and copy descriptors, with `memmove` for the GPU's copies.

vLLM makes its worker on GPUs only; what is stood in for here are streams, events and the copy itself.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class DevicePages(torch.Tensor):
    """Pages that say they are on a GPU."""

    is_cuda = True


class Event:
    def __init__(self, **_options: object) -> None: ...

    def record(self, _stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: object) -> float:
        return 1.0


class Stream:
    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...


class CpuTiers(TieringOffloadingSpec):
    """The spec of `--kv-transfer-config` for tests: `copied` lists the bytes of each copy, in all engines."""

    copied: list[list[int]] = []  # noqa: RUF012 -- class-wide on purpose: the engine makes the instances

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            gpu_worker.torch = SimpleNamespace(**{**vars(torch), "Event": Event})
            gpu_worker.current_platform = SimpleNamespace(
                Stream=Stream, current_stream=Stream, stream=contextlib.nullcontext, is_xpu=lambda: False
            )
            gpu_worker._select_swap_blocks_fn = lambda *_args: self._copy
            for one in kv_caches.tensors:
                one.tensor = one.tensor.as_subclass(DevicePages)
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def _copy(self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_options: object) -> None:
        for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        self.copied.append(sizes.tolist())


def connector(root: Any = None, host_bytes: int = 8 << 20, **options: Any) -> dict[str, Any]:
    """`--kv-transfer-config` of an engine with a host tier and, if `root` is given, one on disk below it."""
    tiers = [{"type": "fs", "root_dir": str(root), "n_read_threads": 2, "n_write_threads": 2}] if root else []
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": CpuTiers.__name__,
            "spec_module_path": CpuTiers.__module__,
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": tiers,
            **options,
        },
    }
