"""A file is compared with none on text that it was not made from: one of a word is refused, one of few words noted."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import tiny_models
import torch
from checkout import DEMO_MODEL
from packed_kv.codecs.rope import spectrum_of_blocks
from packed_kv.layout import MEAN_BLOCK
from packed_kv.model.rope import Rope
from tq_calibrate import judge as judging
from tq_calibrate.attended import Scores
from tq_calibrate.cli import main
from tq_calibrate.ropes import ModelRope
from tq_calibrate.sums import LayerSums, Sums
from tq_calibrate.text import held_out_sequences, load_tokenizer, read_text, token_sequences

OPTIONS = ("--tokens", "1024", "--context", "256")


def run(out: Path, *arguments: str, text: str = "") -> int:
    if text:
        (out.parent / "corpus.txt").write_text(text)
        arguments = ("--text", str(out.parent / "corpus.txt"), *arguments)
    return main(["model", str(DEMO_MODEL), *OPTIONS, "--out", str(out), *arguments])


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_corpus_of_one_word_is_refused_and_the_file_stays(engine: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "file.json"
    out.write_text("as it was")
    assert run(out, "--engine", engine, text="the " * 10000) == 2
    error = capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]
    assert (
        error.startswith("tq-calibrate: the file would be worse than none (") and "times the error of scores" in error
    )
    figure = float(error.partition("(")[2].partition(" ")[0])
    assert 2 < figure < 6
    assert error.endswith(f"; give more varied text than --text {tmp_path}/corpus.txt, or leave --text out")
    assert out.read_text() == "as it was"


@pytest.mark.parametrize("text", ["", "\n".join(sorted(topics.values()))[5000:8000] * 10], ids=["default", "a page"])
def test_text_that_varies_is_taken_without_a_word(text: str, tmp_path: Path, capsys) -> None:
    assert run(tmp_path / "file.json", text=text) == 0
    assert "tq-calibrate:" not in capsys.readouterr().err


def test_a_text_of_few_words_is_noted(tmp_path: Path, capsys) -> None:
    assert run(tmp_path / "file.json", text="the cat " * 10000) == 0
    (line,) = (line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "tq-calibrate:" in line)
    assert line.startswith("tq-calibrate: channels hardly vary in this text (keys vary 0.")
    assert (tmp_path / "file.json").is_file()


def test_held_out_tokens_are_not_those_of_the_text() -> None:
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    seen = token_sequences(read_text([]), tokenizer, 2048, 256, 0)
    joined = " ".join(str(token) for sequence in seen for token in sequence)
    held = held_out_sequences([], tokenizer, 2048, 256, 0)
    assert [len(sequence) for sequence in held] == [256]
    assert " ".join(map(str, held[0][:32])) not in joined
    beyond = token_sequences(read_text([]), tokenizer, 2048 + 256, 256, 0)
    assert held[0] == beyond[-1]
    assert sum(map(len, held_out_sequences(["of a user"], tokenizer, 10**6, 512, 0))) == 1024
    assert sum(map(len, held_out_sequences([], tokenizer, 256, 256, 0))) == 128


def sums_of(key: torch.Tensor, ropes: list[ModelRope]) -> Sums:
    """Return the sums of one sequence of keys [tokens, heads, head_dim], which are queries and values, too."""
    sums = Sums(ropes)
    columns = torch.ones(key.shape[1] * key.shape[2], dtype=torch.float64)
    sums.add(0, key, key, key, torch.arange(len(key)), Scores(0.1), lambda: columns)
    return sums


def test_squares_about_another_texts_mean() -> None:
    """Without RoPE they are those of the keys themselves, which are weighed alike."""
    torch.manual_seed(0)
    key, mean = torch.randn(200, 2, 64).double() + 2, torch.randn(2, 64).double()
    layer = sums_of(key, []).layers[0]
    expected = (key[1:] - mean).square().mean(0)
    torch.testing.assert_close(layer.squares_about(mean, None, even=1.0), expected)
    torch.testing.assert_close(layer.squares_about(None, None, even=1.0), key[1:].square().mean(0))


def test_squares_about_a_mean_that_rope_turns() -> None:
    """As `stored_squares` of the text's own mean; with another, nearly those of keys less the block's mean."""
    torch.manual_seed(0)
    tokens, frequencies = 16 * MEAN_BLOCK, tuple((1 / 1e4 ** (torch.arange(0, 64, 2) / 64)).tolist())
    rope = ModelRope(Rope(frequencies), {}, tokens)
    mean = torch.randn(1, 64).double()
    angle = torch.arange(tokens).double()[:, None] * torch.tensor(frequencies).double()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    before = torch.randn(tokens, 1, 64).double() * torch.linspace(0.5, 2, 64) + torch.randn(1, 64)
    a, b = before.chunk(2, -1)
    key = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    layer = sums_of(key, [rope]).layers[0]
    found = layer.statistics(even=1.0)
    torch.testing.assert_close(layer.squares_about(found.key_mean, rope, even=1.0), found.key_variance)
    table = spectrum_of_blocks(rope.rope, 64, 16).double().repeat_interleave(MEAN_BLOCK, 0)  # cos and sin of a block
    c, s = (table[:, at, None, :32] for at in (0, 1))
    first, second = mean.chunk(2, -1)
    stored = key - torch.cat((first * c - second * s, second * c + first * s), -1)
    other = layer.squares_about(mean, rope, even=1.0)
    torch.testing.assert_close(other, stored[1:].square().mean(0), rtol=0.05, atol=0.1)
    assert (other - found.key_variance).abs().max() > 0.5


def test_of_latents_too(tmp_path: Path, capsys) -> None:
    """Their RoPE channels keep their own mean squares and are judged with no file."""
    torch.manual_seed(0)
    layer = LayerSums(1, (96, 64), torch.ones(2 * 64))
    key = torch.randn(200, 1, 96) + 3
    layer.add(torch.randn(200, 2, 96), key, key[..., :64], torch.arange(200), Scores(0.1))
    sums = Sums()
    sums.layers, sums.has_latents = {0: layer}, True
    statistics = sums.statistics()
    choices = {0: judging_choice(statistics)}
    verdict = judging.judge(sums, statistics.layers, choices)
    assert verdict.variety == pytest.approx(1) and verdict.keys < 0.2


def judging_choice(statistics):
    from tq_calibrate.choose import choose

    return choose(statistics.layers[0], "turboquant35")


def test_a_random_model_is_not_refused(tmp_path: Path) -> None:
    """Its channels are alike, so that a file is worth nothing, and costs nothing."""
    model = Path(tiny_models.save(tiny_models.llama(vocab_size=4096), tmp_path / "model"))
    for file in DEMO_MODEL.glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    assert main(["model", str(model), *OPTIONS, "--engine", "transformers"]) == 0
