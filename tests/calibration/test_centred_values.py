"""V less its mean: what files say of it, and when tq-calibrate writes it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import packed_kv
import pytest
import torch
from calibration_files import VALUE_MEANS, content
from checkout import DEMO_MODEL
from packed_kv import FORMATS
from packed_kv.calibration_file import CalibrationError, load
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.codec import Codec
from tq_calibrate import run
from tq_calibrate.attended import Scores
from tq_calibrate.choose import choose
from tq_calibrate.cli import main
from tq_calibrate.sums import Sums
from tq_calibrate.values import held_out_gain

HEADS, SIZE = 2, 64
SCHEMA = Path(packed_kv.__file__).with_name("turboquant_kv.schema.json")


def test_a_file_with_means_of_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written, read, checked and shown; means that gain too little on held-out text are left out."""
    out = tmp_path / "file.json"
    command = ["model", str(DEMO_MODEL), "--tokens", "512", "--out", str(out)]
    assert main([*command, "--no-value-means"]) == 0
    assert "values" not in capsys.readouterr().out
    without = json.loads(out.read_text())
    monkeypatch.setattr(run, "held_out_gain", lambda *_: 0.9)
    assert main(command) == 0
    assert "values less their means (error of outputs on held-out text 0.90" in capsys.readouterr().out
    file, written = load(out), json.loads(out.read_text())
    jsonschema.validate(written, json.loads(SCHEMA.read_text()))
    assert file.version == 4
    for fmt in map(FORMATS.__getitem__, ("tq4", "turboquant25", "isoquant3")):
        taken = file.taken_by(fmt, file.layers[0])
        assert taken.value.mean is not None and taken.value.first_mean is not None
        assert {"value_mean", "value_first_mean"} <= {*taken.known()}, "pages of other bytes have another fingerprint"
    assert main(["show", str(out)]) == 0
    assert "with means of values" in capsys.readouterr().out
    monkeypatch.setattr(run, "held_out_gain", lambda *_: 0.96)
    assert main(command) == 0
    assert "no means of values (error of outputs on held-out text 0.96" in capsys.readouterr().out
    assert json.loads(out.read_text()) == without


def test_the_gain_on_held_out_text_is_that_of_the_codec() -> None:
    """Values of another text have half of the mean that the file takes off."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(HEADS, SIZE, generator=generator)
    seen, held = (torch.randn(4000, HEADS, SIZE, generator=generator) + share * mean for share in (1.0, 0.5))

    def sums(value: torch.Tensor) -> Sums:
        found, zero = Sums(), torch.randn(len(value), HEADS, SIZE, generator=generator)
        columns = torch.ones(HEADS * SIZE)
        positions = torch.arange(len(value)) % 100
        found.add(0, zero, zero, value, positions, Scores(1.0), lambda: columns)
        return found

    layers = sums(seen).statistics().layers
    choice = choose(layers[0], "turboquant35", centres_values=True)
    assert choice.value.mean is not None and choice.value.scale is not None
    codecs = [
        Codec(FORMATS["tq4"], SIZE, "value", channels)
        for channels in (ChannelCalibration(mean=choice.value.mean), ChannelCalibration())
    ]
    of_mean, of_whole = ((codec.decode(codec.encode(held)) - held).square().sum() for codec in codecs)
    estimate = held_out_gain(sums(held), {0: choice})
    assert 0.95 < float(of_mean / of_whole) / estimate < 1.05 and 0.8 < estimate < 1.1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"value_channel_mean": None}, "layer 0: value_first_token_mean is there without value_channel_mean"),
        ({"value_channel_mean": [[0.0] * SIZE]}, "value_channel_mean lists 1 heads"),
        ({"value_channel_mean": [[1e5] * SIZE] * 2}, "value_channel_mean: head 0, channel 0 must be a number from"),
        (
            {"key_channel_mean_before_rope": None, "rope": None, "key_first_token_mean": None},
            "value_channel_mean is there without a mean of keys",
        ),
    ],
    ids=str,
)
def test_a_bad_file_is_refused(change: dict, fault: str, tmp_path: Path) -> None:
    """In version 4; one of version 3 has no means of values, whatever its fields are."""
    file, path = content(1, version=3, value_mean=1.0), tmp_path / "file.json"
    ((name, layer),) = file["layers"].items()
    path.write_text(json.dumps(file | {"version": 4}))
    assert load(path).layers[0].value.mean == layer[VALUE_MEANS[0]]
    changed = file | {"layers": {name: layer | change}}
    path.write_text(json.dumps(changed | {"version": 4}))
    with pytest.raises(CalibrationError, match=fault):
        load(path)
    path.write_text(json.dumps(file))
    assert load(path).layers[0].value.mean is None
