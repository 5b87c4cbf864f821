"""Rows of today read back what the dtypes do, other widths have the levels they name, and moments are of the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import section_widths
import tiny_models
import torch
from checkout import DEMO_MODEL
from long_context import through_reference
from packed_kv import FORMATS
from packed_kv.channel_calibration import LayerCalibration
from packed_kv.codecs.pages import PagedCodec
from packed_kv.layout import MEAN_BLOCK
from section_widths import Moments, Row
from torch.testing import assert_close
from tq_calibrate.attended import NEAR, STRIDE
from tq_calibrate.choose import choose
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.ropes import before_rope, ropes_of, sums_before_rope, turned_squares
from tq_calibrate.statistics import LayerStatistics
from transformers import AutoModelForCausalLM

HEADS, CHANNELS, TOKENS = 2, 64, MEAN_BLOCK + 40


def statistics() -> tuple[LayerStatistics, Moments, torch.Tensor, torch.Tensor]:
    """Statistics of a layer whose channels differ, with keys and values to match, fp32 [tokens, heads, channels]."""
    generator = torch.Generator().manual_seed(0)

    def positive() -> torch.Tensor:
        return torch.randn(HEADS, CHANNELS, generator=generator, dtype=torch.float64).exp()

    key_sizes, value_sizes, means = positive(), positive(), positive()
    rope = ropes_of(tiny_models.llama(head_dim=CHANNELS))[0]
    layer = LayerStatistics(
        key_energy=key_sizes, key_variance=key_sizes, value_energy=value_sizes, key_weight=positive(),
        value_weight=positive(), key_max=key_sizes, value_max=value_sizes,
        key_mean=means, key_first_mean=positive(), rope=rope,
    )  # fmt: skip
    moments = Moments(3 * positive(), positive(), value_sizes, positive())
    key, value = torch.randn(2, TOKENS, HEADS, CHANNELS, generator=generator)
    return layer, moments, key * key_sizes.sqrt().float(), value * value_sizes.sqrt().float()


@pytest.mark.parametrize("dtype", ["tq4", "tq3", "turboquant35", "turboquant25"])
def test_rows_of_today_read_back_what_the_dtypes_do(dtype: str) -> None:
    layer, moments, key, value = statistics()
    fmt, choice = FORMATS[dtype], choose(layer, "turboquant35")
    channels = [part.map_rows(torch.Tensor.tolist) for part in (choice.key, choice.value)]
    assert layer.rope is not None
    channels[0] = replace(channels[0], rope=layer.rope.rope)
    known = LayerCalibration(*channels).taken_by(fmt)
    codec = PagedCodec(fmt, CHANNELS, known.key, known.value, positions=TOKENS)
    far_key, far_value, near_key, near_value = section_widths.through_row(Row(dtype), layer, moments, TOKENS)(
        key, value
    )
    for found, expected in zip((far_key, far_value), through_reference(codec)(key, value), strict=True):
        assert (found - expected).square().sum() < 1e-5 * expected.square().sum()
    assert_close((near_key, near_value), (key, value), rtol=0.05, atol=0.1)


def test_values_are_stored_less_their_mean_and_read_with_it() -> None:
    layer, moments, _, value = statistics()
    means = moments.value_mean.float().expand_as(value).clone()
    means[0] = moments.value_first_mean.float()
    today, less_mean = (
        section_widths.through_row(row, layer, moments, TOKENS) for row in (Row("tq3"), Row("tq3", value_mean=True))
    )
    _, expected, *_ = today(value, value)
    _, found, *_ = less_mean(value, value + means)
    assert_close(found, expected + means, rtol=1e-3, atol=1e-3)


def test_sections_of_k_are_the_costliest_channels_first() -> None:
    """Widths of (5, 2): channels of the first section come back with less error, in units of the weights chosen."""
    layer, moments, key, _ = statistics()
    for afar, weight in ((False, layer.key_weight), (True, moments.far_weight)):
        row = Row("turboquant35", True, afar, (5, 2))
        far_key, *_ = section_widths.through_row(row, layer, moments, TOKENS)(key, key)
        scale = section_widths.channel_scale(layer.key_variance, weight)
        error = ((far_key - key) * scale).square().mean(0)
        order = (layer.key_variance * weight).argsort(-1, descending=True)
        first, second = error.gather(-1, order).split(32, -1)
        assert (first.mean(-1) < 0.1 * second.mean(-1)).all()


def test_trellis_codes_lose_less_where_chains_are_long_enough() -> None:
    """V of heads of 64 has one group of 2 bits, of which a lane holds 4 channels: it keeps today's codes."""
    layer, moments, key, value = statistics()
    read = {
        trellis: section_widths.through_row(Row("turboquant25", trellis=trellis), layer, moments, TOKENS)(key, value)
        for trellis in ("", "twos", "joined")
    }
    of_key, of_value = (
        {trellis: float((found[i] - x).square().sum()) for trellis, found in read.items()}
        for i, x in enumerate((key, value))
    )
    assert of_key["joined"] < 0.9 * of_key["twos"] < 0.9 * of_key[""]
    assert torch.equal(read["twos"][1], read[""][1]) and of_value["joined"] < 0.9 * of_value[""]


def test_levels_are_evenly_spaced() -> None:
    bits, error = 1, 0.37
    groups = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    found = section_widths.evenly_spaced(groups, bits)
    assert len(found[0].abs().unique()) <= 1 << bits - 1
    assert (found.sign() == groups.sign()).all()
    assert (found - groups).square().sum() / groups.square().sum() == pytest.approx(error, rel=0.05)
    assert (section_widths.evenly_spaced(torch.zeros(1, 32), bits) == 0).all()


def test_moments_are_those_of_the_text() -> None:
    torch.manual_seed(0)
    seen = []

    class Spy(section_widths.MomentCollector):
        def attention(self, module, query, key, value, mask, **options):
            if module.layer_idx == 1:
                seen.append((query[0], key[0], value[0], options["scaling"]))
            return super().attention(module, query, key, value, mask, **options)

    collector = Spy()
    model = AutoModelForCausalLM.from_config(tiny_models.llama(), attn_implementation=ATTENTION).eval()
    sequences = [torch.randint(tiny_models.VOCAB, (length,)).tolist() for length in (NEAR + 30, NEAR + 20)]
    collector.run(model, [[ids] for ids in sequences], lambda _tokens: None)
    (rope, *_) = collector.sums.layers[1].ropes
    found = collector.moments(1, rope)
    values = torch.cat([value[:, 1:] for _, _, value, _ in seen], 1).double()
    assert_close(found.value_mean, values.mean(1))
    assert_close(found.value_first_mean, torch.stack([value[:, 0] for _, _, value, _ in seen]).double().mean(0))
    assert_close(found.value_variance, values.var(1, correction=0))
    sums, total = 0.0, 0.0
    for query, key, _, scaling in seen:
        group = len(query) // len(key)
        for at in range(NEAR, key.shape[1], STRIDE):
            for head in range(len(query)):
                attention = (key[head // group, : at + 1] @ query[head, at] * scaling).softmax(0)
                weight = torch.zeros(1, len(key), dtype=torch.float64)
                weight[0, head // group] = attention[1 : at - NEAR + 1].double().square().sum()
                vector = before_rope(query[head, at].double().expand(1, len(key), -1), torch.tensor([at]), rope.rope)
                sums, total = sums + sums_before_rope(vector, rope.rope, weight), total + weight[0]
    assert_close(found.far_weight, turned_squares(sums / total[:, None], rope), rtol=1e-4, atol=1e-6)


def test_last_changes() -> None:
    rows = [Row("tq3", True, True, (4, 2)), Row("tq3", True, True), Row("tq3", True), Row("tq3")]
    assert [row.less_last_change() for row in rows] == [*rows[1:], rows[-1]]
    assert Row("tq3", True, False, (4, 2)).less_last_change() == rows[2]


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 100)
    arguments = [str(DEMO_MODEL), "--text", str(text), "--sequences", "1", "--sequence-tokens", "300", "--windows", "1"]
    arguments += ["--tests", "0:160", "100:24", "--widths", "tq3=4,3,3,2", "tq3=3,3,3,3", "--output"]
    section_widths.main([*arguments, str(tmp_path / "kl.json")])
    printed = capsys.readouterr().out
    assert printed.startswith("text 0, 0 + 160\n") and "prompts of 100 tokens, 24 tokens scored" in printed
    table = printed.split("\n\n")[2].splitlines()[1:]
    assert [line.split("  ")[0] for line in table] == [
        "fp8 e4m3", "tq3", "tq3, V less mean", "tq3, V less mean, from afar",
        "tq3, V less mean, from afar, K (4, 3, 3, 2)", "tq3, V less mean, K (4, 3, 3, 2)",
        "tq3, V less mean, from afar, K (3, 3, 3, 3)", "tq3, V less mean, K (3, 3, 3, 3)",
    ]  # fmt: skip
    kl = [float(line.split("3.25")[1].split()[0]) for line in table[1:]]
    ratios = [[float(cell.split()[0]) for cell in line.split("  ") if " ± " in cell][1:] for line in table[2:]]
    for number, (at, of_today, of_less, _) in enumerate(zip(kl[1:], *zip(*ratios, strict=True), strict=True)):
        assert of_today == pytest.approx(at / kl[0], rel=0.03)
        assert of_less == pytest.approx(at / kl[(0, 1, 2, 1, 2, 1)[number]], rel=0.03)
    section_widths.main([*arguments, str(tmp_path / "kl.json")])
    assert capsys.readouterr().out.replace("\n\n\n", "\n\n").split("\n\n")[1].splitlines()[1:] == table


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ("tq3=4,3,3,3", "has not the bytes of tq3"),
        ("tq3=6,3,2,1", "no code of 6 bits"),
        ("isoquant3=4,3,3,2", "no dtype with Hadamard"),
    ],
)
def test_widths_that_cannot_be(widths: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        section_widths.main([str(DEMO_MODEL), "--text", "none", "--widths", widths])
    assert message in capsys.readouterr().err


def teardown_module() -> None:
    Collector()
