"""Machine code of products over latents: next to nothing is spilled, and no product waits for the one before it.

ptxas lets each product of a warpgroup wait for the one before it where registers do not suffice, and says so only with
`-v`: attention over picked rows of 64 heads then took 71 us a layer for 50 (docs/lab/tried.md).
"""

from __future__ import annotations

import re
from pathlib import Path

import machine_code
import pytest
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import latent_launch
from packed_kv.layout import latent_layout, row_layout
from test_copies import BF16, LAYOUTS, nvrtc
from variants import half

KERNEL, SPILLED_BYTES = "latent_decode", 8
"""The kernel, and what it may spill: two registers, of 32 rows with tq3."""


@pytest.mark.parametrize(("name", "rope_bits", "rows_of"), half(LAYOUTS, (16, 8), ("pages", "picks")))
def test_products_do_not_wait(name: str, rope_bits: int, rows_of: str, tmp_path: Path) -> None:
    kind = {"pages": latent_layout, "picks": row_layout}[rows_of]
    for rows in (64, 32):
        variant = latent_launch.LatentVariant(rows, rows, 64, BF16, BF16, True, False)
        constants = latent_launch.constants(kind(FORMATS[name], 512, 64, rope_bits), variant)
        file = tmp_path / "kernel.cubin"
        file.write_bytes(nvrtc.compiled_kernel(constants, latent_launch.LATENT_SOURCE))
        _registers, stack, local = machine_code.resources(file)[KERNEL]
        _, code = machine_code.dump("--dump-sass", file).split(f"Function : {KERNEL}")
        code = code.split("Function : ")[0]
        waits, products = (len(re.findall(rf"\b{word}", code)) for word in (r"WARPGROUP\.DEPBAR", "HGMMA"))
        print(rows, products, waits)
        assert stack <= SPILLED_BYTES and not local and 4 * waits < products, (rows, stack, local, waits, products)
