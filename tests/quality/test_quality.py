"""The quality harness in real engines: the dtypes pass it, placebos and noise do not, and it scores what is stored."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from fake_codecs import NoiseCodec, register_format, register_null_format
from harness import engine, mean_kl, model_of, teacher_forced_logits
from packed_kv.attention import cpu, impl
from packed_kv.attention.store import reference_pair_store
from packed_kv.formats import FORMATS, Format
from packed_kv_quality import run as commands
from packed_kv_quality.cli import main
from packed_kv_quality.engines import CHECKOUT, attention_layers

DEMO = ("--context", "640")
"""The first third of the text that the bounds of the demo model were measured with."""
GENERAL = ("--windows", "2", "--context", "300")
"""A text that they do not hold for."""
BOUNDS = [pytest.param(DEMO, id="demo_bounds"), pytest.param(GENERAL, id="general_bounds")]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness starts each engine in a process of its own; here, engines run with what a test has patched."""
    monkeypatch.setattr(commands, "apart", lambda function, *arguments: function(*arguments))


Sweep = Callable[..., tuple[int, dict]]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Runs the command: exit code, and what it wrote."""

    def run(*arguments: str) -> tuple[int, dict]:
        code = main(["sweep", "--no-plots", *arguments, "--output", str(tmp_path)])
        return code, json.loads((tmp_path / "quality.json").read_text())

    return run


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """Arguments -> file with the baseline of a run with them."""
    folder, files = tmp_path_factory.mktemp("baselines"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "apart", lambda function, *arguments: function(*arguments))
        for name, arguments in {"demo": DEMO, "general": GENERAL}.items():
            files[arguments] = str(folder / name)
            emit = ("--dtypes", "--emit", files[arguments], "--output", str(folder))
            assert main(["sweep", "--no-plots", *arguments, *emit]) == 0
    return files


def test_all_dtypes_pass(sweep: Sweep, baselines: dict) -> None:
    code, found = sweep("--baseline", baselines[DEMO], *DEMO)
    assert {dtype: verdict["text"] for dtype, verdict in found["verdicts"].items()} == dict.fromkeys(FORMATS, "ok")
    assert code == 0
    baseline, storage, *rows = found["rows"]
    assert storage["dtype"] == "fp8-storage"
    assert 3 * found["limits"]["rounding"] < storage["scores"]["kl_mean"] < 0.02
    for row in rows:
        expected = FORMATS[row["dtype"]].compression(128)
        assert baseline["kv_tokens"] / row["kv_tokens"] == pytest.approx(1 / expected, rel=0.02)
        assert baseline["bytes_per_token"] / row["bytes_per_token"] == pytest.approx(expected)


@pytest.mark.parametrize("arguments", BOUNDS)
def test_a_codec_that_returns_its_input_fails(
    arguments: tuple[str, ...], sweep: Sweep, baselines: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also proves that store, paging and attention add nothing but rounding."""
    register_null_format(monkeypatch, "null_bf16")
    code, found = sweep("--dtypes", "null_bf16", "--baseline", baselines[arguments], *arguments)
    assert code == 1
    assert found["verdicts"]["null_bf16"]["text"].startswith("IDENTICAL")
    kl, rounding = found["rows"][2]["scores"]["kl_mean"], found["limits"]["rounding"]
    print(f"KL {kl:.6f}, rounding {rounding:.6f}")
    assert 0 < kl < 1.5 * rounding


@pytest.mark.parametrize("arguments", BOUNDS)
def test_a_codec_of_noise_fails(
    arguments: tuple[str, ...], sweep: Sweep, baselines: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name of the dtype with the loosest bound, and with nothing beside it."""
    monkeypatch.setattr(impl, "PagedCodec", NoiseCodec)
    # Kernels in C++ do not ask the codec.
    in_pytorch = lambda _fmt, layer, _engine: (reference_pair_store(layer.codec), None, None)  # noqa: E731
    monkeypatch.setattr(cpu, "find_kernels", in_pytorch)
    code, found = sweep("--dtypes", "turboquant25", "--baseline", baselines[arguments], *arguments)
    assert code == 1
    assert found["verdicts"]["turboquant25"]["text"].startswith("TOO FAR")


def test_a_second_name_of_a_dtype_fails_and_plots_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_format(monkeypatch, Format("isoquant4_again", rotation="quaternion", bits=4))
    names = ["isoquant4", "isoquant4_again"]
    recall = ("--lengths", "100", "200", "--depths", "0", "100", "--facts", "1")
    no_window = ("--additional-config", '{"packed_kv": {"recent_tokens": 0}}')
    code = main(["run", "--dtypes", *names, *no_window, *GENERAL, *recall, "--output", str(tmp_path)])
    assert code == 1
    found = json.loads((tmp_path / "quality.json").read_text())
    verdicts = [found["verdicts"][name]["text"] for name in names]
    assert verdicts == ["EQUAL to isoquant4_again", "EQUAL to isoquant4"]
    with (tmp_path / "quality.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["dtype"] for row in rows] == ["auto", "fp8-storage", *names]
    assert float(rows[0]["recall"]) == 1
    assert [row["kv_bytes_per_token"] for row in rows] == ["6144", "3072", *["1632"] * 2]
    for plot in ("pareto.png", "recall.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")


def test_a_dtype_that_the_model_cannot_have_is_refused_with_the_reason(
    sweep: Sweep, demo_model: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    tiny_models.save(transformers.BloomConfig(vocab_size=4096, hidden_size=128, n_layer=2, n_head=2), model)
    for path in Path(demo_model).glob("tokenizer*"):
        shutil.copy(path, model)
    code, found = sweep("--model", str(model), "--kv-cache-memory", "16M", "--dtypes", "tq4", *GENERAL)
    assert code == 1
    assert "cannot serve ALiBi" in found["refused"]["tq4"]


@pytest.mark.parametrize(("name", "chunk"), [("isoquant4", 32), ("isoquant4", 1), ("turboquant25", 32)])
def test_scored_positions_read_their_prefix_from_the_pages(name: str, chunk: int, demo_model: str) -> None:
    """Zero the pages of the first 32 tokens after these have run: every later position must feel it, and lose more
    than the code cost."""
    with engine(demo_model, "auto") as llm:
        token_ids = llm.get_tokenizer().encode(quality_text())[:64]
        bf16 = teacher_forced_logits(llm, token_ids, 32)
    with engine(demo_model, name, additional_config={"packed_kv": {"recent_tokens": 0}}) as llm:
        intact = teacher_forced_logits(llm, token_ids, chunk)
        seen = 0

        def zero_pages(_module: torch.nn.Module, _arguments: object, output: torch.Tensor) -> None:
            nonlocal seen
            seen += len(output)
            if seen == 32:
                for layer in attention_layers(llm):
                    assert layer.kv_cache.any(), "nothing was stored"
                    layer.kv_cache.zero_()

        hook = model_of(llm).register_forward_hook(zero_pages)
        zeroed = teacher_forced_logits(llm, token_ids, chunk)
        hook.remove()
    first, scored = slice(None, 32), slice(32, None)
    assert torch.equal(zeroed[first], intact[first])
    assert (zeroed[scored] - intact[scored]).abs().amax(-1).min() > 0.1
    lost, cost = mean_kl(intact[scored], zeroed[scored]), mean_kl(bf16[scored], intact[scored])
    print(f"{name}, chunks of {chunk}: KL {lost:.2f} without the pages, {cost:.3f} from the code")
    assert lost > 1.2 * cost


def quality_text() -> str:
    return (CHECKOUT / "LICENSE").read_text()
