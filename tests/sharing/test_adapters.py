"""Pages of a LoRA adapter are found again by the same weights only, though they were saved again in the same folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from cpu_offload import connector
from harness import engine
from packed_kv.sharing import adapters
from safetensors.torch import save_file
from test_tiers import OPTIONS, PROMPT, SAMPLING, WHOLE
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

RANK = 8


def save_adapter(folder: Path, seed: int) -> None:
    """An adapter of `tiny_models.llama`'s keys and values, with other weights for each seed, of the same size."""
    generator, config, weights = torch.Generator().manual_seed(seed), tiny_models.llama(), {}
    for layer in range(config.num_hidden_layers):
        for name in ("k_proj", "v_proj"):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(RANK, config.hidden_size, generator=generator)
            weights[f"{key}.lora_B.weight"] = torch.randn(2 * 64, RANK, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(described))


@pytest.fixture(autouse=True)
def keys_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what an engine here wraps."""
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", kv_cache_utils._gen_lora_extra_hash_keys)


def test_an_adapter_saved_again_reads_no_old_pages(tmp_path: Path) -> None:
    model, folder = tiny_models.save(tiny_models.llama(), tmp_path / "model"), tmp_path / "adapter"
    options = {**OPTIONS, "kv_transfer_config": connector(tmp_path / "kv"), "recent_tokens": None}

    def ask(adapter: LoRARequest | None) -> tuple[int, list[int]]:
        with engine(model, "tq4", **options, enable_lora=True, max_lora_rank=RANK, max_loras=1) as llm:
            (result,) = llm.generate({"prompt_token_ids": PROMPT}, SAMPLING, use_tqdm=False, lora_request=adapter)
        return result.num_cached_tokens, list(result.outputs[0].token_ids)

    adapter = LoRARequest("ours", 1, str(folder))
    save_adapter(folder, seed=1)
    assert ask(adapter)[0] == 0
    first = ask(adapter)
    assert first[0] == WHOLE
    save_adapter(folder, seed=2)
    found, second = ask(adapter)
    assert found == 0 and second != first[1]
    save_adapter(folder, seed=1)
    assert ask(adapter) == first
    assert ask(None)[0] == 0


def keys(found: adapters.AdapterKeys, folder: Path, **of_request: object) -> list[tuple]:
    return found(SimpleNamespace(lora_request=LoRARequest("ours", 1, str(folder), **of_request)))


def test_keys_name_what_was_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    save_adapter(folder, seed=1)
    plain = kv_cache_utils._gen_lora_extra_hash_keys
    found = adapters.AdapterKeys(plain)
    assert found(SimpleNamespace(lora_request=None)) == []
    before = keys(found, folder)
    assert before[:-1] == plain(SimpleNamespace(lora_request=LoRARequest("ours", 1, str(folder))))
    save_adapter(folder, seed=2)
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    assert keys(found, folder) == before  # the engine has the former weights
    after = keys(found, folder, load_inplace=True)
    assert after[:-1] == before[:-1] and after[-1] != before[-1]
    assert keys(found, folder) == after
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert adapters.adapter_identity(str(moved)) == adapters.adapter_identity(str(folder))
    (folder / "adapter_config.json").write_text("{}")
    assert adapters.adapter_identity(str(moved)) != adapters.adapter_identity(str(folder))


def test_an_adapter_of_the_hub_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(adapters, "try_to_load_from_cache", lambda *_: str(snapshot / "adapter_config.json"))
    assert adapters.adapter_identity("someone/adapter") == snapshot.name
    monkeypatch.setattr(adapters, "try_to_load_from_cache", lambda *_: None)
    assert adapters.adapter_identity("someone/adapter") == "someone/adapter"


def test_a_second_engine_begins_anew() -> None:
    plain = kv_cache_utils._gen_lora_extra_hash_keys
    for _ in range(2):
        adapters.name_adapters()
        found = kv_cache_utils._gen_lora_extra_hash_keys
        assert isinstance(found, adapters.AdapterKeys) and found.keys is plain and not found.contents
        found.contents[1, "path"] = "content"
