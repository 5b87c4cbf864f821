"""Run kernels on a GPU as an older one has them: chosen for its compute capability, and compiled for it as far as PTX.

ptxas assembles that PTX for the GPU at hand. So tests that pass prove that the instructions are right that an older GPU
is given, in the variants that it takes; not how many programs fit its SMs, nor how fast they are.

    with pytest.MonkeyPatch.context() as patch:
        older_gpu.pretend(patch, (8, 0))
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_kv.gpu_generations import GENERATIONS, generation_of

CAPABILITIES = {"{}.{}".format(*made.capability): made.capability for made in GENERATIONS if made.capability < (9, 0)}
"""By name: PTX for later ones has instructions that only their own generation has."""


def pretend(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Have this process take its GPU for one of an older compute capability, before any kernel is compiled."""
    from triton import knobs
    from triton.runtime import driver

    card = torch.cuda.get_device_capability()
    assert capability < card, f"a GPU of compute capability {card} is not newer than {capability}"
    patch.setattr(driver.active, "get_device_capability", lambda _device=None: card)
    choose_for(patch, capability)
    compile_for(patch, capability)
    knobs.runtime.kernel_load_start_hook.add(LoadCheck(capability))


def choose_for(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Have PyTorch name another compute capability, by which kernels, variants and grids are chosen."""
    read = torch.cuda.get_device_properties
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties(read(device), capability))


class Properties:
    """Properties of a GPU as PyTorch has them, with another compute capability."""

    def __init__(self, card: Any, capability: tuple[int, int]) -> None:
        self.card = card
        self.major, self.minor = capability

    def __getattr__(self, name: str) -> Any:
        return getattr(self.card, name)


def compile_for(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Have Triton make IR and PTX for a compute capability. Its target stays as it is: ptxas assembles for that."""
    from triton import knobs

    patch.setattr(knobs.runtime, "override_arch", "sm{}{}".format(*capability))  # of the IR alone
    patch.setattr(knobs.runtime, "add_stages_inspection_hook", _make_ptx_of_the_ir)


def _make_ptx_of_the_ir(
    backend: Any = None, stages: Any = None, options: Any = None, _language: Any = None, capability: int = 0
) -> tuple[str, str]:
    """Make PTX for the IR's capability, not for the target's. Without arguments, as Triton 3.8 asks: parts of keys."""
    if backend is not None:
        stages["ptx"] = lambda source, metadata: backend.make_ptx(source, metadata, options, capability)
    return "ptx of the ir", "0"


class LoadCheck:
    """Raises where a kernel is loaded, from the cache or not, that is not compiled for a compute capability, or needs
    more shared memory than a block has there."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = ptx_target(capability)
        self.most = generation_of(capability).block_shared_bytes

    def __call__(self, _module: Any, _function: Any, name: str, files: dict[str, str], _hash: str) -> None:
        texts = {Path(file).suffix: Path(path) for file, path in files.items()}
        found, shared = target_of(texts[".ptx"].read_text()), json.loads(texts[".json"].read_text())["shared"]
        assert found == self.target, f"{name}: PTX for {found}, not {self.target}"
        assert shared <= self.most, f"{name}: {shared} bytes of shared memory, {self.target} has {self.most}"


def ptx_target(capability: tuple[int, int]) -> str:
    """Return the target that Triton's PTX for a compute capability names."""
    return "sm_{}{}".format(*capability) + ("a" if capability >= (9, 0) else "")


def target_of(ptx: str) -> str:
    """Return the target that PTX names."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    return target
