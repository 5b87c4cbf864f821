"""Whatever a config.json holds, `plan` and `doctor` end with a table or with one plain line."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkout import DEMO_MODEL
from coverage_models import MODELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_kv import json_file
from packed_kv.commands import doctor, plan

DEMO = DEMO_MODEL
LLAMA = MODELS["LlamaForCausalLM"]
VALUES = [
    None, True, False, 0, 1, -1, 7, 10**12, 10**30, 1.5, float("nan"), float("inf"), "", "128", "auto", "text\nOK    x",
    "\x1b[31m", "x" * 5000, "\u202e", [], [1], ["a"], [None], [[]], [10**30] * 4, {}, {"a": {}}, {"bits": "four"},
]  # fmt: skip
NAMES = sorted({name for config in MODELS.values() for name in config} | {
    "v_head_dim", "text_config", "sliding_window_pattern", "kv_lora_rank", "attn_config", "moe_layer_freq",
    "quantization_config", "multi_query", "num_kv_shared_layers", "attn_layer_offset", "max_window_layers", "alibi",
    "mamba_expand", "swa_head_dim", "global_head_dim", "intermediate_size_mlp", "vision_config", "per_layer_config",
    "loop_num", "total_ut_steps", "n_recurrent_loops", "H_cycles", "num_layers_per_stack", "block_configs",
})  # fmt: skip


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config of one of the known architectures with up to four fields changed, put in or left out."""
    config = copy.deepcopy(MODELS[draw(st.sampled_from(sorted(MODELS)))])
    for _ in range(draw(st.integers(1, 4))):
        field = draw(st.sampled_from(NAMES + sorted(config)))
        if draw(st.booleans()):
            config[field] = draw(st.sampled_from(VALUES) | st.integers() | st.text(max_size=20))
        else:
            config.pop(field, None)
    return {"text_config": config, "architectures": config.get("architectures")} if draw(st.booleans()) else config


def check_lines(out: str, err: str, code: int) -> None:
    """0 and no error, or 2 and an error of one line; no control characters anywhere."""
    assert (code, err.count("\n")) in ((0, 0), (2, 1)), (code, err)
    assert all(line.isprintable() and len(line) < 1000 for line in (out + err).splitlines())
    assert not any(line.startswith("OK") for line in (out + err).splitlines())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=mutated_configs())
def test_plan(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = plan.main([str(tmp_path), "--gpu", "H200"])
    check_lines(*capsys.readouterr(), code)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=mutated_configs())
def test_doctor(config: dict[str, Any], tmp_path: Path) -> None:
    """The lines that are about the model: they have no control characters, and a bad config is one line."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = list(doctor.findings(doctor.parser().parse_args([str(tmp_path)])))
    assert all(str(finding).isprintable() and len(str(finding)) <= 700 for finding in found)
    assert sum(finding.is_bad_input for finding in found) <= 1


BAD = {
    "a text for a number": ({"sliding_window": "128"}, 'sliding_window is "128"; it must be a whole number'),
    "NaN": ({"head_dim": float("nan")}, "head_dim is NaN; it must be a whole number"),
    "a number for a list": ({"layer_types": 5}, "layer_types is 5; it must be a list of words"),
    "null for a list": ({"full_attn_idxs": None}, "has no attention layers"),
    "too many layers": ({"num_hidden_layers": 10**6}, "has 1,000,000 layers; packed-kv reads configs of at most"),
    "a huge number": ({"num_hidden_layers": 10**12 * 4}, "num_hidden_layers is 4000000000000; it must be"),
    "a forged line": ({"model_type": "x\nOK    all is well\x1b[0m", "hidden_size": 0},
                      r"(x\nOK    all is well\x1b[0m) has no attention"),
    "a list for a name": ({"model_type": ["llama"]}, "model_type is [\"llama\"]; it must be a string"),
    "architectures": ({"architectures": "LlamaForCausalLM"}, 'architectures is "LlamaForCausalLM"; it must be a'),
    "latents": ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": True},
                "qk_nope_head_dim is true; it must be a whole number"),
    "letters of fewer layers": ({"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4,
                                 "hybrid_override_pattern": "0"},
                                "hybrid_override_pattern has 1 letters, but the model has 4 layers"),
    **{kind: ({"model_type": kind}, f"({kind}) is of a type that no vLLM serves that packed-kv supports; give another")
       for kind in ("bamba", "plamo2", "recurrent_gemma")},
    "heads of a list": ({"num_key_value_heads": [2, 2]}, "num_key_value_heads is [2, 2]; it must be"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what `doctor` asks of vLLM, which takes seconds and says nothing of a config."""
    monkeypatch.setattr(doctor, "_vllm", lambda: doctor.Finding(True, "vllm"))
    monkeypatch.setattr(doctor, "_probe", lambda model, folder: {})
    monkeypatch.setattr(
        doctor, "_engine", lambda _found, model: [doctor.Finding(True, f"heads {doctor._heads(model)}")]
    )


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said = BAD[name]
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    assert plan.main([str(tmp_path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert doctor.main([str(tmp_path)]) == 2
    assert sum(said in line for line in capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 200_000, "is not JSON (maximum recursion depth exceeded"),
        ("{", "is not JSON (Expecting property name"),
        ("5", "holds no object"),
        ('{"vocab_size": ' + "1" * 5000 + "}", "is not JSON (Exceeds the limit (4300 digits)"),
        (b"\xff\xfe{", "is not JSON ("),
    ],
    ids=["levels", "no_end", "no_object", "digits", "no_text"],
)
def test_what_is_no_config(content: str | bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert plan.main([str(tmp_path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/config.json {said}" in error and error.count("\n") == 1


def test_a_large_file_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(json_file.LARGEST_FILE + 1)
    assert plan.main([str(tmp_path), "--gpu", "H200"]) == 2
    assert "has 67,108,865 bytes, more than the 67,108,864 that are read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 400 + "b", "a\0b", "", "a\nb", "/" + "y" * 300, "~nobody_here/x"])
def test_a_name_that_is_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([name, "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error[:-1].isprintable() and len(error) < 1000
    assert doctor.main([name]) == 2


def test_an_index_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for content in ("{", "[]", '{"metadata": 5}', '{"metadata": {"total_size": "much"}}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        code = plan.main([str(tmp_path), "--gpu", "H200"])
        check_lines(*capsys.readouterr(), code)
        assert code == (0 if content == "[]" else 2)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    code = "import sys; from packed_kv.commands.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], text=True, check=False, stderr=subprocess.PIPE, **options
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("command", [("plan", str(DEMO), "--gpu", "H200"), ("doctor",)], ids=" ".join)
def test_a_full_disk_is_one_line(command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ended = run(*command, stdout=full)
    assert ended.returncode == 2
    assert ended.stderr == f"packed-kv {command[0]}: the output cannot be written (No space left on device)\n"


@pytest.mark.parametrize("where", ["plan.main", "main.Command.load"])
def test_an_interrupt_is_one_line(where: str) -> None:
    """Also while the command is imported."""
    code = (
        "import sys, time; from packed_kv.commands import main, plan\n"
        f"{where} = lambda *a, **k: (print('begun', flush=True), time.sleep(60))\n"
        "sys.exit(main.main(['plan', 'x']))"
    )
    assert interrupted(code) == (130, "packed-kv plan: interrupted\n")


def test_an_interrupted_selftest_ends() -> None:
    """It does not wait for the time after which a silent process is killed."""
    code = (
        "import subprocess, sys; from packed_kv.commands import main, selftest\n"
        "start = subprocess.Popen\n"
        "selftest.subprocess.Popen = lambda _, **how: (start(['sleep', '60'], **how), print('begun', flush=True))[0]\n"
        "sys.exit(main.main(['selftest']))"
    )
    assert interrupted(code) == (130, "packed-kv selftest: interrupted\n")


def interrupted(code: str) -> tuple[int, str]:
    """Exit code and errors of a process that gets SIGINT once it has printed "begun"."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    return process.returncode, error
