"""Kernels under `--as-capability`: chosen and compiled for an older GPU, and assembled by ptxas for this one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import older_gpu
import pytest
import test_compile
import torch
import triton
from compiling import compile_kernels
from packed_kv.attention import choice
from packed_kv.attention.limits import Limits
from packed_kv.formats import FORMATS
from packed_kv.gpu_generations import generation_of
from packed_kv.kernels.served import Pairs
from packed_kv.kernels.triton.decode import DecodeShape

CAPABILITIES = [(8, 0), (8, 6), (8, 9)]


def test_ptx_of_an_older_gpu_is_assembled_for_hopper() -> None:
    cases = [
        replace(case, made_for=capability)
        for capability in ((8, 0), (8, 9))
        for case in (test_compile.store_case(FORMATS["tq4"], 90, False), test_compile.decode_case(FORMATS["tq4"], 90))
    ]
    for case, kernel in zip(cases, compile_kernels(cases), strict=True):
        major, minor = case.made_for or (9, 0)
        assert f'"cuda:{major}{minor}"' in kernel.ttgir
        assert older_gpu.target_of(kernel.ptx) == f"sm_{major}{minor}"
        assert "code for sm_90a" in kernel.sass


def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device=None: card)
    monkeypatch.setattr("packed_kv.kernels.cuda.missing", lambda *_: None)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_kernels_and_grids_are_chosen_for_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    hopper(monkeypatch)

    def chosen() -> tuple[str, int]:
        device = torch.device("cuda", 0)
        layer = Pairs(FORMATS["tq4"], 128, 4)
        properties: Any = torch.cuda.get_device_properties(device)
        generation = generation_of((properties.major, properties.minor))
        splits = DecodeShape(8, 4, 128).splits(16, 1, properties.multi_processor_count, generation)
        return choice.find_kernel(device, "auto", Limits(1, 8), layer, "GQA").kernel, splits

    assert chosen() == ("CUDA", 16)
    older_gpu.choose_for(monkeypatch, capability)
    assert torch.cuda.get_device_capability() == capability
    assert chosen() == ("Triton", generation_of(capability).resident_blocks(128, 2048) * 132 // (16 * 8))


def test_a_kernel_that_is_not_made_for_it_is_not_loaded(tmp_path: Path) -> None:
    def load(target: str, shared: int) -> None:
        (tmp_path / "k.ptx").write_text(f".version 8.7\n.target {target}\n.address_size 64\n")
        (tmp_path / "k.json").write_text(json.dumps({"shared": shared}))
        files = {name: str(tmp_path / name) for name in ("k.ptx", "k.json")}
        older_gpu.LoadCheck((8, 9))(None, None, "k", files, "")

    load("sm_89", 99 << 10)
    with pytest.raises(AssertionError, match="k: PTX for sm_90a, not sm_89"):
        load("sm_90a", 0)
    with pytest.raises(AssertionError, match="k: 102400 bytes of shared memory, sm_89 has 101376"):
        load("sm_89", 100 << 10)


@triton.jit
def _nothing_kernel(pointer):
    pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_launched_is_made_for_the_capability_that_is_read() -> None:
    found = _nothing_kernel[(1,)](torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    assert older_gpu.target_of(found.asm["ptx"]) == older_gpu.ptx_target(torch.cuda.get_device_capability())
