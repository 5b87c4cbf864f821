"""A server under many clients for a while: no error, no leak, the tokens that it says alone; and its end with -9."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import exact_products
import pytest
import soak

LOAD = """
    --clients 6 --tokens 240 --seconds 60 --prefix 32 --prompt 40 --answer 64 --samples 2 --sample-answer 12
    --sample-share 0.3 --kill
"""
SERVER = """
    --enforce-eager --dtype float32 --block-size 32 --max-model-len 256 --kv-cache-memory-bytes 550000
    --no-scheduler-reserve-full-isl --additional-config {"packed_kv":{"recent_tokens":0}}
"""
"""9 blocks hold 6 requests that begin with 2 blocks, 1 of them shared, and grow to 4."""


def test_growth_is_that_of_the_medians() -> None:
    readings = [500.0] * 10 + [100.0] * 10 + [1.0] * 70 + [103.0] * 9 + [900.0]
    assert soak.growth(readings) == 3.0
    with pytest.raises(ValueError, match="19 readings of memory: soak longer"):
        soak.growth([1.0] * 19)


def test_what_fails_is_said() -> None:
    well = {
        "errors": 0, "first_errors": [], "alone": 2, "alone_again_the_same": 2, "samples": 5, "samples_parted": 1,
        "host_growth_mib": 1.0, "device_growth_mib": 0.0,
    }  # fmt: skip
    options = Namespace(exact=False, growth=64)
    assert soak.failures(well, options) == []
    assert soak.failures(well, Namespace(exact=True, growth=64)) == ["1 of 5 answers under load were not those alone"]
    bad = {"errors": 1, "first_errors": ["no"], "alone_again_the_same": 1, "device_growth_mib": 65.0}
    assert soak.failures({**well, **bad}, options) == [
        "1 errors, the first: ['no']",
        "alone, 1 of 2 answers were the same afterwards",
        "device memory grew by 65.0 MiB",
    ]


def test_a_soaked_server_says_the_same_and_ends_when_its_engine_is_killed(
    demo_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are in float64 and there is no recent window: else batches round otherwise, and prefixes that are found
    have no ring (docs/reliability.md)."""
    plugin = exact_products.write_plugin(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{plugin}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    out = tmp_path / "soak.json"
    arguments = [demo_model, *LOAD.split(), "--exact", "--out", str(out), "--server-options", " ".join(SERVER.split())]
    code = soak.main(arguments)
    report = json.loads(out.read_text())
    assert code == 0, report
    assert report["samples"] and report["cancelled"] and report["preemptions"] and report["prefix_cache_hits"]
    assert report["tokens"] > 100 and report["requests"] > 6
    killed = report["killed"]
    assert killed["killed"] == 1 and killed["exit_code"] is not None and not killed["healthy_afterwards"]
    assert not killed["processes_left"] and not killed["shared_memory_left"]
