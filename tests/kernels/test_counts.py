"""Counts of Triton's decode kernel for Ampere and Ada: the rows are what is compiled, and what is made of them."""

from __future__ import annotations

import sys

import pytest
from checkout import REPO

sys.path.insert(0, str(REPO / "benchmarks"))
import cards
import triton_counts
from packed_kv.planning.cards import CARDS
from tables import load
from triton_counts import EVERYWHERE, count, pipe_of

ROWS = {
    (row["dtype"], int(row["head_dim"]), int(row["columns"]), row["ring"] == "yes", int(row["sm"])): row
    for row in load(cards.COUNTS)
}


def test_every_variant_has_its_row() -> None:
    counted = {(*variant, sm) for sm in triton_counts.ARCHITECTURES for variant in triton_counts.variants(sm)}
    assert counted == {*ROWS}
    assert {cards.sm_of(CARDS[name]) for name in (*cards.BOUND_ON, *cards.CHECKED_ON)} == {"80", "86", "89", "90"}


@pytest.mark.parametrize("sm", [80, 86, 89], ids="sm_{}".format)
def test_the_rows_are_what_is_compiled(sm: int) -> None:
    """Registers, spills and programs are no worse than their row says, and instructions differ by at most 5 %."""
    for variant, found in zip(EVERYWHERE, count((variant, sm) for variant in EVERYWHERE), strict=True):
        row = {name: int(cell) for name, cell in ROWS[*variant, sm].items() if cell.isdigit()}
        assert found["registers"] <= row["registers"], variant
        assert found["stack_bytes"] <= row["stack_bytes"] and found["spills_in_loop"] <= row["spills_in_loop"], variant
        assert found["programs"] >= row["programs"], variant
        assert found["tile_bytes"] == row["tile_bytes"] and found["tensor"] == row["tensor"], variant
        assert abs(found["instructions"] - row["instructions"]) <= 0.05 * row["instructions"], variant


@pytest.mark.parametrize("key", ROWS)
def test_an_sm_holds_the_programs_that_grids_count_on(key: tuple) -> None:
    row = ROWS[key]
    assert int(row["programs"]) >= int(row["counted_on"])
    assert row["spills_in_loop"] == "0" or int(row["columns"]) > 8 or int(row["head_dim"]) > 128
    assert int(row["instructions"]) >= sum(int(row[pipe]) for pipe in triton_counts.PIPES)


def test_pipes() -> None:
    lines = {
        "PRMT R1, R2, 0x5410, R3 ;": "alu", "@!P0 IADD3 R1, R2, R3, RZ ;": "alu",
        "IMAD.MOV.U32 R1, RZ, RZ, R2 ;": "imad", "MOVM.16.MT88 R1, R2 ;": "memory",
        "@P1 FFMA R1, R2, R3, R4 ;": "fp32", "HFMA2.MMA R1, R2, R3, R4 ;": "half", "MUFU.EX2 R1, R2 ;": "special",
        "HMMA.16816.F32 R1, R2, R3, R4 ;": "tensor", "LDG.E.128 R1, [R2] ;": "memory",
        "F2FP.F16.F32.PACK_AB R1, R2, R3 ;": "alu", "UIADD3 UR4, UR5, 0x1, URZ ;": "", "@P0 BRA `(.L_x_1) ;": "",
    }  # fmt: skip
    assert {line: pipe_of(line) for line in lines} == lines


def test_bytes_a_cycle() -> None:
    found = {name: round(CARDS[name].bytes_per_cycle, 1) for name in ("RTX-3090", "RTX-4090", "A100-80GB")}
    assert found == {"RTX-3090": 6.7, "RTX-4090": 3.1, "A100-80GB": 13.4}


def test_cycles_of_a_tile() -> None:
    """4 schedulers; of the 3090, fp32 at twice the A100's rate, and products at a quarter of its."""
    row = {"instructions": "400", "alu": "200", "imad": "40", "fp32": "80", "half": "40", "special": "8",
           "tensor": "32", "tile_bytes": "4352"}  # fmt: skip
    on_a100, on_3090 = (cards.cycles(row, CARDS[name]) for name in ("A100-80GB", "RTX-3090"))
    assert round(on_a100.pop("memory")) == 325 and round(on_3090.pop("memory")) == 646
    same = {"issue": 100, "integers": 100, "special": 16}
    assert on_a100 == same | {"multiply-adds": 60, "fp16": 10, "tensor cores": 64}
    assert on_3090 == same | {"multiply-adds": 40, "fp16": 20, "tensor cores": 256}
