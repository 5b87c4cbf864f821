"""vLLM's sleep mode on a CPU, where it does nothing: what a GPU would take away is overwritten.

On a GPU, memory that is allocated while the weights are loaded belongs to the pool "weights", and the KV cache to a
pool of its own. Level 1 keeps the first in host memory; level 2 keeps buffers of the model alone. Everything else in a
pool comes back with any content. Here that is 0xFF in every byte: NaN in floating point, -1 in integers.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker


def tensors() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors that Python has, by address; without single int64s, as vLLM's products on the CPU
    keep an address in one."""
    found = {}
    for candidate in gc.get_objects():
        is_tensor = type(candidate) in (torch.Tensor, torch.nn.Parameter) and candidate.device.type == "cpu"
        if is_tensor and (candidate.dtype != torch.int64 or candidate.numel() > 1):
            storage = candidate.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


def spoil(storages: Any) -> None:
    for storage in storages:
        torch.tensor([], dtype=torch.uint8).set_(storage).fill_(0xFF)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install it for engines that this process starts from now on."""
    load_model = CPUWorker.load_model

    def load_and_watch(worker: CPUWorker, **options: Any) -> None:
        gc.unfreeze()  # else tensors of before are not among what `gc` has
        before = tensors()
        load_model(worker, **options)
        worker.pool = {at: storage for at, storage in tensors().items() if at not in before}

    def sleep(worker: CPUWorker, level: int = 1) -> None:
        spoil({kv.untyped_storage().data_ptr(): kv.untyped_storage() for kv in worker.model_runner.kv_caches}.values())
        model, worker.buffers = worker.model_runner.model, {}
        if level == 2:
            worker.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            spoil(worker.pool.values())

    def wake_up(worker: CPUWorker, tags: list[str] | None = None) -> None:
        for name, buffer in worker.model_runner.model.named_buffers():
            if name in worker.buffers:
                buffer.copy_(worker.buffers[name])

    monkeypatch.setattr(CPUWorker, "load_model", load_and_watch)
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", wake_up)
