"""scripts/make_outlier_model.py: large channels in keys and values, the same logits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import make_outlier_model
import pytest
import torch
from checkout import DEMO_MODEL
from safetensors import safe_open
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
SCRIPT = Path(make_outlier_model.__file__)
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
}
TOKENS = torch.randint(256, (1, 300), generator=torch.Generator().manual_seed(1))


def run(folder: Path) -> tuple[torch.Tensor, list]:
    """Logits [tokens, vocabulary] in fp32, and (key, value) [KV heads, tokens, head_dim] of each layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        output = model(TOKENS, use_cache=True)
    return output.logits[0], [(layer.keys[0], layer.values[0]) for layer in output.past_key_values.layers]


def saved(config: str, folder: Path, **options: object) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SMALL, **options}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # transformers starts all of these alike
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("seed", [0, 1])
def test_demo_model_keeps_its_logits(seed: int, tmp_path: Path) -> None:
    """Six of 128 key channels (three pairs) and five of 128 value channels of each head, others as they were."""
    make_outlier_model.make(
        DEMO_MODEL, tmp_path / "out", make_outlier_model.Outliers(scale=12, value_scale=8, seed=seed)
    )
    (plain, plain_cache), (logits, cache) = run(DEMO_MODEL), run(tmp_path / "out")
    assert (logits - plain).abs().max() < 1e-4 * plain.abs().max()
    chosen = []
    for layers in zip(plain_cache, cache, strict=True):
        for (before, after), factor, count in zip(zip(*layers, strict=True), (12, 8), (6, 5), strict=True):
            ratio = (after.double().norm(dim=1) / before.double().norm(dim=1)).float()  # [KV heads, head_dim]
            large = (ratio - factor).abs() < 1e-3
            assert large.sum(-1).tolist() == [count, count]
            assert ((ratio - 1).abs()[~large] < 1e-3).all()
            if count == 6:
                assert torch.equal(large[:, :64], large[:, 64:])
            chosen.append(large)
    assert len({tuple(head.tolist()) for large in chosen for head in large}) == 24, "heads share their channels"


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("LlamaConfig", {"num_key_value_heads": 4}),
        ("LlamaConfig", {"num_key_value_heads": 1, "attention_bias": True}),
        ("MistralConfig", {}),
        ("Qwen2Config", {}),
        ("Qwen3Config", {}),
    ],
    ids=["mha", "mqa_with_biases", "mistral", "biases", "norms_of_keys"],
)
def test_other_models_keep_their_logits(config: str, options: dict, tmp_path: Path) -> None:
    source = saved(config, tmp_path / "in", **options)
    make_outlier_model.make(source, tmp_path / "out", make_outlier_model.Outliers(fraction=0.1))
    (plain, (*_, (key, value))), (logits, (*_, (large_key, large_value))) = run(source), run(tmp_path / "out")
    assert (logits - plain).abs().max() < 1e-4 * plain.abs().max()
    assert (large_key.norm(dim=1) / key.norm(dim=1)).amax(-1).tolist() == pytest.approx([12] * len(key), rel=1e-4)
    assert (large_value.norm(dim=1) / value.norm(dim=1)).amax(-1).tolist() == pytest.approx([12] * len(key), rel=1e-4)


@pytest.mark.parametrize(("config", "scale"), [("LlamaConfig", 12.0), ("LlamaConfig", 1.0), ("Qwen2Config", 12.0)])
def test_an_offset_shifts_keys_and_changes_logits_a_little(config: str, scale: float, tmp_path: Path) -> None:
    source = saved(config, tmp_path / "in")
    outliers = make_outlier_model.Outliers(fraction=0.1, scale=scale, offset=40.0)
    make_outlier_model.make(source, tmp_path / "out", outliers)
    (plain, plain_cache), (logits, cache) = run(source), run(tmp_path / "out")
    large = [14, 15, 30, 31]  # the two pairs of the lowest frequencies
    shifts = torch.stack([after[0] - before[0] for after, before in zip(cache[:1], plain_cache[:1], strict=True)])
    low = shifts[..., large].mean(-2) - (scale - 1) * plain_cache[0][0][..., large].mean(-2)
    assert (low.unflatten(-1, (2, 2)).norm(dim=-2) > 30).all()
    p, q = plain.log_softmax(-1), logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    print(f"{config}: mean KL {kl:.4f} nats of an offset of 40")
    assert 1e-6 < kl < 1


def test_command_copies_the_rest_and_shards(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(DEMO_MODEL, source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    (source / "turboquant_kv.json").write_text("{}")
    names = sorted(tensors)
    for number, part in enumerate((names[:20], names[20:]), 1):
        chosen = {name: tensors[name] for name in part}
        save_file(chosen, source / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    command = [sys.executable, SCRIPT, source, tmp_path / "out", "--fraction", "0.04", "--scale", "12", "--seed", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "6 of 128 key channels x 12 and 5 value channels x 12" in result.stdout
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {path.name for path in source.iterdir()} - {"turboquant_kv.json"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, framework="pt") as file:
            changed = any(part in name for part in ("k_proj", "q_proj", "v_proj", "o_proj"))
            assert (file.get_tensor(name).dtype == torch.float32) == changed, name
    assert sorted(index["weight_map"]) == names
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert again.stderr == f"make_outlier_model: {tmp_path / 'out'} exists already\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoint"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor"),
        ({"num_hidden_layers": 7}, "has 6 tensors"),
    ],
    ids=str,
)
def test_refused(change: dict, words: str, tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "in")
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(make_outlier_model.ModelError, match=words):
        make_outlier_model.make(tmp_path / "in", tmp_path / "out", make_outlier_model.Outliers())
    assert not (tmp_path / "out").exists()


def test_an_offset_needs_a_bias(tmp_path: Path) -> None:
    source = saved("MistralConfig", tmp_path / "in")
    with pytest.raises(make_outlier_model.ModelError, match="keys of model_type mistral have no bias"):
        make_outlier_model.make(source, tmp_path / "out", make_outlier_model.Outliers(offset=1.0))
