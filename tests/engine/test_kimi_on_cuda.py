"""Kimi-Linear on CUDA, tiny and random: decodes in graphs are eager ones, and near bf16's.

The tests need vLLM 0.33.0 with its patches, and CUTLASS' Python (nvidia-cutlass-dsl), which the model imports;
`scripts/gpu_tests.sh picked` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import coverage_engine
import pytest
import torch
from coverage_models import MODELS
from harness import engine, mean_kl, teacher_forced_logits
from packed_kv_quality.engines import attention_layers
from vllm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NAME = "KimiLinearForCausalLM"
TOKEN_IDS = torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(1)).tolist()
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}


@pytest.fixture
def kimi_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable:
    pytest.importorskip("cutlass", reason="the model imports CUTLASS' Python")
    from triton.runtime.autotuner import Autotuner
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    monkeypatch.setattr(DummyModelLoader, "load_weights", coverage_engine.set_weights)
    monkeypatch.setattr(Autotuner, "run", Autotuner.run)  # which is put back
    coverage_engine.keep_one_configuration()
    coverage_engine.register(NAME)
    (tmp_path / "config.json").write_text(json.dumps(MODELS[NAME]))
    return partial(
        engine, str(tmp_path), dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=1024,
        max_num_seqs=4, enable_prefix_caching=False, recent_tokens=None,
    )  # fmt: skip


def decodes(llm: LLM) -> torch.Tensor:
    """Logits of a text, a step for each of its tokens: all but the first are decodes, past the recent window."""
    return teacher_forced_logits(llm, TOKEN_IDS, 1).cpu()


def without_latents(llm: LLM) -> torch.Tensor:
    """The same, where attention over latents adds nothing."""
    for layer in attention_layers(llm):
        layer.W_UV.zero_()
    return decodes(llm)


def test_decodes_in_graphs_are_eager_ones_and_near_bf16s(kimi_engine: Callable) -> None:
    """Attention over latents is what they would lack if it were wrong: a small part of that is lost to the codec, and
    none of it to the graphs."""
    with kimi_engine("auto") as llm:
        plain = decodes(llm)
    with kimi_engine("tq4") as llm:
        (backend,) = {layer.get_attn_backend().get_name() for layer in attention_layers(llm)}
        eager, prompt = decodes(llm), teacher_forced_logits(llm, TOKEN_IDS, len(TOKEN_IDS)).cpu()
        lacking = mean_kl(plain, without_latents(llm))
    with kimi_engine("tq4", **GRAPHS) as llm:
        captured = decodes(llm)
    with kimi_engine("auto", **GRAPHS) as llm:
        of_bf16 = mean_kl(plain, decodes(llm))
    found = {"eager": mean_kl(plain, eager), "graphs": mean_kl(plain, captured), "a prompt": mean_kl(plain, prompt)}
    apart = mean_kl(eager, captured)
    print(
        f"KL of {backend} from bf16 {found}; graphs from eager {apart:.1e}, bf16's {of_bf16:.1e}; lacking {lacking:.4f}"
    )
    assert backend.startswith("PACKED_KV")
    assert all(error < lacking / 10 for error in found.values())
    assert apart < lacking / 100 + 2 * of_bf16
