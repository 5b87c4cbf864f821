"""Calibration files are read as they are, or refused in one line that says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import packed_kv
import pytest
from calibration_files import BEFORE_ROPE, MEANS, ORDERS, OUTLIERS, SCALES, content, write
from packed_kv import calibration_content
from packed_kv.calibration_content import RECIPES
from packed_kv.calibration_file import CalibrationError, heads_of_rank, load
from packed_kv.formats import FORMATS
from packed_kv.json_file import printable
from packed_kv.model.rope import Rope, rope_parameters

LAYER = "model.layers.1.self_attn"
KEYS, VALUES = OUTLIERS

Change = Callable[[dict[str, Any]], Any]


def set_field(**fields: Any) -> Change:
    return lambda file: file.update(fields)


def set_in_layer(**fields: Any) -> Change:
    return lambda file: file["layers"][LAYER].update(fields)


def set_head(field: str, channels: Any) -> Change:
    def change(file: dict[str, Any]) -> None:
        file["layers"][LAYER][field][1] = channels

    return change


def set_number(field: str, number: Any) -> Change:
    def change(file: dict[str, Any]) -> None:
        file["layers"][LAYER][field][1][5] = number

    return change


def set_rope(**fields: Any) -> Change:
    return lambda file: file["ropes"][0].update(fields)


def set_frequency(number: Any) -> Change:
    return lambda file: file["ropes"][0]["frequencies"].__setitem__(5, number)


def drop(field: str) -> Change:
    return lambda file: file.pop(field)


def rename(name: str) -> Change:
    return lambda file: file["layers"].update({name: file["layers"].pop(LAYER)})


FIRST = list(range(32))
REFUSED: dict[str, tuple[Change, str]] = {
    "version_5": (set_field(version=5), "version 5 is newer than this packed-kv reads (1 to 4), so update packed-kv;"),
    "version_0": (set_field(version=0), "version 0 is not supported (1 to 4 are)"),
    "version_is_text": (set_field(version="2"), 'version "2" is not supported'),
    "version_is_true": (set_field(version=True), "version true is not supported"),
    "no_version": (drop("version"), "version null is not supported"),
    "recipe": (set_field(recipe="tq4"), 'recipe "tq4" is not supported ("turboquant25" or "turboquant35" is)'),
    "transform": (set_field(transform_version="hadamard_v2"), 'transform_version "hadamard_v2" is not supported'),
    "codebook": (set_field(codebook_version="lloyd_beta_v2"), 'codebook_version "lloyd_beta_v2" is not supported'),
    "no_head_size": (drop("head_size"), "head_size must be a positive multiple of 16, at most 4096, got null"),
    "head_size_72": (set_field(head_size=72), "head_size must be a positive multiple of 16, at most 4096, got 72"),
    "head_size_32": (set_field(head_size=32), "heads of 32 channels have no outlier channels"),
    "value_head_size": (
        set_field(value_head_size=72),
        "value_head_size must be a positive multiple of 16, at most head_size, got 72",
    ),
    "numbers_of_heads": (set_field(kv_heads=2), "kv_heads must be a list of the numbers that layers have, got 2"),
    "fewer_values": (
        set_field(value_head_size=48),
        "layer 0: value_high_precision_indices: head 0 must be strictly ascending within 0 to 47",
    ),
    "no_layers": (drop("layers"), "layers must be an object with an entry per layer, got null"),
    "layers_are_empty": (set_field(layers={}), "layers must be an object with an entry per layer, got {}"),
    "layer_name": (rename("model.layers.one\n.self_attn"), r'layer name "model.layers.one\n.self_attn" is not model'),
    "layer_twice": (rename("model.layers.0.self_attn.attn"), "layer 0 is listed twice"),
    "field": (set_field(head_sizes=64), '"head_sizes" is no field of the file (head_size is)'),
    "field_of_another_kind": (set_field(head_budgets=None), '"head_budgets" is no field of the file'),
    "field_of_a_layer": (
        set_in_layer(key_chanel_mean=[]),
        'layer 1: "key_chanel_mean" is no field of a layer (key_channel_mean is)',
    ),
    "head_size_of_a_layer": (set_in_layer(head_size=64), 'layer 1: "head_size" is no field of a layer'),
    "name": (set_field(model_name=[1]), "model_name must be a text, got [1]"),
    "calibration": (set_field(calibration=5), "calibration must be an object, got 5"),
    "sizes": (set_in_layer(key_channel_rms=[[0.0] * 64]), "layer 1: key_channel_rms lists 1 heads, key_high_precision"),
    "size": (
        set_in_layer(value_channel_rms=[[-1.0] * 64] * 2),
        "layer 1: value_channel_rms: head 0, channel 0 must be a number from 0 to 1e+38, got -1.0",
    ),
    "layer_is_a_list": (lambda file: file["layers"].update({LAYER: []}), "layer 1: expected an object, got []"),
    "no_keys": (set_in_layer(**{KEYS: None}), f"layer 1: {KEYS} must be a list with a list of channels per KV head"),
    "no_heads": (set_in_layer(**{VALUES: []}), f"layer 1: {VALUES} must be a list with a list of channels per KV head"),
    "one_head_less": (set_in_layer(**{VALUES: [FIRST]}), "layer 1: lists 2 heads of keys and 1 of values"),
    "other_heads": (
        set_in_layer(**{KEYS: [FIRST], VALUES: [FIRST], "key_channel_order": None, "value_channel_order": None}),
        "layer 1 lists 1 heads, the first one listed 2",
    ),
    "head_is_a_number": (set_head(KEYS, 3), f"layer 1: {KEYS}: head 1 must be a list of integers, got 3"),
    "fraction": (set_head(KEYS, [0.5, *FIRST[1:]]), f"layer 1: {KEYS}: head 1 must be a list of integers"),
    "bool": (set_head(KEYS, [False, *FIRST[1:]]), f"layer 1: {KEYS}: head 1 must be a list of integers"),
    "too_few": (
        set_head(VALUES, FIRST[1:]),
        f"layer 1: {VALUES}: head 1 lists 31 channels, turboquant35 here",
    ),
    "unsorted": (set_head(KEYS, FIRST[::-1]), f"layer 1: {KEYS}: head 1 must be strictly ascending within 0 to 63"),
    "repeated": (set_head(KEYS, [0, *FIRST[:-1]]), f"layer 1: {KEYS}: head 1 must be strictly ascending"),
    "negative": (set_head(KEYS, [-1, *FIRST[1:]]), f"layer 1: {KEYS}: head 1 must be strictly ascending"),
    "too_large": (set_head(KEYS, [*FIRST[:-1], 64]), f"layer 1: {KEYS}: head 1 must be strictly ascending"),
    "order_of_heads": (
        set_in_layer(key_channel_order=[list(range(64))]),
        "layer 1: key_channel_order lists 1 heads, key_high_precision_indices 2",
    ),
    "order_repeats": (
        set_head("value_channel_order", [0, *range(63)]),
        "layer 1: value_channel_order: head 1 must have each channel from 0 to 63 once",
    ),
}

MEAN = "must be a number from -32768 to 32768, got"
SCALE = "must be a number from 0.000976562 to 1024, got"
NUMBERS_REFUSED: dict[str, tuple[Change, str]] = {
    "heads": (set_in_layer(key_channel_mean=[[0.0] * 64]), "key_channel_mean lists 1 heads, key_high_"),
    "no_heads": (set_in_layer(key_channel_scale=[]), "key_channel_scale lists 0 heads, key_high_precision_indices 2"),
    "not_a_list": (set_in_layer(key_channel_mean=0.5), "key_channel_mean must be a list with a list of numbers per KV"),
    "channels": (set_head("key_channel_mean", [0.0] * 65), "head 1 must be a list of 64 numbers, got 65"),
    "head": (set_head("value_channel_scale", 1.0), "value_channel_scale: head 1 must be a list of 64 numbers, got 1.0"),
    "mean_nan": (set_number("key_first_token_mean", float("nan")), f"head 1, channel 5 {MEAN} NaN"),
    "mean_inf": (set_number("key_channel_mean", float("-inf")), f"key_channel_mean: head 1, channel 5 {MEAN} -Inf"),
    "mean_bool": (set_number("key_channel_mean", True), f"{MEAN} true"),
    "mean_text": (set_number("key_channel_mean", "0.5"), f'{MEAN} "0.5"'),
    "mean_null": (set_number("key_channel_mean", None), f"{MEAN} null"),
    "mean_large": (set_number("key_channel_mean", 10**400), f"{MEAN} 1000"),
    "scale_zero": (set_number("key_channel_scale", 0), f"key_channel_scale: head 1, channel 5 {SCALE} 0"),
    "scale_negative": (set_number("value_channel_scale", -1.5), f"value_channel_scale: head 1, channel 5 {SCALE} -1.5"),
    "scale_nan": (set_number("key_channel_scale", float("nan")), f"{SCALE} NaN"),
    "scale_inf": (set_number("key_channel_scale", float("inf")), f"{SCALE} Infinity"),
    "scale_bool": (set_number("key_channel_scale", True), f"{SCALE} true"),
    "scale_inverse": (set_number("key_channel_scale", 1e-44), f"{SCALE} 1e-44"),
    "first_alone": (
        lambda file: file["layers"][LAYER].pop("key_channel_mean"),
        "layer 1: key_first_token_mean is there without key_channel_mean",
    ),
}
"""Faults of version 2."""

FREQUENCY = "ropes: frequency 5 of entry 0 must be a number from 0 to pi, got"
ROPES_REFUSED: dict[str, tuple[Change, str]] = {
    "both": (set_in_layer(key_channel_mean=[[0.0] * 64] * 2), f"layer 1: has both key_channel_mean and {BEFORE_ROPE}"),
    "no_rope": (set_in_layer(rope=None), f"layer 1: {BEFORE_ROPE} is there without rope"),
    "no_mean": (set_in_layer(**{BEFORE_ROPE: None}), f"layer 1: rope is there without {BEFORE_ROPE}"),
    "heads": (set_in_layer(**{BEFORE_ROPE: [[0.0] * 64]}), f"{BEFORE_ROPE} lists 1 heads, key_high_"),
    "channels": (set_head(BEFORE_ROPE, [0.0] * 32), f"{BEFORE_ROPE}: head 1 must be a list of 64 numbers, got 32"),
    "mean_nan": (set_number(BEFORE_ROPE, float("nan")), f"layer 1: {BEFORE_ROPE}: head 1, channel 5 {MEAN} NaN"),
    "index": (set_in_layer(rope=1), "layer 1: rope must be an index of the 1 entries of ropes, got 1"),
    "index_negative": (set_in_layer(rope=-1), "rope must be an index of the 1 entries of ropes, got -1"),
    "index_bool": (set_in_layer(rope=False), "rope must be an index of the 1 entries of ropes, got false"),
    "no_ropes": (drop("ropes"), "layer 0: rope must be an index of the 0 entries of ropes, got 0"),
    "ropes": (set_field(ropes={}), "ropes must be a list of objects, got {}"),
    "field": (set_rope(interleave=True), '"interleave" is no field of ropes (interleaved is)'),
    "entry": (set_field(ropes=["yarn"]), 'ropes must be a list of objects, got ["yarn"]'),
    "parameters": (set_rope(parameters=None), "ropes: parameters of entry 0 must be an object, got null"),
    "interleaved": (set_rope(interleaved=1), "ropes: interleaved of entry 0 must be true or false, got 1"),
    "no_frequencies": (set_rope(frequencies=[]), "must be a list of 1 to 32 numbers, as heads have 64 channels, got 0"),
    "frequencies": (set_rope(frequencies=None), "must be a list of 1 to 32 numbers, as heads have 64 channels, got nu"),
    "too_many": (set_rope(frequencies=[0.5] * 33), "must be a list of 1 to 32 numbers, as heads have 64 channels, got"),
    "frequency_nan": (set_frequency(float("nan")), f"{FREQUENCY} NaN"),
    "frequency_inf": (set_frequency(float("inf")), f"{FREQUENCY} Infinity"),
    "frequency_negative": (set_frequency(-1e-9), f"{FREQUENCY} -1e-09"),
    "frequency_large": (set_frequency(3.15), f"{FREQUENCY} 3.15"),
    "frequency_bool": (set_frequency(True), f"{FREQUENCY} true"),
    "first_alone": (
        set_in_layer(**{BEFORE_ROPE: None, "rope": None}),
        "layer 1: key_first_token_mean is there without key_channel_mean",
    ),
}
"""Faults of version 3."""


def refusal(path: Path) -> str:
    with pytest.raises(CalibrationError) as error:
        load(path)
    line = str(error.value)
    assert line.startswith(f"{printable(path)}: ")
    assert line.endswith("; make a new file with: tq-calibrate model MODEL")
    assert "\n" not in line and len(line) < 300 + len(str(path))
    return line


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, tmp_path: Path) -> None:
    change, words = REFUSED[what]
    file = content()
    change(file)
    assert words in refusal(write(tmp_path, file))


@pytest.mark.parametrize(
    ("version", "what"), [*((2, what) for what in NUMBERS_REFUSED), *((3, what) for what in ROPES_REFUSED)]
)
def test_means_scales_and_ropes_that_are_refused(version: int, what: str, tmp_path: Path) -> None:
    change, words = (NUMBERS_REFUSED if version == 2 else ROPES_REFUSED)[what]
    file = content(version=version)
    change(file)
    assert words in refusal(write(tmp_path, file))
    load(write(tmp_path, file | {"version": 1}))  # does not know these fields


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 1,\n', "is not JSON (Expecting property name"),
        ("", "is not JSON (Expecting value: line 1"),
        ("[1]", "expected a JSON object, got [1]"),
        ('{"layers": {"a": 1, "a": 2}}', 'is not JSON ("a" is there twice)'),
        ("[" * 100000, "is not JSON (maximum recursion depth"),
    ],
    ids=["cut", "empty", "list", "twice", "deep"],
)
def test_refused_text(text: str, words: str, tmp_path: Path) -> None:
    assert words in refusal(write(tmp_path, text))


def test_refused_bytes(tmp_path: Path) -> None:
    path = tmp_path / "turboquant_kv.json"
    assert "cannot be read (No such file" in refusal(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not JSON ('utf-8' codec" in refusal(path)
    assert "cannot be read (Is a directory)" in refusal(tmp_path)


def test_a_group_of_another_size(tmp_path: Path) -> None:
    """Other TurboQuant caches give turboquant35 half of the channels, where ours takes a quarter."""
    line = refusal(write(tmp_path, content(head_size=128, count=64)))
    assert "head 0 lists 64 channels, turboquant35 here takes 32 of 128" in line


FIELDS = {
    "key_outlier_channels": OUTLIERS[0],
    "value_outlier_channels": OUTLIERS[1],
    "key_channel_order": ORDERS[0],
    "value_channel_order": ORDERS[1],
    "key_mean": MEANS[0],
    "key_first_mean": MEANS[1],
    "key_scale": SCALES[0],
    "value_scale": SCALES[1],
}
"""Names of `LayerCalibration.known`, which fingerprints hold -> fields of a layer in the file."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_what_is_read(recipe: str, head_size: int, tmp_path: Path) -> None:
    count = FORMATS[recipe].outlier_channels(head_size)
    file = content(3, 2, head_size, count, version=2) | {"recipe": recipe}
    calibration = load(write(tmp_path, file))
    assert (calibration.recipe, calibration.head_size, calibration.kv_heads) == (recipe, head_size, (2,))
    for number, layer in calibration.layers.items():
        entry = file["layers"][f"model.layers.{number}.self_attn"]
        assert layer.known() == {name: entry[field] for name, field in FIELDS.items()}
    assert [*calibration.layers] == [0, 1, 2]


def test_means_before_rope_are_read(tmp_path: Path) -> None:
    file = content(3, version=3)
    file["ropes"].append(file["ropes"][0] | {"interleaved": True, "frequencies": [0, 3.14159]})
    entries = [file["layers"][f"model.layers.{number}.self_attn"] for number in range(3)]
    entries[1]["rope"], entries[2]["rope"] = 1, None  # and one layer without RoPE
    entries[2]["key_channel_mean"] = entries[2].pop(BEFORE_ROPE)
    read = load(write(tmp_path, file))
    assert [layer.key.rope for layer in read.layers.values()] == [
        Rope(tuple(file["ropes"][0]["frequencies"]), False), Rope((0.0, 3.14159), True), None,
    ]  # fmt: skip
    means = [entries[0][BEFORE_ROPE], entries[1][BEFORE_ROPE], entries[2]["key_channel_mean"]]
    assert [layer.key.mean for layer in read.layers.values()] == means
    assert read.version == 3 and len(read.ropes) == 2


def test_another_rope(tmp_path: Path) -> None:
    read = load(write(tmp_path, content(version=3)))
    read.check_rope(rope_parameters({"rope_theta": 10000}))
    sliding = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8}
    read.check_rope(rope_parameters({"rope_parameters": {"full_attention": sliding, "sliding_attention": {}}}))
    for config, words in (
        ({"rope_theta": 5e5}, 'rope_type "default", rope_theta 500000.0'),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            'rope_type "linear", rope_theta 10000',
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            'rope_type "default", rope_theta 10000.0, partial_rotary_factor 0.5',
        ),
        ({"model_type": "gpt2"}, "none"),
    ):
        with pytest.raises(CalibrationError) as error:
            read.check_rope(rope_parameters(config))
        line = str(error.value)
        assert f'made for another RoPE: rope_type "default", rope_theta 10000.0; this model has {words}' in line
        assert line.endswith("; make a new file with: tq-calibrate model MODEL") and "\n" not in line
    load(write(tmp_path, content(version=2))).check_rope({})


def test_files_of_others(tmp_path: Path) -> None:
    """No orders, no versions of transform and codebook, a field of another tool, other spellings of a layer."""
    file = content(1)
    entry = file["layers"].pop("model.layers.0.self_attn")
    bare = {field: entry[field] for field in OUTLIERS}
    names = ("model.layers.0.self_attn.attn", "language_model.model.layers.7.self_attn", "layers.12.self_attn")
    file["layers"] = {name: bare | {"codebook": {"levels": 8}} for name in names}
    for field in ("transform_version", "codebook_version", "model_name", "calibration"):
        del file[field]
    layers = load(write(tmp_path, file)).layers
    assert [*layers] == [0, 7, 12]
    assert layers[7].key.outlier_channels == entry[KEYS]
    assert layers[7].key.channel_order is layers[7].value.channel_order is None


def test_version_1_and_absent_fields(tmp_path: Path) -> None:
    layer = load(write(tmp_path, content())).layers[1]
    assert layer.key.mean is layer.key.first_mean is layer.key.scale is layer.value.scale is None
    file = content(version=2)
    for field in (MEANS[1], *SCALES):
        file["layers"][LAYER][field] = None
    layer = load(write(tmp_path, file)).layers[1]
    assert layer.key.mean == file["layers"][LAYER]["key_channel_mean"]
    assert layer.key.first_mean is layer.key.scale is layer.value.scale is None


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, content())
    first = load(path)
    assert load(path) is first
    write(tmp_path, content(3))
    assert len(load(path).layers) == 3


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"layers": 3}, "layer 2 is missing, this model has layers 0 to 2"),
        ({"layers": 1}, "lists layer 1, this model has layers 0 to 0"),
        ({"kv_heads": 8}, "KV heads 2, this model has 8"),
        ({"head_size": 128}, "head_size 64, this model has 128"),
        ({"value_head_size": 32}, "value_head_size 64, this model has 32"),
    ],
    ids=["more_layers", "fewer_layers", "kv_heads", "head_size", "value_head_size"],
)
def test_another_model(model: dict, words: str, tmp_path: Path) -> None:
    calibration = load(write(tmp_path, content()))
    right = {"layers": 2, "kv_heads": 2, "head_size": 64}
    calibration.check_model(**right)
    with pytest.raises(CalibrationError, match="made for another model: ") as error:
        calibration.check_model(**right | model)
    assert words in str(error.value)


def test_layers_without_a_cache_of_their_own_need_no_entry(tmp_path: Path) -> None:
    file = content()
    del file["layers"]["model.layers.0.self_attn"]
    calibration = load(write(tmp_path, file))
    calibration.check_model(layers=4, kv_heads=2, head_size=64, every_layer=False)
    with pytest.raises(CalibrationError, match="lists layer 1"):
        calibration.check_model(layers=1, kv_heads=2, head_size=64, every_layer=False)


@pytest.mark.parametrize(
    ("total", "tp_size", "expected"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 2, [[0], [0]]),
        (2, 8, [[0]] * 4 + [[1]] * 4),
    ],
)
def test_heads_of_each_rank(total: int, tp_size: int, expected: list[list[int]]) -> None:
    """As vLLM's QKVParallelLinear deals them out."""
    heads = [[head] for head in range(total)]
    ranks = [heads_of_rank(heads, max(1, total // tp_size), tp_size, rank) for rank in range(tp_size)]
    assert ranks == [[[head] for head in rank] for rank in expected]


def test_a_layer_that_is_not_split_has_all_heads() -> None:
    assert heads_of_rank([[0], [1]], kv_heads=2, tp_size=2, tp_rank=1) == [[0], [1]]


BEYOND_SCHEMA = {
    "one_head_less", "other_heads", "too_large", "order_of_heads", "unsorted", "layer_twice", "fewer_values", "sizes",
}  # fmt: skip
"""Refusals that a schema cannot state."""
NUMBERS_BEYOND_SCHEMA = {"heads", "channels", "mean_nan", "scale_nan", "first_alone"}
ROPES_BEYOND_SCHEMA = {
    "both", "no_rope", "no_mean", "heads", "mean_nan", "index", "no_ropes", "too_many", "frequency_nan", "first_alone",
}  # fmt: skip


@pytest.fixture(scope="module")
def schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(packed_kv.__file__).parent / "turboquant_kv.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_schema_accepts(version: int, schema) -> None:
    assert schema.is_valid(content(version=version))


def test_schema_has_the_fields_that_are_read(schema) -> None:
    of_file = schema.schema
    parts = of_file, of_file["$defs"]["layer"], of_file["properties"]["ropes"]["items"]
    assert [set(part["properties"]) for part in parts] == [*calibration_content.FIELDS.values()]


@pytest.mark.parametrize("what", REFUSED)
def test_schema_refuses(what: str, schema) -> None:
    file = content()
    REFUSED[what][0](file)
    assert schema.is_valid(file) == (what in BEYOND_SCHEMA)


@pytest.mark.parametrize("what", NUMBERS_REFUSED)
def test_schema_refuses_means_and_scales(what: str, schema) -> None:
    file = content(version=2)
    NUMBERS_REFUSED[what][0](file)
    assert schema.is_valid(file) == (what in NUMBERS_BEYOND_SCHEMA)


@pytest.mark.parametrize("what", ROPES_REFUSED)
def test_schema_refuses_ropes(what: str, schema) -> None:
    file = content(version=3)
    ROPES_REFUSED[what][0](file)
    assert schema.is_valid(file) == (what in ROPES_BEYOND_SCHEMA)


def test_imports_no_torch() -> None:
    code = "import sys, packed_kv.calibration_file; sys.exit(', '.join({'torch', 'vllm'} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


BOMBS = {
    "head_size": (lambda c: c.update(head_size=32_000_000_000), "head_size must be a positive multiple of 16, at most"),
    "layer": (lambda c: c["layers"].update({f"model.layers.{'1' * 5000}.self_attn": {}}), "layer name "),
    "channel": (
        lambda c: c["layers"]["model.layers.0.self_attn"].update(key_high_precision_indices=[[10**4200] * 32] * 2),
        "head 0 must be strictly ascending",
    ),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_a_line(what: str, tmp_path: Path) -> None:
    change, words = BOMBS[what]
    bomb = content(2, 2, 128)
    change(bomb)
    assert words in refusal(write(tmp_path, bomb))


def test_a_file_of_half_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "turboquant_kv.json"
    with path.open("wb") as file:
        file.truncate(476 << 20)
    begun = time.monotonic()
    assert "has 499,122,176 bytes, more than the 67,108,864 that are read" in refusal(path)
    assert time.monotonic() - begun < 1


def test_what_is_no_file_is_a_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "is not a regular file" in refusal(tmp_path / "fifo")
    assert "cannot be read" in refusal(Path("/" + "x" * 5000))
