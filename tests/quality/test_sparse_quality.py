"""quality/sparse_quality.py on a tiny model: figures are in order, the control's are 0, and tokens decode."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import sparse_quality
import tiny_models
import torch
from checkout import DEMO_MODEL
from packed_kv.codecs.latent_rows import LatentRowCodec
from packed_kv.formats import FORMATS
from packed_kv_quality.recall import PROSE
from sparse_quality import BASELINE, DENSE, FP8, NOISE, Reading

TOKENS, TOP_K = 96, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("deepseek_v32")
    model = tiny_models.save(tiny_models.deepseek_v32(vocab_size=4096), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, path)
    return model


@pytest.fixture(scope="module")
def model(folder: str) -> sparse_quality.Model:
    return sparse_quality.Model(folder, "cpu")


@pytest.fixture(scope="module")
def row() -> torch.Tensor:
    return torch.randint(0, 4096, (TOKENS,), generator=torch.Generator().manual_seed(1))


def codings_of(model: sparse_quality.Model, *names: str) -> dict[str, list]:
    return {name: list(sparse_quality.coding_of(name, model.model.config, {}, "cpu")[1]) for name in names}


def test_figures_are_in_order(model: sparse_quality.Model, row: torch.Tensor) -> None:
    names = BASELINE, NOISE, DENSE, FP8, "tq4", "tq4-rope8", "tq3", "turboquant25"
    found = dict(sparse_quality.measure(model, row[None], codings_of(model, *names), "fp32"))
    kl = {name: tally.kl[0] for name, tally in found.items()}
    same = {name: tally.same[0] for name, tally in found.items()}
    differ = {name: tally.differ[0][1:].mean().item() for name, tally in found.items()}
    print(kl, same, differ, sep="\n")
    assert kl[BASELINE] == same[BASELINE] == differ[BASELINE] == 0 and found[BASELINE].top1 == [1.0]
    assert all(tally.differ[0][0] == 0 for tally in found.values()), "no cache is read before the first layer's picks"
    assert 0 < kl[NOISE] < kl["tq4"] < kl["tq3"] < kl["turboquant25"]
    assert 0 < differ[NOISE] < differ["tq4"] < differ["tq3"] < differ["turboquant25"] < 1
    assert all(same[name] < kl[name] for name in ("tq4", "tq3", "turboquant25")), "changed picks cost, too"
    assert same[DENSE] == kl[DENSE] > 0
    assert 0 < found[BASELINE].mass[0] < 1


@pytest.mark.parametrize("index_keys", sparse_quality.INDEX_KEYS)
def test_every_token_decodes(model: sparse_quality.Model, row: torch.Tensor, index_keys: str) -> None:
    """A token's figures are those of a text that ends with it."""
    (codings,) = codings_of(model, "tq4").values()
    whole = model.log_probs(row, codings, Reading(TOP_K), index_keys)
    for end in (TOP_K, TOP_K + 1, 70):
        last = model.log_probs(row[:end], codings, Reading(TOP_K), index_keys)[-1]
        assert torch.allclose(last, whole[end - 1], atol=1e-4)


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
@pytest.mark.parametrize("rope", ["16", "8"])
def test_rows_are_those_of_pages(name: str, rope: str) -> None:
    codec = LatentRowCodec(FORMATS[name], 512, 64, rope_bits=int(rope))
    torch.manual_seed(0)
    latent, rope_channels = torch.randn(32, 512), torch.randn(32, 64)
    pages = torch.full((2, 16, codec.slot_bytes), 0xFF, dtype=torch.uint8)
    slots = torch.randperm(32)
    codec.write(pages, slots, latent.bfloat16(), rope_channels.bfloat16())
    stored, read_rope = (x.bfloat16().float() for x in codec.read_slots(pages, slots))
    shape = 1, 1, 32, -1
    for_key, for_value, found = sparse_quality.row_coding(codec)(latent.view(shape), rope_channels.view(shape))
    assert torch.equal(for_key[0, 0], codec.restore(stored)) and torch.equal(found[0, 0], read_rope)
    assert torch.equal(for_value[0, 0], codec.restore(stored * codec.value_gain()))


def test_rows_of_fp8_ds_mla() -> None:
    latent = torch.zeros(1, 512)
    latent[0, :4] = torch.tensor([448.0, 17.0, -1.0, 0.01])  # a scale of 1: 17 lies between 16 and 18
    latent[0, 128:130] = torch.tensor([7.0, 0.25])  # 1 / 64, which is exact
    rope = torch.full((1, 64), 1 + 2**-9)
    for_key, for_value, found = sparse_quality.fp8_ds_mla(latent, rope)
    assert for_key[0, :4].tolist() == pytest.approx([448, 16, -1, 0.009765625])
    assert for_key[0, 128:130].tolist() == [7, 0.25] and for_key is for_value
    assert torch.equal(found, torch.ones(1, 64))


def test_index_keys_of_fp8_have_powers_of_two() -> None:
    x = torch.tensor([[500.0, 1.0, 3e-3], [448.0, 1.0, 2e-3], [0.0, 0.0, 0.0]])
    coded = sparse_quality.index_keys_as_fp8(x)
    assert coded.tolist() == [[512.0, 1.0, 0.00390625], [448.0, 1.0, 0.001953125], [0.0, 0.0, 0.0]]
    assert torch.equal(sparse_quality.index_keys_as_fp8(coded), coded)


def test_the_command(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    options = ["--tokens", "192", "--context", "64", "--codings", "auto", "tq4-rope8", "--commit", "abc"]
    sparse_quality.main([folder, "--text", str(PROSE), *options, "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["coding"], row["index_keys"], row["bytes"]) for row in rows] == [
        (coding, keys, size) for keys in ("fp8", "fp32") for coding, size in (("auto", "1152"), ("tq4-rope8", "352"))
    ]
    for row in rows:
        assert (float(row["kl"]) == float(row["picks_differ"]) == 0) == (row["coding"] == "auto")
        assert (row["rows"], row["context"], row["topk"], row["commit"]) == ("3", "64", "24", "abc")
        assert len(row["picks_by_layer"].split()) == 3
    assert rows[0]["perplexity"] != rows[2]["perplexity"], "keys of fp8 pick others"
    with pytest.raises(SystemExit):
        sparse_quality.main([folder, "--text", str(PROSE), "--context", "24"])
    assert "--context 24: every token reads all up to 24" in capsys.readouterr().err
