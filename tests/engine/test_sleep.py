"""Sleep mode and weights that are replaced in place: tokens afterwards are those of before, or of the new weights.

The CPU does not sleep: `cpu_sleep` overwrites what a GPU would have taken away. `test_sleep_on_cuda.py` has the real
one.
"""

from __future__ import annotations

from pathlib import Path

import calibration_files
import cpu_sleep
import pytest
import tiny_models
import torch
from harness import engine, keep_chunks
from vllm import LLM, SamplingParams

IDS = torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [{"prompt_token_ids": IDS[first : first + length]} for first, length in ((0, 150), (0, 40), (170, 97))]
SAMPLING = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
SIZES = {"llama": (3, 2, 64, 32), "gemma3": (6, 2, 64, 32), "deepseek_v2": (3, 1, 512, 128)}
"""Layers, KV heads, channels and outlier channels of the calibration file."""
CASES = [("llama", "turboquant25"), ("gemma3", "tq4"), ("deepseek_v2", "tq4")]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, SAMPLING, use_tqdm=False)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_tokens_after_sleep_and_new_weights(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 1, level 2 with weights loaded again, and other weights in place, against an engine that starts with these;
    with a window and a calibration of means and scales."""
    model = tiny_models.save(getattr(tiny_models, name)(), tmp_path / "model")
    file = calibration_files.write(tmp_path, calibration_files.content(*SIZES[name], version=2, mean=0.3))
    options = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512, "recent_tokens": 32,
        "additional_config": {"packed_kv": {"calibration": str(file)}},
    }  # fmt: skip
    keep_chunks(monkeypatch)
    cpu_sleep.install(monkeypatch)
    with engine(model, dtype, **options) as llm:
        before = tokens(llm)
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(llm) == before
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert tokens(llm) == before
        other = tiny_models.write_other_weights(model, tmp_path / "other")
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        llm.reset_prefix_cache()
        replaced = tokens(llm)
    with engine(other, dtype, **options) as llm:
        assert tokens(llm) == replaced != before
