"""Costs of dtypes by `packed-kv plan`. `tests/test_measured.py` holds the figures to the rows."""

from __future__ import annotations

from packed_kv.formats import FORMATS
from packed_kv.planning import measured


def test_every_dtype_has_its_figures() -> None:
    for has_window in (True, False):
        for calibrated in (True, False):
            for rope_bits in (None, 16, 8):
                found = {dtype: measured.kl(dtype, has_window, calibrated, rope_bits) for dtype in FORMATS}
                lacking = [dtype for dtype, kl in found.items() if kl is None or kl <= 0]
                assert not lacking, f"no figures of {lacking}: CONTRIBUTING.md says what to measure"
                assert measured.kl("bf16", has_window, calibrated, rope_bits) == 0


def test_recall_was_measured_with_a_window_and_of_keys_and_values() -> None:
    assert measured.recall("tq4", True, True) == 93
    assert measured.recall("tq4", False, True) is measured.recall("tq4", True, True, 16) is None
    assert measured.recall("fp8", False, True) == 100
