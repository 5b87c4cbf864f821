"""The engine takes each layer's and head's channels from the calibration file, or does not start."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from calibration_files import ORDERS, OUTLIERS, content, write
from checkout import DEMO_MODEL
from harness import engine, mean_kl, teacher_forced_logits
from packed_kv.calibration_file import CalibrationError
from packed_kv.channel_calibration import MIXES_NEIGHBOURS, ChannelCalibration, LayerCalibration
from packed_kv.codecs import Codec
from packed_kv.engine import registration
from packed_kv.formats import FORMATS
from packed_kv.layout import MEAN_BLOCK
from packed_kv.model.rope import Rope, rope_parameters
from packed_kv.refusals.facts import Facts
from packed_kv.settings import calibration, self_calibration
from packed_kv.settings.options import OptionError
from tiny_models import true_logits
from transformers import PretrainedConfig
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 64
TOKEN_IDS = torch.randint(tiny_models.VOCAB, (150,), generator=torch.Generator().manual_seed(1)).tolist()
LONG = torch.randint(tiny_models.VOCAB, (MEAN_BLOCK + 40,), generator=torch.Generator().manual_seed(2)).tolist()
"""Over two blocks of positions."""
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_model_len": 2 * MEAN_BLOCK}


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_models.save(tiny_models.llama(), tmp_path_factory.mktemp("plain")))


@pytest.fixture
def model(plain_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may put a file into."""
    return Path(shutil.copytree(plain_model, tmp_path / "model"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of the log about calibration, with their levels."""
    lines: list[str] = []

    def logger(level: str):
        return lambda line, *args, **_scope: lines.append(f"{level}: {line % args}")

    monkeypatch.setattr(
        calibration, "logger", SimpleNamespace(info_once=logger("info"), warning_once=logger("warning"))
    )
    return lines


def start(model: Path, kv_cache_dtype: str, **options: object):
    tokenizer = DEMO_MODEL
    return engine(str(model), kv_cache_dtype, **{**ENGINE, "tokenizer": str(tokenizer), **options})


def logits(model: Path, kv_cache_dtype: str, tokens: list[int] = TOKEN_IDS, **options: object) -> torch.Tensor:
    with start(model, kv_cache_dtype, **options) as llm:
        return teacher_forced_logits(llm, tokens, 37)


def named(path: object) -> dict[str, object]:
    return {"additional_config": {"packed_kv": {"calibration": path}}}


def channels(file: dict, kv_cache_dtype: str, layer: int, role: str) -> dict:
    """Arguments of the codec that a file says."""
    entry, fmt = file["layers"][f"model.layers.{layer}.self_attn"], FORMATS[kv_cache_dtype]
    fields = {}
    if fmt.outlier_bits:
        fields["outliers"] = f"{role}_high_precision_indices"
    elif fmt.rotation in MIXES_NEIGHBOURS:
        fields["channel_order"] = f"{role}_channel_order"
    if role == "key":
        mean = "key_channel_mean_before_rope" if "rope" in entry else "key_channel_mean"
        fields |= {"mean": mean, "first_mean": "key_first_token_mean", "scale": "key_channel_scale"}
    else:
        fields |= {"mean": "value_channel_mean", "first_mean": "value_first_token_mean"}
        fields |= {"scale": "value_channel_scale"} if fmt.outlier_bits else {}
    found = {argument: entry[field] for argument, field in fields.items() if field in entry}
    if role == "key" and "rope" in entry:
        rope = file["ropes"][entry["rope"]]
        found["rope"] = Rope(tuple(rope["frequencies"]), rope["interleaved"])
    return found


def used(kv_cache_dtype: str, means: str | None = "means of keys by position") -> str:
    """Return what the log says of a file."""
    fmt = FORMATS[kv_cache_dtype]
    channels = "outlier channels" if fmt.outlier_bits else "channel orders" if fmt.rotation in MIXES_NEIGHBOURS else ""
    scales = "scales of keys and scales of values" if fmt.outlier_bits else "scales of keys"
    if means is None:
        return channels or "nothing"
    parts = [part for part in (channels, means) if part]
    return ", ".join([*parts, scales]) if fmt.outlier_bits else f"{', '.join(parts)} and {scales}"


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_calibrated_codec(name: str, model: Path, log: list[str]) -> None:
    """Over two blocks of positions."""
    file = content(LAYERS, KV_HEADS, HEAD_DIM, version=3)
    path = write(model, file)
    ours = logits(model, name, tokens=LONG)
    expected = true_logits(str(model), LONG, name, channels=lambda *at: channels(file, name, *at))
    uncalibrated = true_logits(str(model), LONG, name)
    assert mean_kl(expected, ours) < mean_kl(uncalibrated, ours) / 100
    assert {*log} == {f"info: KV cache calibration: {used(name)} for {name} from {path}, made for turboquant35"}


def test_logits_are_those_of_keys_groups_of_other_widths(
    model: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two blocks of positions, of a dtype whose widths the file gives; another dtype keeps its own."""
    plain = content(LAYERS, KV_HEADS, HEAD_DIM, version=3)
    rankings = {name: {"key_channel_ranking": layer["key_channel_order"]} for name, layer in plain["layers"].items()}
    layers = {name: layer | rankings[name] for name, layer in plain["layers"].items()}
    path = write(model, plain | {"version": 4, "key_group_bits": {"tq3": [4, 2]}, "layers": layers})
    ours = logits(model, "tq3", tokens=LONG)
    use = "means of keys by position, scales of keys and 4, 2 bits in groups of keys"
    assert {*log} == {f"info: KV cache calibration: {use} for tq3 from {path}, made for turboquant35"}
    own_widths = true_logits(str(model), LONG, "tq3", channels=lambda *at: channels(plain, "tq3", *at))

    def codec(name: str, head_dim: int, role: str, **given: Any) -> Codec:
        layout_dim, parts = given.pop("layout_dim", None), ChannelCalibration(**given)
        return Codec(FORMATS[name], head_dim, role, parts, layout_dim=layout_dim)

    def ranked(layer: int, role: str) -> dict[str, Any]:
        found = channels(plain, "tq3", layer, role)
        if role == "key":
            ranking = rankings[f"model.layers.{layer}.self_attn"]["key_channel_ranking"]
            found |= {"ranking": ranking, "group_bits": (4, 2)}
        return found

    monkeypatch.setattr(tiny_models, "get_codec", codec)
    expected = true_logits(str(model), LONG, "tq3", channels=ranked)
    print(f"KL {mean_kl(expected, ours):.6f}, to the dtype's own widths {mean_kl(own_widths, ours):.6f}")
    assert mean_kl(expected, ours) < mean_kl(own_widths, ours) / 100


@pytest.mark.parametrize("name", ["tq3", "turboquant35", "isoquant3"])
def test_logits_are_those_of_values_less_their_means(name: str, model: Path, log: list[str]) -> None:
    """Over two blocks of positions. A file of version 3 has no such means, whatever its fields are."""
    plain = content(LAYERS, KV_HEADS, HEAD_DIM, version=3, value_mean=0.3)
    file = plain | {"version": 4}
    path = write(model, file)
    ours = logits(model, name, tokens=LONG)
    use = used(name, "means of keys by position, means of values")
    assert {*log} == {f"info: KV cache calibration: {use} for {name} from {path}, made for turboquant35"}
    expected = true_logits(str(model), LONG, name, channels=lambda *at: channels(file, name, *at))
    others = content(LAYERS, KV_HEADS, HEAD_DIM, version=3)
    whole = true_logits(str(model), LONG, name, channels=lambda *at: channels(others, name, *at))
    print(f"KL {mean_kl(expected, ours):.7f}, to values that are stored whole {mean_kl(whole, ours):.6f}")
    assert mean_kl(expected, ours) < mean_kl(whole, ours) / 100
    write(model, plain)
    assert mean_kl(whole, logits(model, name, tokens=LONG)) < mean_kl(whole, ours) / 100


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_a_file_with_one_mean_is_read(name: str, model: Path, log: list[str]) -> None:
    file = content(LAYERS, KV_HEADS, HEAD_DIM, version=2)
    path = write(model, file)
    ours = logits(model, name)
    expected = true_logits(str(model), TOKEN_IDS, name, channels=lambda *at: channels(file, name, *at))
    assert mean_kl(expected, ours) < mean_kl(true_logits(str(model), TOKEN_IDS, name), ours) / 100
    hint = f"its means of keys are for short contexts, tq-calibrate model {model} makes them for all"
    use = used(name, "means of keys")
    assert {*log} == {f"info: KV cache calibration: {use} for {name} from {path}, made for turboquant35; {hint}"}


@pytest.mark.parametrize("name", FORMATS)
def test_first_channels_in_their_order_are_what_is_taken_without_a_file(name: str, model: Path, log: list[str]) -> None:
    without = logits(model, name)
    missing = f"KV cache calibration: no {model / 'turboquant_kv.json'}; {name}"
    if FORMATS[name].outlier_bits:
        line = (
            f"warning: {missing} gives its extra bits to the first 32 channels of each head. To choose them, run: "
            f"tq-calibrate model {model}"
        )
    else:
        order = ", in the model's order of channels" if FORMATS[name].rotation in MIXES_NEIGHBOURS else ""
        line = f"info: {missing} serves uncalibrated{order}. To lower its error, run: tq-calibrate model {model}"
    assert {*log} == {line}
    path = write(model, content(LAYERS, KV_HEADS, HEAD_DIM, first=True))
    assert torch.equal(logits(model, name), without)
    hint = f"; it has no means of keys, which tq-calibrate model {model} would find"
    use = used(name, means=None)
    assert log[-1] == f"info: KV cache calibration: {use} for {name} from {path}, made for turboquant35{hint}"


def test_a_file_by_name_comes_first(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(model, "not JSON")
    file = content(LAYERS, KV_HEADS, HEAD_DIM)
    other = write(tmp_path, file).rename(tmp_path / "other.json")
    monkeypatch.chdir(tmp_path)
    ours = logits(model, "turboquant25", **named(other.name))
    expected = true_logits(
        str(model), TOKEN_IDS, "turboquant25", channels=lambda *at: channels(file, "turboquant25", *at)
    )
    assert mean_kl(expected, ours) < 1e-4


@pytest.mark.parametrize(
    ("config", "name", "sizes"),
    [
        (tiny_models.gpt_oss(num_local_experts=2), "tq4", (4, 1, 64)),
        (tiny_models.llama(head_dim=80), "turboquant35", (3, 2, 80)),
    ],
    ids=["sinks", "head_dim_80"],
)
def test_means_beside_sinks_and_in_padded_heads(config, name: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    """A sink sees the constant that a mean takes off the scores of all keys. Over two blocks of positions without
    sinks; with them, as far as no tie of codes or experts is rounded otherwise, which changes all tokens behind it."""
    tokens = LONG[:300] if config.model_type == "gpt_oss" else LONG
    model, file = Path(tiny_models.save(config, tmp_path)), content(*sizes, version=3)
    file["ropes"][0]["parameters"] = rope_parameters(config)[""]
    write(model, file)
    ours = logits(model, name, tokens=tokens)
    expected = true_logits(str(model), tokens, name, channels=lambda *at: channels(file, name, *at))
    uncalibrated = true_logits(str(model), tokens, name)
    print(f"KL {mean_kl(expected, ours):.6f}, to no file {mean_kl(uncalibrated, ours):.6f}")
    assert mean_kl(expected, ours) < mean_kl(uncalibrated, ours) / 1000


def test_keys_in_the_recent_window_have_their_means(model: Path) -> None:
    """With a window as long as the text, 8 bits of it are all that is lost, over blocks of positions."""
    write(model, content(LAYERS, KV_HEADS, HEAD_DIM, version=3))
    exact = true_logits(str(model), LONG)
    packed, recent = (mean_kl(exact, logits(model, "tq4", tokens=LONG, recent_tokens=n)) for n in (0, len(LONG)))
    print(f"KL without a window {packed:.6f}, with {recent:.6f}")
    assert recent < packed / 100


def test_layers_that_share_a_cache_read_it_with_the_channels_of_its_layer(tmp_path: Path) -> None:
    model = Path(tiny_models.save(tiny_models.gemma4(global_head_dim=64), tmp_path))
    file = content(4, KV_HEADS, HEAD_DIM)
    write(model, file)
    ours = logits(model, "turboquant25")
    expected = true_logits(
        str(model),
        TOKEN_IDS,
        "turboquant25",
        channels=lambda layer, role: channels(file, "turboquant25", {4: 2, 5: 3}.get(layer, layer), role),
    )
    assert mean_kl(expected, ours) < mean_kl(true_logits(str(model), TOKEN_IDS, "turboquant25"), ours) / 100


def test_a_file_without_orders(model: Path, log: list[str]) -> None:
    file = content(LAYERS, KV_HEADS, HEAD_DIM)
    for entry in file["layers"].values():
        for field in ORDERS:
            del entry[field]
    without = logits(model, "isoquant3")
    write(model, file)
    assert torch.equal(logits(model, "isoquant3"), without)
    assert "info: KV cache calibration: nothing for isoquant3" in log[-1]


@pytest.mark.parametrize("config", [tiny_models.llama(head_dim=32), tiny_models.gemma4()], ids=["32", "two sizes"])
def test_heads_that_cannot_be_calibrated_get_no_advice(config: PretrainedConfig, log: list[str]) -> None:
    model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 1, get_head_size=lambda: 128, model="a model")
    model.hf_config = config
    for name in "tq4", "isoquant3":
        calibration._say_that_there_is_none(Path("file"), FORMATS[name], model)
    assert not log
    calibration._say_that_there_is_none(Path("file"), FORMATS["turboquant25"], model)
    (line,) = log
    assert line.startswith("warning: ") and ". None can be made (" in line and line.endswith("); tq4 needs none")
    assert "tq-calibrate" not in line


def test_vllms_own_dtype_reads_no_file(model: Path, log: list[str]) -> None:
    write(model, "not JSON")
    with start(model, "auto"):
        pass
    assert not log


def zero_scale(file: dict) -> dict:
    file["layers"]["model.layers.1.self_attn"]["key_channel_scale"][0][9] = 0.0
    return file


REFUSED = {
    "layers": (lambda: content(2, 2, 64), "made for another model: layer 2 is missing, this model has layers 0 to 2"),
    "kv_heads": (lambda: content(3, 4, 64), "made for another model: KV heads 4, this model has 2"),
    "head_size": (lambda: content(3, 2, 128), "made for another model: head_size 128, this model has 64"),
    "version": (lambda: content(3) | {"version": 5}, "version 5 is newer than this packed-kv reads (1 to 4)"),
    "rope": (
        lambda: content(3, version=3, theta=5e5),
        'made for another RoPE: rope_type "default", rope_theta 500000.0; this model has rope_type "default", rope_the',
    ),
    "scale": (
        lambda: zero_scale(content(3, version=2)),
        "layer 1: key_channel_scale: head 0, channel 9 must be a number",
    ),
    "indices": (
        lambda: content(3) | {"layers": {"model.layers.2.self_attn": dict.fromkeys(OUTLIERS, [[64] * 32] * 2)}},
        "layer 2: key_high_precision_indices: head 0 must be strictly ascending within 0 to 63",
    ),
    "json": (lambda: "{", "is not JSON (Expecting property name"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_file_stops_the_start(what: str, model: Path, no_workers: None) -> None:
    make, words = REFUSED[what]
    path = write(model, make())
    line = refusal(model, "turboquant25")
    assert line.startswith(f"{path}: {words}")
    command = f"tq-calibrate model {model} --out {path}" if what == "rope" else "tq-calibrate model MODEL"
    assert line.endswith(f"; make a new file with: {command}")


def test_the_command_that_is_named_makes_a_file_for_this_engine(model: Path, no_workers: None) -> None:
    """Overrides included; without them it would write the file that was refused."""
    path = write(model, content(3, version=3))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    line = refusal(model, "turboquant25", hf_overrides={"rope_parameters": yarn})
    options = shlex.quote(json.dumps({"hf_overrides": {"rope_parameters": yarn}}))
    assert line.endswith(f": tq-calibrate model {model} --engine vllm --engine-options {options} --out {path}")


@pytest.mark.parametrize("version", [2, 3])
def test_means_by_position_are_known_before_the_start(
    version: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of decode context parallelism may not cut their blocks, and CUDA alone has such ranks."""
    found: list[Facts] = []
    monkeypatch.setattr(registration, "refuse", lambda facts, _name: found.append(facts))
    write(model, content(LAYERS, KV_HEADS, HEAD_DIM, version=version))
    config = EngineArgs(str(model), tokenizer=str(DEMO_MODEL), kv_cache_dtype="tq4").create_engine_config()
    registration.cache_config.get_kv_cache_dtype_handler("tq4").before_engine(config)
    assert found[-1].parallel.has_mean_blocks == (version == 3)
    assert (found[-1].parallel.dcp, found[-1].parallel.dcp_run) == (1, 1)


def test_tiers_are_checked_before_a_file_is_made(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_calibration, "resolve_auto", lambda _config: pytest.fail("a file is made"))
    tier = {"secondary_tiers": [{"type": "fs"}]}
    options = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tier}
    config = EngineArgs(
        str(model), tokenizer=str(DEMO_MODEL), kv_cache_dtype="tq4", kv_transfer_config=KVTransferConfig(**options)
    ).create_engine_config()
    with pytest.raises(ValueError, match="has no folder"):
        registration.cache_config.get_kv_cache_dtype_handler("tq4").before_engine(config)


def test_layers_of_several_head_sizes_are_refused(tmp_path: Path, no_workers: None) -> None:
    model = Path(tiny_models.save(tiny_models.gemma4(), tmp_path))
    write(model, content(6, KV_HEADS, 64))
    assert "head_size" in refusal(model, "turboquant25")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            named("nowhere.json"),
            "packed_kv.calibration is 'nowhere.json', and there is no such file; write \"auto\", or",
        ),
        (named("Auto"), "packed_kv.calibration is 'Auto', and there is no such file; write \"auto\", or the path"),
        (named(""), "packed_kv.calibration is ''; write \"auto\" or the path of a file"),
        (
            {"additional_config": {"packed_kv": {"decode_kernel": "hip"}}},
            'packed_kv.decode_kernel is \'hip\'; write "auto", "triton" or "cuda"',
        ),
        ({"additional_config": {"packed_kv": "a.json"}}, "packed_kv is 'a.json'; write"),
        (
            {"additional_config": {"packed_kv": {"calibrations": "a.json"}}},
            "has no option 'calibrations'; write calibration",
        ),
    ],
    ids=["missing", "word", "empty", "kernel", "string", "misspelt"],
)
def test_a_wrong_name_stops_the_start(options: dict, words: str, model: Path) -> None:
    assert words in refusal(model, "turboquant25", **options)


def refusal(model: Path, kv_cache_dtype: str, **options: object) -> str:
    with pytest.raises((CalibrationError, OptionError)) as error, start(model, kv_cache_dtype, **options):
        pass
    line = str(error.value)
    assert "\n" not in line
    return line


DRAFTS = ("mtp.layers.0.self_attn.attn", "draft_model.model.layers.0.self_attn.attn", "model.layers.3.self_attn.attn")


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_layers_of_a_draft_take_first_channels(name: str, has_draft: bool, tmp_path: Path) -> None:
    """Where no draft is asked for, a layer that the file does not list is an error."""
    path = write(tmp_path, content(LAYERS, KV_HEADS, HEAD_DIM))
    rank = calibration.RankCalibration(calibration.load(path), FORMATS["turboquant25"], 1, 0, has_draft)
    if has_draft:
        assert rank.channels(name, KV_HEADS, HEAD_DIM, HEAD_DIM) == LayerCalibration()
    else:
        with pytest.raises(CalibrationError, match=f"has no entry for the model's layer {name}; make"):
            rank.channels(name, KV_HEADS, HEAD_DIM, HEAD_DIM)


@pytest.mark.parametrize(
    ("kv_heads", "head_sizes", "words"),
    [
        (3, (64, 64), "2 KV heads cannot be split into the 3 of"),
        (2, (96, 96), "head_size 64, but model.layers.1.attn has 96"),
        (2, (64, 32), "value_head_size 64, but model.layers.1.attn has 32"),
    ],
)
def test_layers_of_another_shape_are_refused(kv_heads: int, head_sizes: tuple, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, content(LAYERS, KV_HEADS, HEAD_DIM))
    rank = calibration.RankCalibration(calibration.load(path), FORMATS["isoquant4"], 2, 1, False)
    with pytest.raises(CalibrationError, match=words):
        rank.channels("model.layers.1.attn", kv_heads, *head_sizes)


def test_folder_of_a_model_of_the_hub(plain_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert calibration.model_folder("someone/model", "0123") == snapshot
    assert calibration.model_folder("someone/other", None) == Path("someone/other")
    assert calibration.model_folder(str(plain_model), None) == plain_model
    assert calibration.model_folder(str(plain_model / "config.json"), None) == plain_model


def test_tensor_parallel_ranks_take_their_heads(tmp_path: Path) -> None:
    """Four KV heads on two ranks. These round otherwise than one, and a 2-bit code that flips by it moves the tokens
    behind it a little; heads of another rank, or none of the file, move all of them much."""
    model = Path(tiny_models.save(tiny_models.llama(num_key_value_heads=4), tmp_path))
    path = write(model, content(LAYERS, 4, HEAD_DIM, version=3))
    one, two = (prompt_logprobs(model, size) for size in (1, 2))
    path.unlink()
    without = prompt_logprobs(model, 1)
    apart, moved = ((other - two).abs().mean().item() for other in (one, without))
    print(f"two ranks from one: {apart:.5f} nats, from one without the file: {moved:.5f}")
    assert apart < moved / 50 and moved > 0.02


def prompt_logprobs(model: Path, tensor_parallel_size: int) -> torch.Tensor:
    """Log-probabilities of the tokens of the prompt."""
    backend = "uni" if tensor_parallel_size == 1 else "mp"
    options = {"tensor_parallel_size": tensor_parallel_size, "distributed_executor_backend": backend}
    with start(model, "turboquant25", **options) as llm:
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (result,) = llm.generate({"prompt_token_ids": TOKEN_IDS}, sampling, use_tqdm=False)
    rows = zip(TOKEN_IDS[1:], result.prompt_logprobs[1:], strict=True)
    return torch.tensor([row[token].logprob for token, row in rows])
