"""Triton 3.6, which PyTorch 2.11 brings, takes the kernels: its language knows less than the one of the pinned Triton.

Where a jitted function is given a field that is a record, for one, its numbers are plain there and no constexprs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import test_compile
import test_compile_latent
from compiling import Case, translate_kernels
from packed_kv import FORMATS

VERSION = "3.6.0"
KEY_BITS = {"tq4": (5, 4, 4, 3), "tq3": (4, 3, 3, 2), "turboquant35": (4, 4, 3, 2)}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "--target", str(folder), f"triton=={VERSION}"], check=True)
    return folder


def test_language(triton: Path) -> None:
    stores = [test_compile.store_case(FORMATS[name], 90, of_file) for name, of_file in test_compile.STORED.items()]
    stores += [
        test_compile.store_case(FORMATS[name], 90, True, query_group=4, key_bits=bits)
        for name, bits in KEY_BITS.items()
    ]
    stores.append(test_compile.store_case(FORMATS["tq4"], 90, True, query_group=4, keeps_first=True))
    decodes = [
        test_compile.decode_case(FORMATS[name], 90, ring_block=8, mean_blocks=mean_blocks)
        for name, mean_blocks in (("tq4", 0), ("turboquant25", 8))
    ]
    decodes.append(test_compile.decode_case(FORMATS["tq4"], 90, key_bits=KEY_BITS["tq4"]))
    decodes.append(test_compile.decode_case(FORMATS["tq4"], 90, ring_block=8, mean_blocks=1, keeps_first=True))
    others = [
        test_compile.merge_case((16, 4), 90, sinks=True, lse=True),
        test_compile.merge_case((16, 4), 90, lse=True, bias_columns=3), test_compile.rotate_query_case(),
        test_compile.unrotate_case(128), test_compile.sinks_case(), test_compile.share_case(),
        test_compile.plan_ring_case(), test_compile.schedule_case(64, True), test_compile.gather_ring_case(),
        test_compile.plan_mixed_case(), test_compile.combine_case(),
    ]  # fmt: skip
    latents = [
        case(FORMATS[name], 90, bits)
        for case in (test_compile_latent.store_case, test_compile_latent.decode_case)
        for name, bits in (("tq4", 16), ("turboquant25", 8))
    ]
    cases: list[Case] = [*stores, *decodes, *others, *latents]
    for case, text in zip(cases, translate_kernels(cases, triton), strict=True):
        assert f"tt.func public @{case.kernel.split(':')[1]}(" in text
