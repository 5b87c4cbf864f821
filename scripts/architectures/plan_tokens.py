#!/usr/bin/env python3
"""KV tokens that `packed-kv plan` predicts, against vLLM's own count: the table of docs/lab/commands.md.

    python scripts/architectures/plan_tokens.py  # without a start: vLLM builds the layers and plans their cache
    python scripts/architectures/plan_tokens.py --start  # engines that start, in their own processes; two ranks, too

A model of each architecture, tiny and random, gets 64 MB of KV cache and requests of 4,096 tokens. vLLM builds its
layers on PyTorch's meta device, groups their KV-cache specs and counts, by the functions of a real start, which only
adds weights, memory and a profile run. For tensor parallelism without a start, the only rank is told that there are
two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from coverage_models import LATENT, MODELS, SIZES
from packed_kv.model.shape import DENSE, parse
from packed_kv.planning.cache import Serving, capacity
from packed_kv_quality.engines import apart, engine, kv_tokens, prepare_environment

MEMORY, CONTEXT, BATCHED_TOKENS, BLOCK = 64 << 20, 4096, 256, 32
RECURRENT = "float32"
"""Dtype of recurrent states that vLLM's CPU platform sets on some processors in any case."""


MORE: dict[str, dict[str, Any]] = {
    "LongcatFlashForCausalLM": {
        **SIZES, **LATENT, "model_type": "longcat_flash", "num_layers": 2, "num_hidden_layers": None,
        "ffn_hidden_size": 256, "expert_ffn_hidden_size": 128, "moe_topk": 2, "zero_expert_num": 2,
        "zero_expert_type": "identity", "routed_scaling_factor": 1.0, "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "IQuestLoopCoderForCausalLM": {
        **SIZES, "model_type": "llama", "loop_num": 2, "loop_window_size": 64, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "HrmTextForCausalLM": {
        **SIZES, "model_type": "hrm_text", "num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 2,
        "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Architectures whose layers have several caches, which no engine of `coverage_models` is made for."""
FOR_LAYERS = {
    "Gemma4ForCausalLM": {
        "global_head_dim": None,
        "per_layer_config": {str(layer): {"head_dim": 128, "num_key_value_heads": 1} for layer in (1, 3)},
    }
}
"""Further fields of the config of an architecture, where transformers 5.19 saved it."""


@dataclass(frozen=True)
class Case:
    """One engine: an architecture of `coverage_models`, on how many ranks, with which layers skipped and with
    which kinds of layers instead of its own. `by_layer`: with a config that lists layers which differ. `on_gpu`: by
    vLLM's rules for CUDA, which need no GPU. `drafts`: tokens that a step drafts, by n-grams."""

    architecture: str
    ranks: int = 1
    skip: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    on_gpu: bool = False
    by_layer: bool = False
    drafts: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """Contents of its config.json."""
        kinds = {"layer_types": list(self.kinds), "num_hidden_layers": len(self.kinds)} if self.kinds else {}
        by_layer = FOR_LAYERS[self.architecture] if self.by_layer else {}
        config = {**MODELS, **MORE}[self.architecture] | {"architectures": [self.architecture]} | kinds | by_layer
        return {name: value for name, value in config.items() if value is not None}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of vLLM's `LLM`."""
        ngram = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": self.drafts}
        return {
            **({"speculative_config": ngram} if self.drafts else {}),
            "max_model_len": CONTEXT, "max_num_batched_tokens": BATCHED_TOKENS, "max_num_seqs": 4, "block_size": BLOCK,
            "kv_cache_memory_bytes": MEMORY, "load_format": "dummy", "skip_tokenizer_init": True,
            "mamba_ssm_cache_dtype": RECURRENT, "tensor_parallel_size": self.ranks,
            "kv_cache_dtype_skip_layers": [str(layer) for layer in self.skip],
        }  # fmt: skip


CASES = {
    "full": Case("LlamaForCausalLM"),
    "sliding and full": Case("Gemma3ForCausalLM"),
    "5 sliding, 4 full": Case(
        "Gemma3ForCausalLM", kinds=("sliding_attention", "full_attention") * 4 + ("sliding_attention",)
    ),
    "sliding": Case("MistralForCausalLM"),
    "chunked": Case("Llama4ForCausalLM"),
    "hybrid, Mamba-2": Case("GraniteMoeHybridForCausalLM"),
    "hybrid, Mamba-1": Case("JambaForCausalLM"),
    "hybrid, short convolutions": Case("Lfm2ForCausalLM"),
    "hybrid in each layer": Case("FalconH1ForCausalLM"),
    "hybrid, gated delta net": Case("Qwen3NextForCausalLM"),
    "full, drafts of 8": Case("LlamaForCausalLM", drafts=8),
    "hybrid, drafts of 3": Case("Qwen3NextForCausalLM", drafts=3),
    "hybrid, Mamba-2, drafts of 8": Case("GraniteMoeHybridForCausalLM", drafts=8),
    "shared, heads of two sizes": Case("Gemma4ForCausalLM"),
    "heads of two sizes, by layer": Case("Gemma4ForCausalLM", by_layer=True),
    "latents, two caches a layer": Case("LongcatFlashForCausalLM"),
    "layers that run twice": Case("IQuestLoopCoderForCausalLM"),
    "padded heads": Case("PhiForCausalLM"),
    "K of 192 channels, V of 128; GPU": Case("MiMoV2FlashForCausalLM", on_gpu=True),
    "skipped layers": Case("LlamaForCausalLM", skip=(0, 3)),
    "skipped layers; GPU": Case("LlamaForCausalLM", skip=(0, 3), on_gpu=True),
    "last layer skipped; GPU": Case("LlamaForCausalLM", skip=(3,), on_gpu=True),
    "sliding, 1 skipped; GPU": Case("MistralForCausalLM", skip=(1,), on_gpu=True),
    "sliding and full, 1 skipped; GPU": Case("Gemma3ForCausalLM", skip=(2,), on_gpu=True),
    "Mamba-2, 1 skipped; GPU": Case("GraniteMoeHybridForCausalLM", skip=(2,), on_gpu=True),
    "full, 2 ranks": Case("LlamaForCausalLM", ranks=2),
    "hybrid, 2 ranks": Case("NemotronHForCausalLM", ranks=2),
}
ONE_OF_A_KIND = (
    "full", "5 sliding, 4 full", "hybrid, Mamba-2", "shared, heads of two sizes", "skipped layers", "full, 2 ranks",
    "heads of two sizes, by layer", "latents, two caches a layer", "layers that run twice", "full, drafts of 8",
    "hybrid, drafts of 3",    "hybrid, Mamba-2, drafts of 8",
)  # fmt: skip
"""Cases that --start starts, and a test counts; those by the rules for CUDA are only counted."""


def planned(case: Case, dtype: str, in_flight_tokens: int) -> int:
    """KV tokens that `packed-kv plan` predicts."""
    model = parse(case.config, case.architecture, case.ranks, RECURRENT, case.drafts)
    serving = Serving(
        CONTEXT, None, in_flight_tokens, frozenset(case.skip), BLOCK, on_gpu=case.on_gpu, drafts=case.drafts
    )
    return capacity(model, DENSE if dtype == "auto" else dtype, serving, MEMORY).tokens


def counted(case: Case, dtypes: Sequence[str]) -> list[tuple[int, int]]:
    """KV tokens by vLLM, without a start, and the tokens that it expects in flight, for each dtype."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case.config))
        with _rules_of_cuda() if case.on_gpu else contextlib.nullcontext():
            return [_counted(folder, case, dtype) for dtype in dtypes]


def _counted(folder: str, case: Case, dtype: str) -> tuple[int, int]:
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.worker_base import get_supported_kv_cache_layouts

    config = EngineArgs(model=folder, kv_cache_dtype=dtype, enforce_eager=True, **case.options).create_engine_config()
    with set_current_vllm_config(config), _ranks(case.ranks):
        dtype_before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            initialize_model(vllm_config=config)
        torch.set_default_dtype(dtype_before)
        for layer in list(get_layers_from_vllm_config(config, AttentionLayerBase).values()):
            # vLLM's own, for AMX, may want weights that are on no meta device
            if type(getattr(layer, "impl", None)).__module__.startswith("packed_kv."):
                layer.impl.process_weights_after_loading(config.model_config.dtype)
        current_platform.update_block_size_for_backend(config)
        specs = get_kv_cache_spec(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
        backends = {layer.get_attn_backend() for layer in layers}
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(config, [layouts], specs.values())
        caches = kv_cache_utils.get_kv_cache_configs(config, [specs], [MEMORY])
        cache = kv_cache_utils.generate_scheduler_kv_cache_config(caches)
        tokens, _ = kv_cache_utils.get_kv_cache_capacity(config, cache)
    return tokens, config.max_in_flight_tokens


@contextlib.contextmanager
def _rules_of_cuda() -> Iterator[None]:
    """Give vLLM's plan CUDA's answers with FlashAttention in place of its CPU platform's and its attention's there: how
    blocks are enlarged, which blocks and layouts there are. Nothing runs."""
    from packed_kv.settings import facts
    from vllm.platforms import current_platform
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    align = Platform.__dict__["update_block_size_for_backend"]
    sizes = staticmethod(lambda _spec=None: [MultipleOf(16)])
    with (
        mock.patch.object(facts, "platform_name", return_value="cuda"),
        mock.patch.object(type(current_platform), "update_block_size_for_backend", align),
        mock.patch.object(CPUAttentionBackend, "supported_kv_cache_layouts", classmethod(lambda cls: layouts)),
        mock.patch.object(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes),
    ):
        yield


@contextlib.contextmanager
def _ranks(number: int) -> Iterator[None]:
    """vLLM's groups of a single process, of which the one of tensor parallelism says that it has `number` ranks."""
    from vllm.distributed import cleanup_dist_env_and_memory, parallel_state

    cleanup_dist_env_and_memory()  # an engine that did not start may have left its own
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        parallel_state.get_tp_group().world_size = number
        try:
            yield
        finally:
            parallel_state.get_tp_group().world_size = 1
            cleanup_dist_env_and_memory()


def started(case: Case, dtypes: Sequence[str]) -> list[tuple[int, int]]:
    """KV tokens by engines that start, and the tokens that they expect in flight."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case.config))
        for dtype in dtypes:
            more = {"distributed_executor_backend": "mp"} if case.ranks > 1 else {}
            with engine(folder, dtype, **case.options, **more) as llm:
                found.append((kv_tokens(llm), llm.llm_engine.vllm_config.max_in_flight_tokens))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", action="store_true", help="start engines")
    parser.add_argument("--dtypes", nargs="+", default=["auto", "tq4", "turboquant25"], help="default: %(default)s")
    options = parser.parse_args()
    prepare_environment(small_model=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    worst = 0.0
    print(f"| layers | architecture | {' | '.join(options.dtypes)} |\n|---|---|{'---|' * len(options.dtypes)}")
    for name in ONE_OF_A_KIND if options.start else CASES:
        case = CASES[name]
        found = apart(started, case, options.dtypes) if options.start else counted(case, options.dtypes)
        cells = []
        for dtype, (tokens, in_flight) in zip(options.dtypes, found, strict=True):
            guess = planned(case, dtype, in_flight)
            worst = max(worst, abs(guess / tokens - 1))
            cells.append(f"{guess:,} / {tokens:,}")
        print(f"| {name} | `{case.architecture}` | {' | '.join(cells)} |", flush=True)
    print(f"\nlargest difference {worst:.2%}")
    return 0 if worst < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
