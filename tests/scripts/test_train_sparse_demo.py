"""scripts/train_sparse_demo.py: a tiny model and its indexers learn, and transformers' own class has the same model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sparse_model
import torch
import train_sparse_demo
from packed_kv_quality.recall import PROSE
from train_mla_demo import PIECE, split
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def text() -> str:
    prose = PROSE.read_text()
    return prose * (PIECE * 11 // len(prose) + 1)


def test_a_tiny_model(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "text", tmp_path / "model"
    file.write_text(text)
    stages = ["--dense", "3:0.1:3e-2:1000", "--indexer", "2:0:1e-2:1000", "--sparse", "3:0.1:3e-2:1000"]
    train_sparse_demo.main([str(file), str(out), "--tiny", *stages])
    printed = capsys.readouterr().out
    print(printed)
    held_out = {
        stage: [*map(float, re.findall(rf"^{stage} .*held out ([\d.]+)", printed, re.MULTILINE))]
        for stage in ("dense", "sparse", "kept")
    }
    assert held_out["dense"][-1] < held_out["dense"][0] and held_out["sparse"][-1] < held_out["sparse"][0]
    assert held_out["kept"] == [min(held_out["sparse"])]
    assert "transformers has 100.000% of the picks" in printed
    assert (out / "held_out.txt").read_text() == "".join(split(text)[1])
    row = torch.tensor([AutoTokenizer.from_pretrained(out).encode(text[:2000])[:96]])
    train_sparse_demo.check(str(out), row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_model, "apply_rotary_pos_emb", lambda query, key, *_args, **_options: (query, key))
        with pytest.raises(ValueError, match="transformers has another model"):
            train_sparse_demo.check(str(out), row)


def test_indexers_learn_what_attention_reads() -> None:
    """A layer's loss is the KL of its indexer's softmax from attention; the index keys that it asks for lower it."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 48, 16), torch.randn(1, 2, 48, 16)
    reading = train_sparse_demo.Reading(8, None)
    weights = (query @ key.transpose(2, 3)).masked_fill(~sparse_model.causal(48, "cpu"), -torch.inf).softmax(-1)
    true = weights.mean(1).clamp_min(1e-30).log()
    for scores in (true, torch.zeros(1, 48, 48)):
        output = reading(None, query, key, key, scores, 1.0)
        assert torch.allclose(output, weights @ key, atol=1e-5)
    of_true, of_zeros = reading.taken(reading.losses).tolist()
    assert abs(of_true) < 1e-5 < 0.5 < of_zeros
    with torch.no_grad():
        reading(None, query, key, key, true, 1.0)
    share = weights.mean(1)[:, 8:].topk(8, dim=-1).values.sum(-1).mean()
    assert torch.allclose(reading.taken(reading.mass), share)


def test_tokens_read_their_picks() -> None:
    torch.manual_seed(0)
    query, key, scores = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 20, 20)
    output = train_sparse_demo.Reading(4, 4)(None, query, key, key, scores, 0.5)
    for token in range(20):
        picked = scores[0, token, : token + 1].topk(min(4, token + 1)).indices
        for head in range(2):
            weights = (key[0, head, picked] @ query[0, head, token] * 0.5).softmax(0)
            assert torch.allclose(output[0, head, token], weights @ key[0, head, picked], atol=1e-5)
