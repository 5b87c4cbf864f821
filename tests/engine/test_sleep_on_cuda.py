"""Sleep mode on CUDA, in graphs: tokens after waking are those of before, and weights are replaced in place.

Each engine has a process of its own: vLLM's allocator serves one a process. CI has no GPU (`test_sleep.py` has what a
CPU can test); `scripts/gpu_tests.sh` runs these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibration_files
import pytest
import tiny_models
import torch
from harness import KV_CACHE_BYTES, engine
from packed_kv_quality.engines import apart
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IDS = torch.randint(3, 250, (900,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [{"prompt_token_ids": IDS[37 * i :][:n]} for i, n in enumerate((300, 17, 129, 64, 411))]
SAMPLING = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, len(PROMPTS)]}
SIZES = {"llama": (3, 2, 128, 32), "deepseek_v2": (3, 1, 512, 128)}
"""Layers, KV heads, channels and outlier channels of the calibration file."""
CASES = [("llama", "tq4", "auto"), ("llama", "turboquant25", "triton"), ("deepseek_v2", "tq4", "auto")]


def save(name: str, folder: Path) -> str:
    """The model, of a shape that both kernels serve, with a calibration file beside it."""
    heads = {"llama": {"head_dim": 128}, "deepseek_v2": {"qk_nope_head_dim": 128, "v_head_dim": 128}}
    model = tiny_models.save(getattr(tiny_models, name)(**heads[name]), folder)
    calibration_files.write(folder, calibration_files.content(*SIZES[name], version=2, mean=0.3))
    return model


def options(file: str, kernel: str) -> dict[str, Any]:
    return {
        "dtype": "float16", "skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": len(PROMPTS),
        "enforce_eager": False, "compilation_config": GRAPHS, "recent_tokens": None,
        "additional_config": {"packed_kv": {"calibration": file, "decode_kernel": kernel}},
    }  # fmt: skip


def tokens(llm: LLM) -> list[list[int]]:
    """Return the tokens of all prompts together, with nothing of them in the cache."""
    llm.reset_prefix_cache()
    return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, SAMPLING, use_tqdm=False)]


def answer(model: str, dtype: str, given: dict[str, Any]) -> list[list[int]]:
    with engine(model, dtype, **given) as llm:
        return tokens(llm)


def answer_and_sleep(
    model: str, dtype: str, other: str, given: dict[str, Any]
) -> tuple[dict[str, list[list[int]]], list[int]]:
    """Tokens at first and after each change, and the bytes of the card that each sleep gave back."""
    freed = []

    def sleep(level: int) -> None:
        before, _ = torch.cuda.mem_get_info()
        llm.sleep(level=level)
        after, _ = torch.cuda.mem_get_info()
        freed.append(after - before)

    with engine(model, dtype, enable_sleep_mode=True, **given) as llm:
        found = {"at first": tokens(llm), "again": tokens(llm)}
        sleep(1)
        llm.wake_up()
        found["level 1"] = tokens(llm)
        sleep(2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        found["level 2"] = tokens(llm)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        found["other weights"] = tokens(llm)
        sleep(2)
        llm.wake_up()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        found["level 2, the first weights"] = tokens(llm)
    return found, freed


@pytest.mark.parametrize(("name", "dtype", "kernel"), CASES)
def test_tokens_after_sleep_and_new_weights(name: str, dtype: str, kernel: str, tmp_path: Path) -> None:
    """With the window that an engine has by default, and a calibration of means and scales."""
    model = save(name, tmp_path / "model")
    given = options(f"{model}/turboquant_kv.json", kernel)
    other = tiny_models.write_other_weights(model, tmp_path / "other")
    found, freed = apart(answer_and_sleep, model, dtype, other, given)
    replaced = apart(answer, other, dtype, given)
    print(f"{name}: freed {[round(count / 2**20) for count in freed]} MiB; {found}")
    before = found["at first"]
    assert min(freed) >= KV_CACHE_BYTES
    assert found["again"] == before, "not even without sleep"
    assert found["level 1"] == before
    assert found["level 2"] == before
    assert found["other weights"] == replaced != before
    assert found["level 2, the first weights"] == before
