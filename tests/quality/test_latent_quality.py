"""models/mla-demo and its calibration file: the engine takes the file, and with it tq4 costs less than fp8 does."""

from __future__ import annotations

from types import SimpleNamespace

import latent_quality
import pytest
import torch
from checkout import LATENT_MODEL
from packed_kv.channel_calibration import LayerCalibration
from packed_kv.formats import FORMATS
from packed_kv.settings import calibration
from packed_kv_quality.recall import PROSE
from packed_kv_quality.teacher_forced import token_kl
from transformers import AutoTokenizer
from vllm.config import ModelConfig

RANK, ROPE, TOKENS = 512, 64, 256
ENTRY = "model.layers.{}.self_attn.attn"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> calibration.RankCalibration:
    """Calibration that the engine finds in the model's folder for tq4, on one rank."""
    monkeypatch.setattr(calibration, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(calibration, "get_tensor_model_parallel_rank", lambda: 0)
    model = ModelConfig(str(LATENT_MODEL))
    config = SimpleNamespace(model_config=model, additional_config={}, speculative_config=None)
    rank = calibration.find_calibration(config, FORMATS["tq4"])
    assert rank is not None
    return rank


def test_tq4_of_the_file_costs_less_than_fp8(found: calibration.RankCalibration) -> None:
    model = latent_quality.Model(str(LATENT_MODEL), "cpu")
    layers = range(len(model.layers))
    entries = [found.channels(ENTRY.format(i), 1, RANK, RANK) for i in layers]
    assert all({*entry.key.known()} >= {"mean", "scale"} for entry in entries)
    ids = AutoTokenizer.from_pretrained(LATENT_MODEL).encode(PROSE.read_text(), add_special_tokens=False)
    rows = torch.tensor([ids[:TOKENS]])
    truth = model.logits(rows, [None] * len(layers)).log_softmax(-1)[0]

    def kl(codings: list[latent_quality.Coding]) -> float:
        return token_kl(truth, model.logits(rows, codings).log_softmax(-1)[0]).mean().item()

    def tq4(known: list[LayerCalibration | None]) -> float:
        return kl([latent_quality.packed("tq4", RANK, ROPE, layer, "16", "cpu") for layer in known])

    calibrated = tq4(entries)
    fp8, without = kl([latent_quality.fp8] * len(layers)), tq4([None] * len(layers))
    loss = -truth[:-1].gather(-1, rows[0, 1:, None]).mean()
    print(f"KL: tq4 {calibrated:.5f}, without the file {without:.5f}, fp8 {fp8:.5f}; loss {loss:.2f}")
    assert 0 < calibrated < 0.8 * without < without < fp8
    assert loss < 5.5, "the model knows some English"
