"""experiments/tried.py: each code loses what it says, and what surrounds a code loses nothing."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import tried
from checkout import DEMO_MODEL, REPO
from packed_kv import get_codec
from packed_kv.codecs import scalar
from packed_kv.formats import CODES, MAX_SCALE_BYTE
from tq_calibrate.errors import UserError
from tried_codes import Dtype, Float8, Grouped, Int8, Qjl, Raw, Site, Spectral, Widths, e5m3_ceiling, hadamard, turn
from tried_model import NOISE, Facts, Method, Observer, Run, allocate, attend, load, nearest
from tried_rounding import Joint, Trellis, on_the_trellis

LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 64, 48
SITE = Site(0, "key")


class Lossless:
    """A code that keeps every bit."""

    def vector_bytes(self, head_dim: int) -> float:
        return 4 * head_dim

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        return x


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_mse(x: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((x - decoded).square().sum() / x.square().sum())


def token_ids(seed: int) -> list[int]:
    return torch.randint(256, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A random model with large constants in its keys."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, head_dim=HEAD_DIM, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=3.0)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    loaded = load(str(folder))
    facts = Observer().run(loaded, [token_ids(seed) for seed in range(8)])
    return Run(loaded, facts, [token_ids(100), token_ids(101)])


def mean_kl(run: Run, method: Method) -> float:
    return float(run.kl(method).mean())


METHODS = {
    "plain": Method(Lossless(), Lossless()),
    "mean and scale": Method(Lossless(), Lossless(), offset="mean and first", scaled=True, value_mean=True),
    "centroids": Method(Lossless(), Lossless(), offset="centroids", scaled=True),
    "weighed": Method(Lossless(), Lossless(), offset="weighed", scaled=True),
    "oracle": Method(Lossless(), Lossless(), window=7, ring=Lossless(), oracle=True),
    "window": Method(Lossless(), Lossless(), offset="mean", window=7, sinks=3, ring=Lossless()),
    "all in the window": Method(Grouped(2), Grouped(2), window=TOKENS, ring=Lossless()),
    "all of them sinks": Method(Grouped(2), Grouped(2), sinks=TOKENS, ring=Lossless()),
}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_but_the_code_loses_anything(run: Run, name: str) -> None:
    assert run.kl(METHODS[name]).abs().max() < 1e-5 < mean_kl(run, Method(Grouped(2), Grouped(2))) / 100


def test_every_row_of_the_table_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {(layer, role): 1.0 + layer for layer in range(LAYERS) for role in ("key", "value")}
    monkeypatch.setattr(tried, "PACKAGE", "no_such_package")
    rows = tried.rows({"": costs, tried.CENTRED: costs})
    found = {name: mean_kl(run, method) for name, method in rows.items()}
    assert len(rows) > 40 and list(rows) == list(tried.rows({}))
    assert all(0 < kl < 10 for kl in found.values()), found
    assert found["tq4"] < found["tq3"] and found["tq3, W16"] < found["tq3"]
    assert found["tq3, K less its mean"] < 0.8 * found["tq3"], "keys of this model have large constants"


class Nothing(Lossless):
    """A code that keeps nothing, so that a reader gets what was taken off before."""

    def read_back(self, x: torch.Tensor, site: Site) -> torch.Tensor:
        return torch.zeros_like(x)


def test_what_is_taken_off_comes_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = gaussian(1, HEADS, TOKENS, HEAD_DIM), run.facts.layers[1]
    means = found["key_mean"].unsqueeze(1).expand(-1, TOKENS, -1)
    first = torch.cat((found["first_mean"].unsqueeze(1), means[:, 1:]), 1)
    weighed = found["weighed_mean"].unsqueeze(1).expand_as(means)
    for offset, role, expected in (
        ("", "key", torch.zeros_like(means)), ("mean", "key", means), ("mean and first", "key", first),
        ("weighed", "key", torch.cat((first[:, :1], weighed[:, 1:]), 1)),
        ("", "value", found["value_mean"].unsqueeze(1).expand(-1, TOKENS, -1)),
    ):  # fmt: skip
        monkeypatch.setattr(run, "method", Method(Nothing(), Nothing(), offset, value_mean=True, ring=Lossless()))
        far, near = run.stored(1, role, x)
        torch.testing.assert_close(far[0], expected)
        torch.testing.assert_close(near, x)


def test_scales(run: Run) -> None:
    found, spread = run.facts.layers[0], run.facts.layers[0]["spread"]
    ratio = run.facts.scale(0, "key", "mean").pow(4) * spread / found["query"]
    torch.testing.assert_close(ratio, ratio.mean(-1, keepdim=True).expand_as(ratio))
    ratio = run.facts.scale(0, "value", "").pow(4) * found["value"] / found["output"]
    torch.testing.assert_close(ratio, ratio.mean(-1, keepdim=True).expand_as(ratio))
    torch.testing.assert_close(run.facts.scale(0, "key", "").log().mean(-1), torch.zeros(HEADS), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 1, 3, 6, 9])
def test_window_reads_near_and_far(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tried_model.QUERY_TILE", 4)
    query, far, near = gaussian(1, 4, 9, 32), *((gaussian(1, 2, 9, 32, seed=s), gaussian(1, 2, 9, 32)) for s in (1, 2))
    output = attend(query, far, near, window)
    for head, position in itertools.product(range(4), range(9)):
        sources = [near if position - at < window else far for at in range(position + 1)]
        keys, values = (torch.stack([s[i][0, head // 2, at] for at, s in enumerate(sources)]) for i in (0, 1))
        expected = (keys @ query[0, head, position]).softmax(0) @ values
        torch.testing.assert_close(output[0, head, position], expected)


def test_the_oracle_gives_far_keys_the_attention_that_is_theirs() -> None:
    """V is 1 far away and 0 in the window, so the output is the far keys' share."""
    query, true, far_key, near_key = (gaussian(1, heads, 9, 32, seed=s) for s, heads in enumerate((4, 2, 2, 2)))
    ones = torch.ones(1, 2, 9, 32)
    output = attend(query, (far_key, ones), (near_key, 0 * ones), 3, true)
    for head, position in itertools.product(range(4), range(9)):
        keys = torch.cat((true[0, head // 2, : max(0, position - 2)], near_key[0, head // 2, : position + 1][-3:]))
        share = (keys @ query[0, head, position]).softmax(0)[:-3].sum() if position > 2 else torch.tensor(0.0)
        torch.testing.assert_close(output[0, head, position], share.expand(32))


def test_facts_are_those_of_the_keys(run: Run) -> None:
    seen: dict[int, list] = {layer: [] for layer in range(LAYERS)}
    with torch.inference_mode():
        for seed in range(8):
            cache = run.model(torch.tensor([token_ids(seed)]), use_cache=True).past_key_values
            for layer, of_layer in seen.items():
                of_layer.append((cache.layers[layer].keys[0], cache.layers[layer].values[0]))
    for layer, of_layer in seen.items():
        keys, values = (torch.stack(x, 1) for x in zip(*of_layer, strict=True))  # [heads, sequences, tokens, channels]
        found = run.facts.layers[layer]
        torch.testing.assert_close(found["key_mean"], keys.mean((1, 2)))
        torch.testing.assert_close(found["first_mean"], keys[:, :, 0].mean(1))
        torch.testing.assert_close(found["value_mean"], values.mean((1, 2)))
        torch.testing.assert_close(found["weighed_mean"], keys[:, :, 1:].mean((1, 2)))  # none is far in 48 tokens
        for matrix, name in (("query_matrix", "query"), ("output_matrix", "output")):
            torch.testing.assert_close(found[matrix].diagonal(dim1=-2, dim2=-1), found[name])
        torch.testing.assert_close(found["spread"], keys.var((1, 2), correction=0), rtol=1e-3, atol=1e-3)
        flat = keys.flatten(1, 2)
        assert (found["rest"] < found["spread"]).all()
        assert (flat - nearest(flat, found["centroids"])).square().mean() < 0.7 * found["spread"].mean()


def test_facts_are_kept(run: Run, tmp_path: Path) -> None:
    run.facts.save(tmp_path / "facts.pt", {"model": "a"})
    found = Facts.load(tmp_path / "facts.pt", {"model": "a"})
    assert found is not None and torch.equal(found.layers[1]["centroids"], run.facts.layers[1]["centroids"])
    assert Facts.load(tmp_path / "facts.pt", {"model": "b"}) is None


@pytest.mark.parametrize("name", ["tq3", "tq4"])
def test_a_group_of_32_is_the_dtype(name: str) -> None:
    x, code, codec = gaussian(1, 5, 3, 128), Grouped(int(name[-1])), get_codec(name, 128)
    assert torch.equal(code.read_back(x, SITE), codec.decode(codec.encode(x)))
    assert torch.equal(Dtype(name).read_back(x, SITE), codec.decode(codec.encode(x)))
    assert code.vector_bytes(128) == codec.vector_bytes


def test_errors_of_other_codes() -> None:
    x = gaussian(1, 500, 2, 64)
    errors = {code: relative_mse(x, code.read_back(x, SITE)) for code in (
        Grouped(3), Grouped(3, 16), Grouped(3, 64), Qjl(3), Qjl(3, True), Float8(), Float8(True), Int8(), Raw(),
    )}  # fmt: skip
    assert errors[Grouped(3, 16)] < errors[Grouped(3)] < errors[Grouped(3, 64)] < 1.3 * errors[Grouped(3)]
    assert errors[Grouped(3)] < errors[Qjl(3, True)] < errors[Qjl(3)], "docs/formats.md, section 9"
    assert errors[Raw()] < 1e-6 < errors[Int8()] < 1e-4 < errors[Float8(True)] < 1e-3
    assert errors[Float8()] == pytest.approx(errors[Float8(True)], rel=0.1)


def test_v_is_longer_only_where_it_is_asked_for() -> None:
    x, value = gaussian(1, 2000, 2, 64), Site(0, "value")
    plain, longer = (code.read_back(x, value) for code in (Dtype("tq3"), Dtype("tq3", longer=True)))
    assert torch.equal(plain, Dtype("tq3", longer=True).read_back(x, SITE))
    assert float((longer * x).sum() / (plain * x).sum()) == pytest.approx(CODES[3].value_gain, abs=2e-3)


@pytest.mark.parametrize("name", ["tq3", "turboquant25"])
def test_codes_are_rounded_for_what_errors_cost(name: str) -> None:
    x, basis = gaussian(1, 500, 2, 64), gaussian(2, 64, 64, seed=1)
    weight = basis @ torch.diag(torch.linspace(-3, 3, 64).exp()) @ basis.transpose(-1, -2)
    nearest_codes, joint = Dtype(name).read_back(x, SITE), Joint(name).read_back(x, replace(SITE, weight=weight))
    before, after = (float(torch.einsum("bthc,hcd,bthd->", e, weight, e)) for e in (nearest_codes - x, joint - x))
    assert after < 0.8 * before and relative_mse(x, joint) > relative_mse(x, nearest_codes)
    for cheaper in ({"rank": 8}, {"sweeps": 1}, {"grouped": True}):
        error = Joint(name, **cheaper).read_back(x, replace(SITE, weight=weight)) - x
        assert after < float(torch.einsum("bthc,hcd,bthd->", error, weight, error)) < 0.95 * before, cheaper
    alike = torch.eye(64).expand(2, -1, -1)
    torch.testing.assert_close(Joint(name).read_back(x, replace(SITE, weight=alike)), nearest_codes)
    value = Site(0, "value", weight=alike)
    torch.testing.assert_close(
        Joint(name, longer=True).read_back(x, value), Dtype(name, longer=True).read_back(x, value)
    )


@pytest.mark.parametrize("chain", [4, 8])
def test_a_trellis_is_searched_for_the_nearest_sequence(chain: int) -> None:
    """Of all that the rule in `Trellis` allows; and a decoder that knows three codes finds the level."""
    x, levels = gaussian(20, 32), torch.linspace(-2, 2, 8)
    found = on_the_trellis(x, levels, chain).view(-1, chain)
    assert torch.isin(found, levels).all()
    paths = torch.tensor([*itertools.product((0, 1), repeat=chain)])
    subsets = 2 * paths.roll(1, 1) + (paths ^ paths.roll(2, 1))  # [paths, chain]
    distance = (x.view(-1, 1, chain, 1) - torch.stack([levels[s::4] for s in range(4)])[subsets]).square()
    least = distance.min(-1).values.sum(-1).min(-1).values
    torch.testing.assert_close((found - x.view(-1, chain)).square().sum(-1), least)
    number = (found.unsqueeze(-1) - levels).abs().argmin(-1)
    lowest = (number >> 1 & 1).roll(-1, 1)
    assert torch.equal(number & 1, lowest ^ lowest.roll(2, 1))


@pytest.mark.parametrize("name", ["tq3", "turboquant25"])
def test_errors_on_a_trellis(name: str) -> None:
    x = gaussian(1, 300, 2, 64)
    error, dtypes = (relative_mse(x, code.read_back(x, SITE)) for code in (Trellis(name), Dtype(name)))
    assert 0.75 * dtypes < error < 0.9 * dtypes


def test_qjl_is_unbiased() -> None:
    x = gaussian(1, 4000, 1, 64)
    length, without = (float((c.read_back(x, SITE) * x).sum() / x.square().sum()) for c in (Qjl(3), Grouped(2)))
    assert length == pytest.approx(1, abs=0.01) and without < 0.95


def test_int8_scales_are_the_least_that_hold_the_largest_value() -> None:
    scales = scalar.decode_scale(torch.arange(MAX_SCALE_BYTE + 1).to(torch.uint8))
    x = torch.cat((scales[1:-1], scales[1:-1] * 1.0001, scales[1:-1] * 0.9999, gaussian(1000).abs()))
    expected = scales[torch.searchsorted(scales, x)]
    assert torch.equal(e5m3_ceiling(x), expected)


def test_rope_is_turned_back(run: Run) -> None:
    x = gaussian(1, TOKENS, HEADS, HEAD_DIM)
    site = Site(0, "key", rope=run.turns(x.transpose(1, 2)))
    modeling = transformers.models.qwen2.modeling_qwen2
    _, expected = modeling.apply_rotary_pos_emb(
        x.transpose(1, 2), x.transpose(1, 2), *(part.unsqueeze(0) for part in site.rope)
    )
    torch.testing.assert_close(turn(x, site, 1), expected.transpose(1, 2))
    torch.testing.assert_close(turn(turn(x, site, 1), site, -1), x)


def test_spectral_keys_are_read_as_the_package_has_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package's encoder that keeps pair 3, channels (6, 7), and nothing else."""
    kept = torch.zeros(HEAD_DIM).index_fill_(0, torch.tensor([6, 7]), 1)
    stand_in = SimpleNamespace(encode=lambda x: x * kept, decode=lambda x: x)
    monkeypatch.setattr("tried_codes.spectral_encoder", lambda *_: stand_in)
    x = gaussian(1, TOKENS, HEADS, HEAD_DIM)
    site = Site(0, "key", rope=run.turns(x.transpose(1, 2)))
    pair = torch.zeros(HEAD_DIM).index_fill_(0, torch.tensor([3, 3 + HEAD_DIM // 2]), 1)
    torch.testing.assert_close(Spectral(1).read_back(x, site), x * pair)  # RoPE turns a pair within itself


def test_widths() -> None:
    costs = {"a": 5.0, "b": 1.0, "c": 0.3, "d": 0.05}
    bits = allocate(costs, 3)
    choices = [dict(zip(costs, c, strict=True)) for c in itertools.product((2, 3, 4), repeat=4) if sum(c) == 12]
    assert bits == min(choices, key=lambda choice: sum(costs[p] * NOISE[b] for p, b in choice.items()))
    assert set(bits.values()) == {2, 3, 4}
    code = Widths({(0, "key"): 4, (1, "key"): 2, (0, "value"): 3}, "key")
    x = gaussian(1, 5, 2, 64)
    assert code.vector_bytes(64) == (34 + 18) / 2
    assert torch.equal(code.read_back(x, Site(1, "key")), Grouped(2).read_back(x, SITE))
    assert torch.equal(code.read_back(x, Site(2, "key")), x)


def test_hadamard_of_the_ring_is_orthonormal() -> None:
    matrix = hadamard(64).forward(torch.eye(64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(64), rtol=0, atol=1e-6)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tried.py", "--model", str(DEMO_MODEL), "--text", str(REPO / "LICENSE"), "--tokens",
                 "256", "--calibration-tokens", "256", "--output", str(tmp_path), "--rows", "^tq[34]$"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    tried.main()
    found = json.loads((tmp_path / "tried.json").read_text())["rows"]
    assert found["tq4"]["slot_bytes"] == 136 and found["tq3"]["slot_bytes"] == 104
    assert 0 < found["tq4"]["kl"] < found["tq3"]["kl"]
    capsys.readouterr()
    tried.main()  # measures nothing again
    again = capsys.readouterr().out
    assert f"{found['tq3']['kl']:.4f} ± " in again and " s\n" not in again
    monkeypatch.setattr(sys, "argv", [*arguments, "--windows", "2"])
    with pytest.raises(SystemExit) as stop:
        tried.main()
    assert stop.value.code == 2 and "holds another run's rows" in capsys.readouterr().err


def test_the_line_goes_through_tq3_and_tq4() -> None:
    rows = {"tq3": {"slot_bytes": 52, "kl": 0.16}, "tq4": {"slot_bytes": 68, "kl": 0.01}}
    assert [tried.line(rows, at) for at in (52, 60, 68, 76)] == pytest.approx([0.16, 0.04, 0.01, 0.0025])


def test_rows_are_compared_with_their_base_in_pairs() -> None:
    rows = {name: {"blocks": blocks} for name, blocks in (
        ("tq3, centred, W64 int8", [1.0, 2.0, 3.0]), ("tq3, weighed, W64 int8", [0.5, 1.0, 1.5]), ("tq3", [1.0] * 3),
        ("tq4, weighed, W64 int8", [1.0] * 3),
    )}  # fmt: skip
    assert [tried.of_base(rows, name) for name in rows] == ["", "0.50 ± 0.14", "", ""]
    for name, base in (
        ("turboquant25, calibrated, weighed, V longer", "turboquant25, calibrated, centred"),
        ("isoquant4, W64 int8, V longer", "isoquant4, W64 int8"),
        ("tq3, weighed, W64 int8, K and V on a trellis", "tq3, centred, W64 int8"),
        ("tq3, weighed, W64 int8, V longer, K rounded jointly, one sweep", "tq3, weighed, W64 int8, V longer"),
    ):
        assert tried.base_of(name) == base


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A few words.")
    tokenizer = SimpleNamespace(encode=str.split)
    with pytest.raises(UserError, match=r"short.txt has fewer than 64 tokens"):
        tried.prose_windows([str(tmp_path / "short.txt")], tokenizer, 64, 1)
