"""vLLM's offloading on the CPU: its own scheduler side, tiers and copy descriptors; `memmove` for the GPU's copies.

vLLM makes its worker on GPUs only; what is stood in for here are streams, events and the copy itself. A copy is made as
late as a GPU may make it: when vLLM waits for it, or asks behind a step whether it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering import spec as tiering
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

PENDING: list[tuple[int, int, int]] = []
"""Copies that are to be made: target, source, bytes."""


class DevicePages(torch.Tensor):
    """Pages that say they are on a GPU."""

    is_cuda = True


class Event:
    def __init__(self, **_options: object) -> None: ...

    def record(self, _stream: object) -> None: ...

    def synchronize(self) -> None:
        self.query()

    def query(self) -> bool:
        for copy in PENDING:
            ctypes.memmove(*copy)
        PENDING.clear()
        return True

    def elapsed_time(self, _end: object) -> float:
        return 1.0


class Stream:
    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...


def memmove(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_options: object) -> None:
    PENDING.extend(zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True))


class CpuTiers(TieringOffloadingSpec):
    """The spec of `--kv-transfer-config` on the CPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            gpu_worker.torch = SimpleNamespace(**{**vars(torch), "Event": Event})
            gpu_worker.current_platform = SimpleNamespace(
                Stream=Stream, current_stream=Stream, stream=contextlib.nullcontext, is_xpu=lambda: False
            )
            gpu_worker._select_swap_blocks_fn = lambda *_args: memmove
            rank = SimpleNamespace(current_device_index=lambda: self.config.parallel.rank)
            tiering.torch = SimpleNamespace(**{**vars(torch), "accelerator": rank})  # asked before 0.32
            for one in kv_caches.tensors:
                one.tensor = one.tensor.as_subclass(DevicePages)
            self._worker = self.create_worker(kv_caches)
        return self._worker


@contextlib.contextmanager
def count_copies() -> Iterator[dict[str, list[int]]]:
    """Bytes of each copy of the engine in this process: "store" to host memory, "load" from it."""
    group = get_kv_transfer_group()
    copied: dict[str, list[int]] = {"store": [], "load": []}
    for one in getattr(group, "sub_connectors", [group]):
        worker = getattr(getattr(one, "connector_worker", None), "worker", None)  # of the OffloadingConnector alone
        for name, handler in vars(worker).items() if worker else ():
            if isinstance(handler, gpu_worker.SingleDirectionOffloadingHandler):
                handler._swap_blocks_batch = _counted(handler, copied["load" if "load" in name else "store"])
    yield copied


def _counted(handler: Any, copied: list[int]) -> Callable[..., None]:
    copy = handler._swap_blocks_batch

    def counted(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **options: Any) -> None:
        copied.extend(sizes.tolist())
        copy(src, dst, sizes, **options)

    return counted


def connector(root: Any = None, host_bytes: int = 8 << 20, **options: Any) -> dict[str, Any]:
    """`--kv-transfer-config` of an engine with a host tier and, if `root` is given, one on disk below it."""
    spec = TieringOffloadingSpec if torch.cuda.is_available() else CpuTiers
    tiers = [{"type": "fs", "root_dir": str(root), "n_read_threads": 2, "n_write_threads": 2}] if root else []
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": spec.__name__,
            "spec_module_path": spec.__module__,
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": tiers,
            **options,
        },
    }
