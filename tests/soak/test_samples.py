"""Samples of one request are those of requests alone where docs/reliability.md says so, and not where it says not."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import samples_and_rescoring
from checkout import DEMO_MODEL
from packed_kv_quality.engines import engine

OPTIONS = argparse.Namespace(prompts=1, tokens=24, n=2)


@pytest.mark.parametrize(("name", "is_equal"), [("default", False), ("no prefix cache", True), ("no window", True)])
def test_samples_of_one_request(name: str, is_equal: bool) -> None:
    common: dict[str, Any] = {"dtype": "float32", "block_size": 32, "max_model_len": 1024}
    with engine(str(DEMO_MODEL), "tq4", **common, **samples_and_rescoring.SETTINGS[name]) as llm:
        _, differences = samples_and_rescoring.samples(llm, OPTIONS).split(" | ")
        largest = float(differences.partition(";")[0])
        rescored = float(samples_and_rescoring.rescored(llm, OPTIONS).partition(";")[0])
    assert (largest == 0) is is_equal, differences
    assert rescored > 0  # the answer read packed pages, and its rescoring the keys themselves
