"""Reading the pages that matter: a large budget reads all, statistics give scores, questions are in their prompts."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path

import calibration_files
import page_selection
import page_tasks
import pytest
import torch
from checkout import REPO
from packed_kv.calibration_file import load
from page_model import Llama, Prompt, Reading, Rows, Store, forced
from transformers import AutoTokenizer

PROSE = REPO / "quality" / "packed_kv_quality" / "prose.txt"
IDS = torch.randint(3, 4000, (200,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model(demo_model: str) -> Llama:
    return Llama(Path(demo_model), "cpu")


def test_a_budget_of_the_whole_context_reads_all(model: Llama) -> None:
    """And one of 160 tokens does not; texts behind a prompt do not see each other."""
    prompt = Prompt(*model.prefill(IDS[:128]), Store("isoquant4", model))
    texts = [IDS[128:196], IDS[150:160]]
    rows = Rows.of(texts, 128, "cpu")
    everything = forced(model, prompt, rows, Reading("isoquant4"))
    for rule in ("gaussian", "mean", "bounds", "oracle"):
        found = forced(model, prompt, rows, Reading("isoquant4", 16, 256, rule))
        torch.testing.assert_close(found, everything)
        assert not torch.allclose(forced(model, prompt, rows, Reading("isoquant4", 16, 160, rule)), everything)
    alone = forced(model, prompt, Rows.of(texts[1:], 128, "cpu"), Reading("isoquant4"))
    torch.testing.assert_close(everything[len(texts[0]) :], alone, atol=0.05, rtol=0.05)


def test_forced_rows_are_those_of_greedy_decoding(model: Llama) -> None:
    """With exact keys and values, each forced token is followed by what a decode step says; so also with all pages."""
    prompt = Prompt(*model.prefill(IDS[:64]), Store("bf16", model))
    made = model.greedy(prompt.keys, prompt.values, IDS[64], 6)
    log_probs = forced(model, prompt, Rows.of([[IDS[64], *made[:-1]]], 64, "cpu"), Reading("bf16"))
    assert log_probs.argmax(-1).tolist() == made


def test_a_page_has_the_mean_score_of_its_keys(model: Llama, tmp_path: Path) -> None:
    """Also of centred and scaled keys, whose means depend on the position: what was taken off is put back."""
    heads = {"layers": model.layers, "kv_heads": model.kv_heads, "head_size": model.size, "count": 32}
    file = load(str(calibration_files.write(tmp_path, calibration_files.content(**heads, version=3))))
    prompt = Prompt(*model.prefill(IDS[:192]), Store("isoquant4", model, file))
    q = torch.randn(model.kv_heads, 2, 3, model.size, generator=torch.Generator().manual_seed(1))
    mean, _ = prompt.pages(1, 16, "gaussian")
    found = prompt.store.query(1, q) @ mean[:, None].transpose(-1, -2)
    exact = q @ prompt.far_keys[1].float().unflatten(1, (-1, 16)).mean(2)[:, None].transpose(-1, -2)
    found, exact = (x[..., 1:] for x in (found, exact))  # the first token has a mean of its own
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_the_rest_of_each_question_is_in_its_prompt(demo_model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    made = page_tasks.prompts(tokenizer, [PROSE.read_text(encoding="utf-8")], 1024, 2, 3)
    assert [len(ids) for ids, _ in made] == [1024] * 4
    kinds = [question.kind for _, questions in made for question in questions]
    assert [kinds.count(kind) for kind in ("single", "multi_key", "variables", "common_words")] == [6, 6, 6, 2]
    assert kinds.count("quote") >= 4
    for ids, questions in made:
        text = tokenizer.decode(ids)
        for question in questions:
            asked = tokenizer.decode(question.ids).strip()
            parts = asked.split(".\n") if question.kind == "variables" else [asked.split()[-1]]
            assert question.answers and all(part in text for part in parts), asked


def test_pieces_of_a_text_score_other_tokens() -> None:
    """Of 100 tokens, 4 pieces of 70 that begin with one of the model's: their last 10 tokens are apart."""
    tokenizer = Namespace(bos_token_id=-1, encode=lambda text, **_: [*range(int(text))])
    found = page_selection.pieces(tokenizer, "100", 70, 10, 9)
    assert [(ids[0], ids[1], len(ids)) for ids in found] == [(-1, 0, 70), (-1, 10, 70), (-1, 20, 70), (-1, 31, 70)]
    assert [len(page_selection.pieces(tokenizer, str(size), 70, 10, 9)) for size in (68, 69, 1000)] == [0, 1, 9]


def test_a_row_of_each_reading_is_written(demo_model: str, tmp_path: Path) -> None:
    out = tmp_path / "found.csv"
    arguments = ["--model", demo_model, "--text", str(PROSE), "--length", "512", "--tokens", "8", "--windows", "1"]
    arguments += ["--prompts", "1", "--each", "2", "--pages", "16", "--budgets", "192", "--dtypes", "tq4"]
    assert page_selection.main([*arguments, "--device", "cpu", "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["dtype"], row["rule"]) for row in rows] == [
        ("bf16", ""), ("fp8", ""), ("fp8 attention", ""), ("tq4", ""), ("tq4", "gaussian"), ("tq4", "bounds")
    ]  # fmt: skip
    assert float(rows[0]["kl"]) == 0 < float(rows[1]["kl"]) < float(rows[2]["kl"])
    assert rows[0]["greedy"] == "8.0" and rows[0]["ranked"].endswith((" of 8", " of 9"))
