"""scripts/architectures/model_coverage.py: what it says of a model, and eight of its architectures on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import model_coverage
import pytest
from checkout import REPO
from coverage_models import MODELS

PAGE = REPO / "docs" / "lab" / "models.md"
RESULTS = REPO / "benchmarks" / "results" / "models.json"
SERVED = {
    "Qwen3NextForCausalLM": {"full", "state (gdn)"},
    "FalconH1ForCausalLM": {"full", "state (mamba2)"},
    "GraniteMoeHybridForCausalLM": {"full", "state (mamba2)"},
    "Lfm2MoeForCausalLM": {"full", "state (short_conv)"},
    "Gemma3nForCausalLM": {"full", "window of 96", "shared caches"},
    "Step3p5ForCausalLM": {"full", "window of 96"},
    "Llama4ForCausalLM": {"full", "chunks of 128"},
}
"""Architecture -> kinds of its layers."""
REFUSED = "BloomForCausalLM"


def test_eight_architectures(tmp_path: Path) -> None:
    """Packed pages hold more, all attention is ours, and what it reads is not as far off as another prefix."""
    out = tmp_path / "models.json"
    arguments = ["--architectures", *SERVED, REFUSED, "--parallel", "2", "--new-tokens", "4", "--out", str(out)]
    rows = model_coverage.measure(model_coverage.parse_arguments(arguments), tmp_path)
    assert json.loads(out.read_text())["rows"] == rows
    found = {row["architecture"]: row for row in rows}
    refused = found.pop(REFUSED)
    assert refused["result"] == "refused"
    assert "cannot serve ALiBi" in refused["reason"]
    assert {name: set(row["auto"]["kinds"]) for name, row in found.items()} == SERVED
    for name, row in found.items():
        auto, packed = row["auto"], row["packed"]
        assert row["result"] == "works", row
        assert "PACKED_KV_TQ4" in packed["backends"]
        assert "CPU_ATTN" not in packed["backends"]
        # Blocks are large beside states, and vLLM counts a ring as a whole one, of which it takes a part.
        has_states = any(kind.startswith("state") for kind in auto["kinds"])
        assert packed["kv_tokens"] > (2.2 if has_states else 2.5) * auto["kv_tokens"], name
        assert 0 < packed["distance"] < 0.5 * auto["other_prefix"], row


DONE = {"done": True}
REFUSAL = "--kv-cache-dtype tq4 cannot serve ALiBi: X, whose scores; use --kv-cache-dtype auto"


@pytest.mark.parametrize(
    ("auto", "packed", "late", "result", "reason"),
    [
        (DONE, DONE, "", "works", None),
        (DONE, DONE | {"heads": ["4/1"], "backends": ["FLASH_ATTN"]}, "", "fails", "no layer is packed"),
        (DONE, DONE | {"heads": ["4/1"], "backends": ["FLASH_ATTN", "PACKED_KV_TQ4"]}, "", "works", None),
        (DONE, {"error": "ValueError", "message": f"1 error\n  {REFUSAL}\nhttps://x"}, "", "refused", REFUSAL),
        (DONE, {"error": "KeyError", "message": "'a'\nb"}, "", "fails", "KeyError: 'a'"),
        (DONE, {"kv_tokens": 1}, "", "crash", "tq4: exit code -11"),
        (DONE, {}, "timeout", "timeout", "tq4: exit code -11"),
        ({"error": "ImportError", "message": "no mamba"}, {}, "", "fails with auto", "ImportError: no mamba"),
        ({}, {}, "", "fails with auto", "auto: exit code -11"),
        ({}, {}, "timeout", "timeout", "auto: exit code -11"),
    ],
)
def test_results(auto: dict, packed: dict, late: str, result: str, reason: str | None) -> None:
    row = model_coverage.row_of("LlamaForCausalLM", "tq4", {"auto": auto, "tq4": packed}, late, "exit code -11")
    assert row["result"] == result
    assert row.get("reason") == reason


def test_page_has_the_results() -> None:
    results = json.loads(RESULTS.read_text())
    assert PAGE.read_text() == model_coverage.with_table(PAGE.read_text(), results)
    assert len(results["rows"]) >= 45
    assert {row["architecture"] for row in results["rows"]} <= set(MODELS)


def test_a_page_is_made_from_results_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert model_coverage.parse_arguments(["--markdown", "PAGE", "--out", "models.json"]).markdown == Path("PAGE")
    with pytest.raises(SystemExit):
        model_coverage.parse_arguments(
            ["--parallel", "12", "--new-tokens", "4", "--out", "models.json", "--markdown", "PAGE"]
        )
    assert "--markdown runs nothing, so that --parallel, --new-tokens would have no effect" in capsys.readouterr().err


def test_rows_of_a_later_run_say_what_they_were_made_with() -> None:
    """Those of other architectures, and the card, stay as they are."""
    results = json.loads(RESULTS.read_text())
    row = next(row for row in results["rows"] if row["architecture"] == "GptOssForCausalLM")
    found = model_coverage.with_rows(
        results, {**results, "commit": "1234abc", "torch": "2.14.0+cu130", "rows": [{**row, "seconds": 1.5}]}
    )
    assert [row for row in found["rows"] if row not in results["rows"]] == [
        {**row, "seconds": 1.5, "commit": "1234abc", "torch": "2.14.0+cu130"}
    ]
    assert len(found["rows"]) == len(results["rows"]) and found["commit"] == results["commit"]
    assert "| works (1234abc, PyTorch 2.14.0) |" in model_coverage.table(found)
