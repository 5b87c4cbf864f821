"""`packed-kv plan`: what it recommends and says under its table, and of bad input."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import DEMO_MODEL, REPO
from coverage_models import MODELS
from huggingface_hub import errors
from packed_kv.commands.plan import main
from packed_kv.formats import FORMATS
from packed_kv.model.config_fields import BadInput
from packed_kv.model.shape import bytes_per_token, parse
from packed_kv.planning import config_file, measured
from packed_kv.planning.weights import weights
from shape_8b import SHAPE_8B, rows


@pytest.fixture
def shape_8b(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE_8B))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_recommendation_follows_the_target(shape_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    card = (shape_8b, "--gpu", "h100 80gb", "--context", "32k")
    few, some, many, none = (plan(capsys, *card, "--users", users) for users in ("4", "40", "46", "400"))
    assert few["recommendation"].startswith("bf16: ")
    assert some["recommendation"].startswith("tq4, calibrated: ")
    assert many["recommendation"].startswith("turboquant35, calibrated: ")
    assert none["recommendation"].startswith("none: turboquant25 holds the most")
    held = {row["dtype"]: row["requests"] for row in many["dtypes"]}
    assert held["tq4"] < 46 <= held["turboquant35"]
    assert plan(capsys, *card)["recommendation"].startswith("turboquant35, calibrated: the most requests")


def test_bf16_suffices_where_it_holds_what_vllm_serves_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --users; 256 requests, on a card of 70 GiB and more 1,024."""
    for card, at_once in (["--gpu", "L4"], "256"), (["--gpu", "H100"], "1,024"), (["--gpu", "A100"], "256"):
        found = plan(capsys, str(DEMO_MODEL), *card)
        held = next(row["requests"] for row in found["dtypes"] if row["dtype"] == "bf16")
        assert found["recommendation"] == (
            f"bf16: it suffices, as it holds {held:,} requests of 2,048 tokens, and vLLM serves {at_once} at once "
            "(--max-num-seqs; if you serve more, give --users)."
        )
    assert "it suffices" not in plan(capsys, str(DEMO_MODEL), "--kv-cache-memory", "100MB")["recommendation"]


def test_the_hub_that_does_not_answer_is_one_line_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library would try six times, waiting in between, with two lines each."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    started = time.monotonic()
    assert main(["nobody/nothing", "--gpu", "H200"]) == 2
    assert time.monotonic() - started < config_file.PATIENCE + 5
    error = capfd.readouterr().err
    assert error.endswith("(it does not answer); give the folder of a model, or its config.json\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GatedRepoError", "(who reads it must have accepted its terms there, and run: hf auth login)"),
        ("RepositoryNotFoundError", "(there is none, or it is private; then run: hf auth login)"),
    ],
)
def test_models_that_the_hub_does_not_give(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(*_args: object, **_options: object) -> None:
        response = SimpleNamespace(headers={}, request=None)
        raise getattr(errors, name)("401 Client Error. (Request ID: 1)", response=response)

    monkeypatch.setattr(config_file, "_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert main(["nobody/nothing", "--gpu", "H200"]) == 2
    assert f"{said}; give the folder of a model" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError("Too Many Requests"), ValueError("no"), errors.EntryNotFoundError("no")])
def test_an_optional_file_that_the_hub_does_not_give(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is asked once whether it answers."""
    probes: list[None] = []

    def download(name: str, file: str, local_files_only: bool) -> str:
        assert name == "some/model" and not local_files_only
        if file != "config.json":
            raise error
        return str(DEMO_MODEL / file)

    monkeypatch.setattr(config_file, "_answers", lambda: not probes.append(None))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    config, _ = config_file.load("some/model")
    assert config["model_type"] and "quantization_config" not in config and len(probes) == 1


def test_arguments_change_what_they_say(shape_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    card = (shape_8b, "--gpu", "L40S", "--context", "8k", "--users", "8")

    def of(dtype: str, *more: str) -> dict:
        return next(row for row in plan(capsys, *card, *more)["dtypes"] if row["dtype"] == dtype)

    plain = of("tq4")
    assert of("tq4", "--weights", "fp8")["requests"] > plain["requests"]
    assert of("tq4", "--recent-tokens", "0")["kv_tokens"] > plain["kv_tokens"]
    assert of("tq4", "--recent-tokens", "0")["kl"] > plain["kl"]
    assert of("tq4", "--skip-layers", "0", "1")["bytes_per_token"] == plain["bytes_per_token"] + 2 * (4096 - 1088)
    assert of("tq4", "--skip-layers", "0", "1")["recent_tokens"] == 64
    assert of("tq4", "--tensor-parallel", "2")["bytes_per_token"] == plain["bytes_per_token"] // 2
    assert of("tq4", "--tensor-parallel", "2")["step_ms"] < plain["step_ms"]
    assert of("bf16", "--kv-cache-memory", "10GB")["kv_tokens"] == int(10e9 // (16 * 147456)) * 16


@pytest.mark.parametrize(("context", "recent"), [("32", 64), ("4k", 4096)])
def test_a_window_is_bound_by_what_the_engine_serves(context: str, recent: int, capsys) -> None:
    """By the model's 2,048 tokens or a longer context, not by a request's tokens, of which the window has no more."""
    found = plan(capsys, str(DEMO_MODEL), "--gpu", "H200", "--context", context, "--recent-tokens", str(recent))
    (held,) = {row["recent_tokens"] for row in found["dtypes"] if row["dtype"] in FORMATS}
    assert held == min(recent, found["context"])


def test_drafts_have_states_and_places_in_the_window(shape_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    hybrid = (str(REPO / "benchmarks" / "shapes" / "qwen3.8-27b"), "--gpu", "H100", "--weights", "int4")
    for model, drafts, said in ((hybrid, "3", "a request has 5 states"), ((shape_8b, "--gpu", "H100"), "8", "drafts")):
        without, found = plan(capsys, *model), plan(capsys, *model, "--drafts", drafts)
        tokens = [{row["dtype"]: row["kv_tokens"] for row in one["dtypes"]} for one in (without, found)]
        assert tokens[1]["tq4"] < tokens[0]["tq4"]
        assert (tokens[1]["bf16"] < tokens[0]["bf16"]) == (model is hybrid), "which has no window"
        assert any(said in line for line in found["assumed"])
        assert any("layers of the model that drafts" in line for line in found["assumed"])
        assert not any("that drafts" in line for line in without["assumed"])


def test_what_was_assumed_stands_under_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DEMO_MODEL), "--gpu", "L4"]) == 0
    text = capsys.readouterr().out
    for said in (
        "--context 2,048 assumed",
        "3 GiB assumed",
        "0.92 of 22.5 GiB",
        "by the config",
        "on L4: not measured",
    ):
        assert said in text
    for more, said in ([], "within 9 % of those measured"), (["--bandwidth", "2"], "on H100: not measured"):
        assert main([str(DEMO_MODEL), "--gpu", "H100", *more]) == 0
        assert said in capsys.readouterr().out
    assert main([str(DEMO_MODEL), "--gpu-memory", "24GiB", "--context", "1k"]) == 0
    text = capsys.readouterr().out
    assert "--context" not in text
    assert "no step: the bandwidth of the card is not known (--bandwidth)" in text


def test_skipped_layers_that_would_blow_up_the_pages_are_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Gemma3ForCausalLM"]))
    assert main([str(tmp_path), "--gpu", "L4", "--skip-layers", "0"]) == 0
    text = capsys.readouterr().out
    said = "isoquant4, planarquant4, tq4 would not start: a packed --kv-cache-dtype cannot serve these skipped layers: "
    assert f"{said}--kv-cache-dtype-skip-layers 0" in " ".join(text.split())
    assert "layers of several kinds share pages of one size" in " ".join(text.split())


GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "vocab_size": 154880, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 202752,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def test_latent_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same vector on each rank; a ring of ten blocks of eight tokens; the KL of a model with latents, and no step
    that was measured on other models."""
    (tmp_path / "config.json").write_text(json.dumps(GLM_4_7_FLASH))
    command = [str(tmp_path), "--gpu", "H200", "--tensor-parallel", "2", "--context", "8k"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = {row["dtype"]: row for row in plan["dtypes"]}
    sizes = {"bf16": 1152, "fp8": 576, "tq4": 400, "tq3": 336, "turboquant35": 352, "turboquant25": 288}
    assert {name: found[name]["bytes_per_token"] for name in sizes} == {name: 47 * n for name, n in sizes.items()}
    packed = found["tq4"]["kv_tokens"] * (8192 // 16 + 10) / (8192 // 16)
    assert packed == pytest.approx(2.88 * found["bf16"]["kv_tokens"], rel=2e-3)
    assert {row["step_ms"] for row in found.values()} == {None}
    assert all(row["recent_tokens"] == 64 * (name in FORMATS) for name, row in found.items())
    assert (found["tq4"]["kl"], found["tq4"]["kl_uncalibrated"], found["fp8"]["kl"]) == (0.06, 0.08, 1)
    assert plan["recommendation"].startswith("turboquant25, calibrated: the most requests of 8,192 tokens")
    assert any("mla-demo, a small model" in line for line in plan["assumed"])
    assert main([*command, "--json", "--latent-rope-bits", "8", "--recent-tokens", "0"]) == 0
    plan = json.loads(capsys.readouterr().out)
    of_8 = {row["dtype"]: row for row in plan["dtypes"]}
    assert of_8["tq4"]["bytes_per_token"] == 47 * 338 and of_8["tq4"]["kl"] == 0.26
    assert of_8["tq4"]["kv_tokens"] == pytest.approx(3.41 * of_8["bf16"]["kv_tokens"], rel=1e-3)
    assert of_8["bf16"] == found["bf16"]
    assert any("64 of RoPE at 8 bits" in line for line in plan["assumed"])
    assert main([*command, "--skip-layers", "0"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "?" not in text
    assert "47 layers of latents of 512 channels and 64 of RoPE" in text
    assert "a packed dtype keeps 0.20 GiB of folded weights per card" in text
    assert "cannot serve latent attention (MLA) with skipped layers: 0, whose" in text


def test_kl_of_latents_is_that_of_the_rows() -> None:
    """In units of fp8's, which no file changes."""
    for file, window in (("latent_quality.csv", ""), ("latent_window.csv", "-window64")):
        found = {(row["coding"], row["calibrated"]): float(row["kl"]) for row in rows(file)}
        for bits, rope in ((16, ""), (8, "-rope8")):
            for calibrated, state in ((True, "yes"), (False, "no")):
                known = partial(measured.kl, has_window=bool(window), calibrated=calibrated, rope_bits=bits)
                for dtype in FORMATS:
                    assert (dtype + window + rope, state) in found, f"no row of {dtype}: quality/latent_quality.py"
                    expected = round(found[dtype + window + rope, state] / found["fp8", "yes"], 2)
                    assert known(dtype) == expected, (dtype, window, bits, state)
                assert (known("fp8"), known("bf16")) == (1, 0)


def test_bits_of_rope_need_latents(shape_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shape_8b, "--gpu", "H200", "--latent-rope-bits", "8"]) == 2
    assert "has no latent attention (MLA), and so no RoPE channels of 8 bits" in capsys.readouterr().err


BAD_CONFIGS = {
    "no attention": ({**SHAPE_8B, "model_type": "mamba2"}, "has no attention layers"),
    "not a model": ({"a": 1}, "has no attention that its config describes"),
    "MLA": (
        {**SHAPE_8B, "kv_lora_rank": 512},
        "cannot serve latent attention (MLA) of this size: 512 channels and 0",
    ),
    "encoder": ({**SHAPE_8B, "is_encoder_decoder": True}, "cannot serve encoders: encoder_decoder attention"),
    "head size": (
        {**SHAPE_8B, "head_dim": 72},
        "cannot serve this head size: 72 channels, and packed pages need",
    ),
    "K and V": ({**SHAPE_8B, "v_head_dim": 192}, "cannot serve this head size of V: V of 192 channels with K of 128"),
    "size of V": (
        {**SHAPE_8B, "v_head_dim": 72},
        "V of 72 channels with K of 128; V may have",
    ),
    "Falcon": ({**SHAPE_8B, "architectures": ["FalconForCausalLM"]}, "FalconForCausalLM, whose pages would stay dense"),
    "kinds": ({**SHAPE_8B, "layer_types": ["full_attention"]}, "layer_types has 1 entries, but the model has 36"),
    "kind": ({**SHAPE_8B, "layer_types": ["odd"] * 36}, "layers of the kind odd are not known"),
    "picks": ({**SHAPE_8B, "layer_types": ["sparse"] * 36}, "layers of the kind sparse are not known"),
    "state": ({**SHAPE_8B, "layer_types": ["mamba", "attention"] * 18}, "whose size is not known"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_cannot_be_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said = BAD_CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([str(tmp_path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("packed-kv plan: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("/no/such/model", "--gpu", "H200"),
            "/no/such/model is neither a folder nor a file; give the folder of a model",
        ),
        (
            ("nobody/nothing", "--gpu", "H200"),
            "nobody/nothing is neither a folder nor a file, and its config.json cannot be fetched",
        ),
        ((str(DEMO_MODEL),), "no card is named; give --gpu NAME (one of B300, B200"),
        (("{falcon}",), "cannot serve models that do not pass cache_config to their attention layers"),
        ((str(DEMO_MODEL), "--gpu", "H300"), "--gpu H300 is not known; known: B300, B200"),
        (
            ("{8b}", "--gpu", "L4", "--weights", "30GiB"),
            "30.0 GiB of weights per card (as given) and 3 GiB for the rest",
        ),
        (("{8b}", "--gpu-memory", "12GiB"), "give a larger --gpu, --tensor-parallel N or --weights fp8"),
        (("{8b}", "--gpu", "H200", "--tensor-parallel", "5"), "--tensor-parallel 5 does not divide the 32"),
        (("{8b}", "--gpu", "H200", "--skip-layers", "40"), "--skip-layers 40: no attention layer of"),
        (
            ("{8b}", "--gpu", "H200", "--context", "1k", "--recent-tokens", "65537"),
            "--recent-tokens 65,537 is more than the model's context of 65,536 tokens; give 0 to 65,536",
        ),
        (
            ("{mistral}", "--gpu", "H200", "--recent-tokens", "4097"),
            "--recent-tokens 4,097 is more than the sliding window of 4,096 tokens; give 0 to 4,096",
        ),
        (("{8b}", "--gpu", "H200", "--skip-layers", "0,1"), "expected a whole number, got '0,1'"),
        (("{8b}", "--gpu", "H200", "--skip-layers", "model.layers.0"), "a whole number, got 'model.layers.0'"),
        (
            ("{8b}", "--gpu", "H200", "--gpu-memory-utilization", "2"),
            "--gpu-memory-utilization 2 must be between 0 and 1",
        ),
        (("{8b}", "--gpu", "H200", "--context", "long"), "expected a number of tokens, such as 32k, got 'long'"),
        (("{8b}", "--gpu-memory", "80 bananas"), "expected a size, such as 80GiB, got '80 bananas'"),
        (("{8b}", "--gpu-memory", "80"), "expected a size of 1MiB or more, such as 80GiB, got '80': 80 bytes"),
        (("{8b}", "--gpu", "H200", "--kv-cache-memory", "20"), "1MiB or more, such as 80GiB, got '20': 20 bytes"),
        (
            ("{8b}", "--gpu", "L4", "--kv-cache-memory", "80GiB"),
            "--kv-cache-memory 80.0 GiB is more than the card's 22.5 GiB; give what one card has",
        ),
        (("{8b}", "--gpu", "H200", "--users", "0"), "expected a whole number of at least 1, got '0'"),
        (("{8b}", "--gpu", "H200", "--weights", "fp7"), "expected a size, such as 80GiB, got 'fp7'"),
    ],
)
def test_bad_input_is_one_line(
    arguments, said: str, shape_8b: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be served is refused before what else is missing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    falcon = {**json.loads((DEMO_MODEL / "config.json").read_text()), "architectures": ["FalconForCausalLM"]}
    paths = {"8b": shape_8b, "falcon": str(tmp_path / "falcon.json"), "mistral": str(tmp_path / "mistral.json")}
    for name, config in (("falcon", falcon), ("mistral", {**SHAPE_8B, "sliding_window": 4096})):
        Path(paths[name]).write_text(json.dumps(config))
    try:
        code = main([argument.format(**paths) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("packed-kv plan: ") and error.count("\n") == 1


def test_kv_heads_that_ranks_do_not_share() -> None:
    """Llama-3.2-3B on three cards: vLLM asserts that one number divides the other."""
    config = {**SHAPE_8B, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}
    with pytest.raises(BadInput, match="--tensor-parallel 3 neither divides the 8 KV heads of 3B nor is a multiple"):
        parse(config, "3B", ranks=3)
    assert {layer.kv_heads for layer in parse({**config, "num_key_value_heads": 4}, "3B", ranks=8).layers} == {1}


def test_a_config_in_float32_is_served_in_bf16() -> None:
    plain, wide = ({**SHAPE_8B, "torch_dtype": dtype} for dtype in ("bfloat16", "float32"))
    bf16, found = parse(plain, "8B"), parse(wide, "8B")
    assert [bytes_per_token([(layer, "bf16") for layer in model.layers]) for model in (found, bf16)] == [147456] * 2
    assert weights(found, None, None).total == weights(bf16, None, None).total


def test_an_empty_list_of_layers_without_rope_is_the_default() -> None:
    """As in Llama 4 Scout's config: every fourth layer has no RoPE and attends to everything."""
    config = {**SHAPE_8B, "attention_chunk_size": 8192, "no_rope_layers": []}
    kinds = [layer.kind for layer in parse(config, "Scout").layers]
    assert kinds == ["full" if (number + 1) % 4 == 0 else "chunked" for number in range(36)]
