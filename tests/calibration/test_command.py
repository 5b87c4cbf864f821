"""The command `tq-calibrate`, from its arguments to its files and exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jsonschema
import packed_kv
import pytest
import tiny_models
import torch
import tq_calibrate
from calibration_files import content, write
from checkout import DEMO_MODEL
from packed_kv.calibration_file import FILE_NAME, load
from packed_kv.model.rope import Rope, rope_parameters
from packed_kv.planning import config_file
from tq_calibrate import collect
from tq_calibrate.cli import main
from tq_calibrate.errors import UserError

TOKENS = ("--tokens", "512")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's file, from few tokens."""
    path = tmp_path_factory.mktemp("calibrated") / "demo.json"
    assert main(["model", str(DEMO_MODEL), *TOKENS, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a context of 256 tokens."""
    folder = tmp_path_factory.mktemp("short") / "model"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return folder


def errors(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr. Progress apart, there must be no other."""
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line]
    told = [line for line in lines if not line.startswith(("calibrating", "choosing", "loading"))]
    assert len(told) == 1 and told[0].startswith("tq-calibrate: "), lines
    return told[0]


def test_the_file_follows_the_schema_and_is_read_by_the_runtime(calibrated: Path) -> None:
    file = json.loads(calibrated.read_text())
    schema = json.loads((Path(packed_kv.__file__).parent / "turboquant_kv.schema.json").read_text())
    jsonschema.validate(file, schema)
    calibration = load(calibrated)
    calibration.check_model(layers=6, kv_heads=2, head_size=128)
    assert all(None not in vars(layer).values() for layer in calibration.layers.values())
    assert file["version"] == 4 and file["key_group_bits"] == {"tq3": [4, 3, 3, 2]}
    frequencies = tuple((1 / 1e4 ** (torch.arange(0, 128, 2).float() / 128)).tolist())
    assert {layer.key.rope for layer in calibration.layers.values()} == {Rope(frequencies)}
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert [rope["parameters"] for rope in file["ropes"]] == [*rope_parameters(config).values()]
    assert file["model_name"] == "demo-7m" and file["recipe"] == "turboquant35"
    assert file["calibration"]["num_observed_tokens"] == 512 and file["calibration"]["num_prompts"] == 1
    rms = file["layers"]["model.layers.3.self_attn"]["key_channel_rms"]
    assert [len(head) for head in rms] == [128, 128] and min(map(min, rms)) > 0
    assert calibrated.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_file_lies_in_the_models_folder_and_the_seed_decides_its_text(short_model: Path) -> None:
    hashes = []
    for seed in ("1", "1", "2"):
        assert main(["model", str(short_model), "--tokens", "256", "--seed", seed, "--recipe", "turboquant25"]) == 0
        file = json.loads((short_model / FILE_NAME).read_text())
        hashes.append(file["calibration"]["prompts_sha256"])
        assert file["recipe"] == "turboquant25"
    assert hashes[0] == hashes[1] != hashes[2]
    assert sorted(path.name for path in short_model.rglob("*turboquant*")) == [FILE_NAME]


def test_batches_do_not_matter_and_texts_do(short_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    rows = []
    for options in (["--batch-size", "1"], ["--batch-size", "3"], ["--text", str(text), str(text)]):
        assert main(["model", str(short_model), "--tokens", "600", *options, "--out", str(out)]) == 0
        file = json.loads(out.read_text())
        assert (file["calibration"]["num_prompts"], file["calibration"]["max_seq_len"]) == (3, 256)
        rows.append(file["layers"]["model.layers.0.self_attn"]["key_channel_rms"])
    for one, three in zip(*rows[:2], strict=True):
        assert one == pytest.approx(three, rel=0.01)  # sums in another order, rounded to 3 digits
    assert rows[0] != rows[2]


def test_sequences_are_as_long_as_the_context_says(calibrated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["model", str(DEMO_MODEL), *TOKENS, "--context", "64", "--out", str(out)]) == 0
    short, long = json.loads(out.read_text()), json.loads(calibrated.read_text())
    assert [file["calibration"]["max_seq_len"] for file in (short, long)] == [64, 2048]
    assert [file["calibration"]["num_prompts"] for file in (short, long)] == [8, 1]
    for field in ("key_channel_mean_before_rope", "key_first_token_mean"):
        one, two = (file["layers"]["model.layers.0.self_attn"][field] for file in (short, long))
        assert one != two


@pytest.mark.parametrize(
    ("rope", "reason"),
    [({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "RoPE of the kind dynamic turns keys otherwise")],
)
def test_keys_have_one_mean_where_rope_depends_on_the_context(
    rope: dict, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = bad_model(rope_parameters=rope)(tmp_path)
    assert main([*arguments, *TOKENS, "--out", str(out)]) == 0
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "one mean" in line]
    assert len(lines) == 1 and reason in lines[0] and "contexts of 2,048 tokens" in lines[0]
    assert load(out).ropes == ()
    assert all(layer.key.mean and layer.key.rope is None for layer in load(out).layers.values())


def test_weights_only_finds_no_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["model", str(DEMO_MODEL), "--weights-only", "--out", str(out)]) == 0
    assert "from weights alone, so without means of keys" in capsys.readouterr().out
    calibration = load(out)
    calibration.check_model(layers=6, kv_heads=2, head_size=128)
    for layer in calibration.layers.values():
        assert layer.key.mean is layer.key.first_mean is None and layer.key.scale and layer.value.scale


def test_check_and_show(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(calibrated), "--model", str(DEMO_MODEL)]) == 0
    assert "is sound, and fits" in capsys.readouterr().out
    assert main(["show", str(calibrated)]) == 0
    shown = capsys.readouterr().out
    assert "means of 6 layers turn with RoPE: 64 pairs of channels i, i + 64, wavelengths 6 to 54,410" in shown
    assert "num_observed_tokens: 512" in shown and len(shown.split("\nlayer ")[1].splitlines()) == 7
    other = bad_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})(tmp_path)[1]
    assert main(["check", str(calibrated), "--model", other]) == 2
    assert re.search("made for another RoPE: .*10000.*; this model has .*500000", errors(capsys))
    tiny_models.llama().save_pretrained(tmp_path)
    assert main(["check", str(calibrated), "--model", str(tmp_path)]) == 2
    assert "made for another model: head_size 128, this model has 64" in errors(capsys)


def test_a_file_of_another_tool_is_shown_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = content()
    for entry in file["layers"].values():
        entry |= {"key_channel_rms": None, "value_channel_rms": None}
    path = write(tmp_path, file)
    assert main(["check", str(path)]) == main(["show", str(path)]) == 0
    assert "2 layers, 2 KV heads of 64 channels" in capsys.readouterr().out
    assert main(["report", str(path), "--out", str(tmp_path / "report")]) == 2
    assert "no energies of channels" in errors(capsys)


def test_report(calibrated: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "report"
    assert main(["report", str(calibrated), "--out", str(folder)]) == 0
    page = (folder / "index.html").read_text()
    images = sorted(path.name for path in folder.glob("*.png"))
    assert len(images) == 6 and all(f'src="{image}"' in page for image in images)
    assert all((folder / image).read_bytes().startswith(b"\x89PNG") for image in images)


def test_report_without_matplotlib(
    calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(calibrated), "--out", str(tmp_path)]) == 2
    assert "pip install 'packed-kv[plots]'" in errors(capsys)


def test_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tq_calibrate.run", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["model", str(DEMO_MODEL), "--out", str(tmp_path / "out.json")]) == 2
    assert "transformers is missing" in errors(capsys)


def bad_model(**changes: object) -> Callable[[Path], list[str]]:
    """The demo model with other values in its configuration."""

    def arguments(folder: Path) -> list[str]:
        shutil.copytree(DEMO_MODEL, folder / "model")
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        (folder / "model" / "config.json").write_text(json.dumps(config | changes))
        return ["model", str(folder / "model")]

    return arguments


def without(name: str) -> Callable[[Path], list[str]]:
    """The demo model without files of its own of that name."""

    def arguments(folder: Path) -> list[str]:
        shutil.copytree(DEMO_MODEL, folder / "model", ignore=shutil.ignore_patterns(name))
        return ["model", str(folder / "model")]

    return arguments


def demo(*options: str) -> Callable[[Path], list[str]]:
    return lambda folder: ["model", str(DEMO_MODEL), *(option.replace("FOLDER", str(folder)) for option in options)]


BAD_INPUT: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no model": (lambda folder: ["model", str(folder / "none")], "is not a model that transformers can read"),
    "no Hub": (
        lambda folder: ["model", "org/none"],
        "org/none is neither a folder nor a file, and its config.json cannot",
    ),
    "no config": (without("config.json"), "is not a model that transformers can read"),
    "no tokenizer": (without("tokenizer*"), "has no tokenizer that can be loaded"),
    "no weights": (without("*.safetensors"), "cannot be loaded"),
    "channels in another order": (bad_model(model_type="llama4_text"), "orders the channels of llama4_text's keys"),
    "weights of latents": (
        lambda folder: [*bad_model(model_type="deepseek_v3", kv_lora_rank=64)(folder), "--weights-only"],
        "has latent attention (MLA), whose weights alone say too little",
    ),
    "rank of latents": (
        bad_model(model_type="deepseek_v3", kv_lora_rank=-5),
        "kv_lora_rank is -5; it must be a whole",
    ),
    "expanded latents": (
        bad_model(model_type="minicpm3", kv_lora_rank=64),
        "vLLM expands the latent vectors of minicpm3 to K and V of every head",
    ),
    "no attention": (bad_model(model_type="mamba", num_attention_heads=None), "mamba has no attention"),
    "head size": (bad_model(head_dim=80), "heads of 80 channels cannot be calibrated"),
    "vocabulary": (bad_model(vocab_size=100), "cannot be loaded"),
    "no text": (demo("--text", os.devnull), f"--text {os.devnull} has no text in it"),
    "text is missing": (
        demo("--text", "FOLDER/none", "--text", os.devnull),
        "cannot be read (No such file or directory)",
    ),
    "text is not text": (demo("--text", str(DEMO_MODEL / "model.safetensors")), "is not UTF-8 text"),
    "short text": (demo("--text", str(DEMO_MODEL / "README.md")), "fewer than --tokens 32,768"),
    "tokens beyond memory": (demo("--tokens", "9" * 15), "fewer than --tokens 999,999,999,999,999"),
    "context of the model": (demo("--context", "999999999"), "is more than the 2,048 tokens that"),
    "context of the text": (
        demo("--tokens", "600", "--context", "700"),
        "--context 700 needs at least as many --tokens",
    ),
    "device": (demo("--device", "cuda:99"), "--device cuda:99 is not there"),
    "unknown device": (demo("--device", "abacus"), "--device abacus is not there"),
    "no folder": (demo("--out", "FOLDER/none/file.json"), "cannot be written (No such file or directory)"),
    "out is a folder": (demo("--out", "FOLDER"), "is a folder; name a file"),
    "out is no file": (
        lambda folder: [os.mkfifo(folder / "x"), *demo("--out", "FOLDER/x")(folder)][1:],
        "is not a reg",
    ),
    "no permission": (demo("--out", "/proc/file.json"), "cannot be written"),
    "unsound file": (lambda folder: ["check", str(write(folder, "{}"))], "version null is not supported"),
    "missing file": (lambda folder: ["show", str(folder / "none.json")], "cannot be read"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_told_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD_INPUT[name]
    assert main(arguments(tmp_path)) == 2
    assert message in errors(capsys)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "255"],
        ["--tokens", "9" * 16],
        ["--context", "31"],
        ["--batch-size", "0"],
        ["--seed", "-1"],
        ["--recipe", "tq4"],
    ],
)
def test_numbers_out_of_range(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["model", str(DEMO_MODEL), *arguments])
    assert exit_code.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_what_a_killed_command_left_is_passed_over(tmp_path: Path) -> None:
    """In a container the next command has the same process number."""
    (tmp_path / f".out.json.{os.getpid()}.tmp").touch()
    assert main(["model", str(DEMO_MODEL), *TOKENS, "--out", str(tmp_path / "out.json")]) == 0


def test_a_report_is_checked_before_it_is_drawn(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "index.html")
    assert main(["report", str(calibrated), "--out", str(tmp_path / "fifo")]) == 2
    assert "index.html is not a regular file; name another folder" in errors(capsys)
    assert os.listdir(tmp_path / "fifo") == ["index.html"]
    (tmp_path / "link").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link" / "index.html").symlink_to(tmp_path / "victim")
    assert main(["report", str(calibrated), "--out", str(tmp_path / "link")]) == 0
    assert (tmp_path / "victim").read_text() == "precious"
    assert "<html" in (tmp_path / "link" / "index.html").read_text()


def stop(*_arguments: object) -> None:
    raise KeyboardInterrupt


def fill_disk(_file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("place", "name", "fault", "code", "message"),
    [
        (collect.Collector, "run", stop, 130, "interrupted"),
        (os, "fsync", stop, 130, "interrupted"),
        (os, "fsync", fill_disk, 2, "cannot be written (No space left on device)"),
    ],
)
def test_a_file_that_is_there_is_replaced_as_a_whole_or_left(
    place: object,
    name: str,
    fault: Callable,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "out.json"
    path.write_text("what was there")
    monkeypatch.setattr(place, name, fault)
    assert main(["model", str(DEMO_MODEL), *TOKENS, "--out", str(path)]) == code
    assert message in errors(capsys)
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "what was there"


def test_it_imports_no_torch_before_it_needs_it() -> None:
    code = "import sys, tq_calibrate.cli, tq_calibrate.show; assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_imports_run_one_way() -> None:
    """Two modules of the command import vLLM: the one that runs its engine, when that is asked for, and the one that
    its workers load. packed_kv starts the command, as a program, and imports nothing of it."""
    with_vllm = {"vllm_engine.py", "vllm_worker.py"}
    for package, foreign, allowed in ((tq_calibrate, "vllm", with_vllm), (packed_kv, "tq_calibrate", set())):
        assert allowed < {source.name for source in sources_of(package)}
        importing = {source.name for source in sources_of(package) if imports(source, foreign)}
        assert importing == allowed, importing
    for source in sources_of(tq_calibrate):
        assert not imports(source, r"\.vllm_(engine|worker)", at_top=True), source


def sources_of(package: ModuleType) -> list[Path]:
    return [*Path(package.__file__).parent.rglob("*.py")]


def imports(source: Path, name: str, at_top: bool = False) -> bool:
    """True if a file imports a package or module; `at_top`: outside of functions and of `if TYPE_CHECKING`."""
    indent = "" if at_top else r"\s*"
    return bool(re.search(rf"^{indent}(from|import) {name}\b", source.read_text(), re.MULTILINE))


@pytest.mark.parametrize("arguments", [(), ("--engine", "transformers"), ("--engine", "vllm"), ("--weights-only",)])
def test_heads_of_several_sizes_are_refused_before_anything_runs(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way to make a file says the same."""
    tiny_models.save(tiny_models.gemma4(num_kv_shared_layers=0), tmp_path)
    monkeypatch.setattr("tq_calibrate.run._observe", None)
    monkeypatch.setattr("tq_calibrate.run.estimate", None)
    capsys.readouterr()
    assert main(["model", str(tmp_path), *arguments]) == 2
    heads = "2 KV heads of 64 channels, layer 1: 2 KV heads of 128 channels"
    said = f"layers differ in shape (layer 0: {heads}); a calibration file holds one size; use tq4, which needs no file"
    assert errors(capsys) == f"tq-calibrate: {said}"


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_hub_that_does_not_answer_is_asked_once(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before an engine asks it again and again. A model that has files in the Hub's cache is left to the engine."""
    import tq_calibrate.vllm_engine

    def load_anyway(*_arguments: object, **_options: object) -> None:
        raise UserError("the engine asked")

    monkeypatch.setattr(config_file, "_answers", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", load_anyway)
    monkeypatch.setattr(tq_calibrate.vllm_engine.VllmModel, "_config", load_anyway)
    assert main(["model", "org/name", "--engine", engine]) == 2
    assert "org/name is neither a folder nor a file" in (said := errors(capsys)) and "it does not answer" in said
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "params.json").write_text("{}")
    assert main(["model", "org/name", "--engine", engine]) == 2
    assert "the engine asked" in errors(capsys)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_layers_that_differ_in_number_of_heads_have_a_file(engine: str, tmp_path: Path) -> None:
    special = {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "vocab_size": 4096}
    tiny_models.save(tiny_models.gemma4(num_kv_shared_layers=0, **special), tmp_path)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    out = tmp_path / "file.json"
    assert main(["model", str(tmp_path), *TOKENS, "--engine", engine, "--out", str(out)]) == 0
    assert [layer.kv_heads for layer in load(out).layers.values()] == [2, 1] * 3
