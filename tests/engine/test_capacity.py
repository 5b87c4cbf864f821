"""The start-up line: KV tokens are those that the engine counts, the ratio is that to an engine in bf16."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_models
import torch
from checkout import DEMO_MODEL
from harness import HYBRIDS, Start, engine, kv_tokens
from packed_kv.engine import capacity
from packed_kv.formats import FORMATS
from packed_kv.model.config_fields import BadInput
from packed_kv.sharing.fingerprint import fingerprint
from packed_kv_quality.engines import bytes_per_request
from vllm.engine.arg_utils import EngineArgs

ON_CPU = ("GraniteMoeHybridForCausalLM", "JambaForCausalLM")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that are logged of the capacity."""
    found: list[str] = []

    def log(line: str, *values: object, **_options: object) -> None:
        found.append(line % values)

    monkeypatch.setattr(capacity, "logger", SimpleNamespace(info_once=log))
    return found


def check(make_engine: Any, lines: list[str], **options: Any) -> float:
    """Check that the line of tq4 says what its engine and one in bf16 count; returns the ratio."""
    with make_engine("auto", **options) as llm:
        plain = kv_tokens(llm)
    assert not lines
    with make_engine("tq4", **options) as llm:
        tokens = kv_tokens(llm)
        window = bytes_per_request(llm)
        page_format = fingerprint(llm.llm_engine.vllm_config, FORMATS["tq4"])
    (line,) = {line for line in lines if line.startswith("KV cache dtype")}
    found = re.fullmatch(
        r"KV cache dtype tq4: (\d+) bytes per token \(bf16: (\d+)\), ([\d,]+) KV tokens, (\d\.\d\d) x bf16 "
        r"capacity at [\d,]+ tokens per request(?: \(recent window: ([\d,]+) bytes per request\))?, page "
        rf"format {page_format}",
        line,
    )
    assert found, line
    assert int(found[2]) / int(found[1]) == pytest.approx(256 / 68)
    assert int(found[3].replace(",", "")) == tokens
    assert bool(found[5]) == bool(window)
    assert int((found[5] or "0").replace(",", "")) >= window  # vLLM counts whole blocks
    assert float(found[4]) == pytest.approx(tokens / plain, rel=0.01)  # vLLM rounds blocks down
    return tokens / plain


def test_windows_and_rings(lines: list[str], tmp_path: Path) -> None:
    """Layers of several kinds share blocks; the rings of a recent window take theirs from the same pool."""
    options = {"skip_tokenizer_init": True, "max_model_len": 1024, "recent_tokens": None}
    assert check(partial(engine, tiny_models.save(tiny_models.gemma3(), tmp_path)), lines, **options) < 3.5


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_states(architecture: str, lines: list[str], start: Start) -> None:
    """A request keeps states in pages as large as attention's blocks, one of each layer, two with the prefix cache."""
    if not torch.cuda.is_available() and architecture not in ON_CPU:
        pytest.skip("like another on the CPU")
    options = {"enable_prefix_caching": True, "max_model_len": 2048, "max_num_seqs": 8}
    ratio = check(partial(start, architecture), lines, **options)
    if architecture == "Lfm2ForCausalLM":  # its states are small
        assert ratio < 3.8
    else:
        assert ratio < 3.7
        assert any(line.endswith("; --prefix-match-unit 16 allows partial hits") for line in lines)


def test_a_config_whose_pages_cannot_be_counted_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_padding` asks for the pages again when vLLM has made them."""
    count = Mock(side_effect=BadInput("window is -1"))
    monkeypatch.setattr(capacity, "packed_pages", count)
    options = EngineArgs(
        str(DEMO_MODEL), kv_cache_dtype="tq4", skip_tokenizer_init=True, kv_cache_dtype_skip_layers=["0"]
    )
    capacity.check_planned_padding(options.create_engine_config())
    assert count.call_count == 1
