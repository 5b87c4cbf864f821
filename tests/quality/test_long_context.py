"""The experiment reads far keys from the codecs and near ones raw, and its tables name each file."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from statistics import fmean, variance
from types import SimpleNamespace

import long_context
import pytest
import tiny_models
import torch
from calibration_files import content, write
from checkout import DEMO_MODEL
from packed_kv.channel_calibration import ChannelCalibration, LayerCalibration
from packed_kv.layout import MEAN_BLOCK, RECENT_TOKENS
from packed_kv.model.rope import Rope
from packed_kv.transformers import CACHE_ARGUMENT
from torch.testing import assert_close
from tq_calibrate.collect import ATTENTION, Collector
from transformers import AutoModelForCausalLM, DynamicCache

SCORED, LENGTH = 20, 200


@pytest.mark.parametrize("queries", [long_context.QUERIES, 7])
def test_far_tokens_are_read_from_codecs_and_near_ones_as_they_are(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_context, "QUERIES", queries)
    Collector()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_models.llama(), attn_implementation=ATTENTION).eval()
    run, cache = long_context.FarPacked(model), DynamicCache()
    ids = torch.randint(tiny_models.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))

    def with_codecs(ids: torch.Tensor, by: float, near_by: float | None = None) -> torch.Tensor:
        def read_back(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (key, value + by) if near_by is None else (key, value + by, key, value + near_by)

        run.codecs = dict.fromkeys(range(len(cache.layers)), read_back)
        found = run.log_probs(ids, cache, SCORED)
        run.codecs = {}
        return found

    with torch.inference_mode():
        expected = model(ids).logits[0, -SCORED:].log_softmax(-1)
        model.base_model(ids[:, :-SCORED], **{CACHE_ARGUMENT: cache}, use_cache=True)
        assert_close(run.log_probs(ids, cache, SCORED), expected, rtol=1e-4, atol=1e-4)
        assert_close(with_codecs(ids, 0.0), expected, rtol=1e-4, atol=1e-4)
        assert_close(with_codecs(ids, 0.0, 0.0), expected, rtol=1e-4, atol=1e-4)
        assert (with_codecs(ids, 1.0) - expected).abs().max() > 0.1
        assert (with_codecs(ids, 0.0, 1.0) - expected).abs().max() > 0.1
        both = (with_codecs(ids, 1.0, 1.0), with_codecs(ids, 1.0))
        assert (both[0] - both[1]).abs().max() > 0.1, "the window reads what the codec gives for it"
        near, cache = ids[:, :RECENT_TOKENS], DynamicCache()
        model.base_model(near[:, :-SCORED], **{CACHE_ARGUMENT: cache}, use_cache=True)
        assert_close(with_codecs(near, 1.0), model(near).logits[0, -SCORED:].log_softmax(-1), rtol=1e-4, atol=1e-4)
        run.recent = 0
        assert_close(with_codecs(near, 1.0), with_codecs(near, 1.0, 2.0)), "without a window the codec's is read"


def test_rows(tmp_path: Path) -> None:
    """Kinds of text count once each: blocks of a kind are compared among themselves."""
    file = write(tmp_path, content(6, 2, 128, version=2))
    texts = [tmp_path / "first", tmp_path / "second"]
    for text, words in zip(
        texts, ("The quick brown fox jumps over the lazy dog. ", "A cat sat on a mat. "), strict=True
    ):
        text.write_text(words * 100)
    rows = tmp_path / "rows.csv"
    arguments = [str(DEMO_MODEL), "--text", *map(str, texts), "--calibration", str(file), "--files-only"]
    arguments += ["--lengths", "40", "--scored", "30", "--windows", "4", "--dtypes", "tq4", "bf16", "fp8"]
    arguments += [
        "--rows",
        str(rows),
        "--output",
        str(tmp_path / "kl.json"),
        "--beside",
        "cpu=a CPU",
        "commit=1234abcd",
    ]
    long_context.main(arguments)
    with rows.open(newline="") as source:
        found = {row["dtype"]: row for row in csv.DictReader(source)}
    assert [row["bytes"] for row in found.values()] == ["1,632", "6,144", "3,072"]
    assert {row["tokens"] for row in found.values()} == {"240"} and {row["cpu"] for row in found.values()} == {"a CPU"}
    kept = json.loads((tmp_path / "kl.json").read_text())
    for dtype, row in found.items():
        windows = [one["kl"] for one in kept if one["case"]["dtype"] == dtype]
        every = sorted(kl for window in windows for kl in window)
        assert float(row["kl_mean"]) == pytest.approx(fmean(every), abs=1e-6)
        assert every[236] <= float(row["kl_p99"]) <= every[237] and every[238] <= float(row["kl_tail"]) <= every[239]
        means = [fmean(window) for window in windows]
        spread = [variance(means[:4]), variance(means[4:])]
        assert float(row["kl_error"]) == pytest.approx(math.sqrt(sum(spread) / 16), abs=1e-6)
    fp8 = found.pop("fp8")
    assert fp8["kl_share"] == "", "the ratio to fp8's"
    for row in found.values():
        share = float(row["kl_share"])
        assert share * float(fp8["kl_mean"]) == pytest.approx(float(row["kl_mean"]), rel=1e-3, abs=1e-6)
    assert 0 < float(found["bf16"]["kl_mean"]) < 0.1 * float(fp8["kl_mean"])


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, content(6, 2, 128, version=2))
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 100)
    arguments = [
        "--text",
        str(text),
        "--calibration",
        str(file),
        "--lengths",
        "200",
        "300",
        "--dtypes",
        "tq4",
        "fp8",
        "q4_0",
    ]
    arguments += ["--output", str(tmp_path / "kl.json"), "--recent", "64", "0"]
    long_context.main([str(DEMO_MODEL), *arguments])
    _, energy, kl = capsys.readouterr().out.strip().replace("text 0, 300\ntext 0, 200\n", "\n\n").split("\n\n")
    assert energy.split() == ["energy", "left", "from", "0", str(file), energy.split()[-1]]
    lines = [line.replace("no file", "none").split() for line in kl.splitlines()[1:]]
    assert [line[:3] for line in lines] == [
        ["tq4", "none", "64"], ["tq4", "none", "0"], ["tq4", str(file), "64"], ["tq4", str(file), "0"],
        ["fp8", "none", "0"], ["q4_0", "none", "0"],
    ]  # fmt: skip
    near, all_packed, ours, _, fp8, q4_0 = lines
    assert near[7:9] == ["1.00", "1.00"] and float(ours[7]) > 1.5, "random means do harm"
    assert float(all_packed[3]) > float(near[3]) > 0 and fp8[9:] == ["1.00", "1.00"] != near[9:]
    assert float(q4_0[3]) > float(fp8[3]), "fp8 has twice the bits"
    assert all(float(line[5]) > 2 * float(line[3]) for line in lines), "the tail is beyond the mean"
    long_context.main([str(DEMO_MODEL), *arguments])
    again = capsys.readouterr().out.strip()
    assert again == kl.strip(), "nothing is measured twice"
    long_context.main([str(DEMO_MODEL), *arguments, "--files-only", "--calibration", str(file), str(file)])
    titles, *lines = capsys.readouterr().out.strip().splitlines()
    assert "of no file's" not in titles and f"of {file}'s at 300" in titles
    assert [line.split()[7:9] for line in lines[:2]] == [["1.00", "1.00"]] * 2


@pytest.mark.parametrize("dtype", ["tq4", "turboquant25"])
def test_kernels_read_back_what_the_reference_does(dtype: str) -> None:
    """K less the means of two blocks of positions, and of position 0, of a layer of a cache."""
    tokens = MEAN_BLOCK + 37
    vectors = torch.randn(4, tokens, 3, 64, generator=torch.Generator().manual_seed(1))
    rope = Rope(tuple((1e4 ** (-torch.arange(32) / 32)).tolist()), interleaved=False)
    mean, first = vectors[2:, 0].tolist()
    key = ChannelCalibration(list(range(32)), list(range(64)), mean, first, rope=rope)
    layer = LayerCalibration(key, ChannelCalibration(list(range(32)), list(range(64))))
    file = SimpleNamespace(layers=[layer], taken_by=lambda fmt, layer: layer.taken_by(fmt))
    cache = DynamicCache()
    cache.update(*(x.transpose(0, 1)[None] for x in vectors[:2]), 0)
    kernels, reference = (
        long_context.layer_codecs(dtype, cache, tokens, file, codec)[0](*vectors[:2])
        for codec in ("kernels", "reference")
    )
    assert_close(kernels, reference, rtol=1e-6, atol=1e-6)
    assert (kernels[0] - vectors[0]).square().mean() < 0.3


def test_prompts_in_another_dtype_leave_a_cache_in_fp32() -> None:
    Collector()
    model = AutoModelForCausalLM.from_config(tiny_models.llama(), attn_implementation=ATTENTION).eval()
    run = long_context.FarPacked(model.bfloat16())
    cache = long_context.prefill(run.model, list(range(40)))
    assert {x.dtype for layer in cache.layers for x in (layer.keys, layer.values)} == {torch.float32}
    assert cache.get_seq_length() == 40
