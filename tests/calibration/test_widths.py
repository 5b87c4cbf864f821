"""Widths of K's groups: which there are, what they are worth, and when a file has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import packed_kv
import pytest
import torch
from calibration_files import content
from checkout import DEMO_MODEL
from packed_kv import FORMATS
from packed_kv.calibration_file import CalibrationError, load
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.codec import Codec
from tq_calibrate import run
from tq_calibrate.choose import LayerChoice, choose
from tq_calibrate.cli import main
from tq_calibrate.statistics import LayerStatistics
from tq_calibrate.widths import candidates, gain, key_widths

HEADS = 2
SCHEMA = Path(packed_kv.__file__).with_name("turboquant_kv.schema.json")


def statistics(head_size: int, spread: float) -> LayerStatistics:
    """Channels whose energies and weights spread by so many powers of e."""
    generator = torch.Generator().manual_seed(head_size)
    energy, weight = (spread * torch.randn(2, HEADS, head_size, generator=generator, dtype=torch.float64)).exp()
    one = torch.ones_like(energy)
    return LayerStatistics(energy, energy, one, weight, one, energy, one)


def test_candidates_have_the_bytes_and_words_of_the_dtype() -> None:
    assert candidates(FORMATS["tq4"], 64) == [(5, 3)]
    assert candidates(FORMATS["tq4"], 128) == [(5, 5, 4, 2), (5, 5, 3, 3), (5, 4, 4, 3)]
    assert not candidates(FORMATS["tq4"], 256), "5 bits are slow there"
    assert candidates(FORMATS["turboquant35"], 64) == [(5, 2)]
    assert candidates(FORMATS["turboquant35"], 128) == [(5, 4, 2, 2), (5, 3, 3, 2), (4, 4, 3, 2)]
    assert candidates(FORMATS["tq3"], 64) == [(4, 2)]
    assert candidates(FORMATS["tq3"], 128) == [(5, 3, 2, 2), (4, 4, 2, 2), (4, 3, 3, 2)]
    assert not any(candidates(FORMATS["turboquant25"], size) for size in (64, 128))


@pytest.mark.parametrize(
    ("name", "head_size", "bits"),
    [
        ("tq3", 64, (4, 2)),
        ("tq3", 128, (4, 3, 3, 2)),
        ("tq4", 64, (5, 3)),
        ("tq4", 128, (5, 4, 4, 3)),
    ],
)
def test_the_gain_is_that_of_the_codec(name: str, head_size: int, bits: tuple[int, ...]) -> None:
    """The estimate, beside the error of scores of random keys that the codec has."""
    layer = statistics(head_size, 1.0)
    choice, fmt = choose(layer, "turboquant35"), FORMATS[name]
    keys = torch.randn(4000, HEADS, head_size) * layer.key_energy.sqrt()
    own, other = (
        Codec(fmt, head_size, channels=ChannelCalibration(scale=choice.key.scale, **widths))
        for widths in ({}, {"ranking": choice.key.ranking, "group_bits": bits})
    )
    errors = [
        ((codec.decode(codec.encode(keys)) - keys).square().mean(0) * layer.key_weight).sum() for codec in (own, other)
    ]
    estimate = gain(fmt, bits, [(choice, layer.key_variance, layer.key_weight)])
    assert 0.9 < float(errors[1] / errors[0]) / estimate < 1.1 and estimate < 0.8


def test_widths_are_taken_where_channels_differ() -> None:
    unequal = {"tq3": (4, 2), "tq4": (5, 3), "turboquant35": (5, 2)}
    for spread, expected in ((0.05, {}), (1.5, unequal)):
        layers = {number: statistics(64, spread) for number in range(2)}
        choices = {number: choose(layer, "turboquant35") for number, layer in layers.items()}
        assert key_widths(layers, choices) == expected


def test_a_file_with_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written, read, checked and shown; widths that lose more on held-out text are left out."""
    out, wanted = tmp_path / "file.json", {"tq3": (4, 3, 3, 2), "turboquant35": (4, 4, 3, 2)}
    monkeypatch.setattr(run, "key_widths", lambda *_: wanted)
    monkeypatch.setattr(run, "held_out_gains", lambda *_: {"tq3": 0.9, "turboquant35": 1.0})
    assert main(["model", str(DEMO_MODEL), "--tokens", "512", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "tq3: 4, 3, 3, 2 bits in groups of keys (error of scores on held-out text 0.90 of that with its own)" in told
    assert "turboquant35: its own widths in groups of keys" in told
    file = load(out)
    assert file.key_bits == {"tq3": (4, 3, 3, 2)}
    assert file.version == 4
    jsonschema.validate(json.loads(out.read_text()), json.loads(SCHEMA.read_text()))
    layer = file.layers[0]
    taken = file.taken_by(FORMATS["tq3"], layer).key
    assert taken.group_bits == (4, 3, 3, 2) and taken.ranking == layer.key.ranking and taken.channel_order is None
    assert file.taken_by(FORMATS["tq4"], layer).key == replace(
        layer.key.taken_by(FORMATS["tq4"], "key"), ranking=None, group_bits=None
    )
    assert main(["check", str(out)]) == 0 and main(["show", str(out)]) == 0
    assert "tq3: 4, 3, 3, 2 bits in groups of keys" in capsys.readouterr().out
    assert main(["model", str(DEMO_MODEL), "--tokens", "512", "--out", str(out), "--no-key-widths"]) == 0
    assert load(out).version == 3 and not load(out).key_bits
    assert "groups of keys" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"key_group_bits": [4, 2]}, "must be an object"),
        ({"key_group_bits": {"isoquant3": [4, 2]}}, '"isoquant3" is none of the dtypes'),
        ({"key_group_bits": {"tq3": "4, 2"}}, "tq3 must have a list of bits"),
        ({"key_group_bits": {"tq3": [2, 4]}}, r"groups of \(2, 4\) bits"),
        ({"key_group_bits": {"tq3": [4, 4]}}, r"groups of \(4, 4\) bits"),
        ({"key_group_bits": {"tq4": [6, 2]}}, r"groups of \(6, 2\) bits"),
        ({"key_group_bits": {"tq3": [4, 2]}}, "layer 0: key_channel_ranking is missing"),
    ],
    ids=str,
)
def test_a_bad_file_is_refused(change: dict, fault: str, tmp_path: Path) -> None:
    """In version 4; one of version 3 has no widths, whatever they are."""
    file, path = content(1), tmp_path / "file.json"
    path.write_text(json.dumps(file | {"version": 4}))
    load(path)
    path.write_text(json.dumps(file | {"version": 4} | change))
    with pytest.raises(CalibrationError, match=fault):
        load(path)
    path.write_text(json.dumps(file | {"version": 3} | change))
    assert not load(path).key_bits


def test_a_layers_ranking_is_by_cost() -> None:
    layer = statistics(64, 1.0)
    choice: LayerChoice = choose(layer, "turboquant35")
    cost = (layer.key_variance * layer.key_weight).gather(-1, choice.key.ranking)
    assert (cost[:, 1:] <= cost[:, :-1]).all()
