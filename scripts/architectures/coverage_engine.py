"""One architecture of model_coverage.py, in a process of its own: its engine in bf16, then with a packed dtype."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from coverage_models import MODELS
from packed_kv_quality.engines import engine, kv_tokens

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS, PROMPT_TOKENS = 4, 200
CHUNK = 64
"""Tokens of a step, and those at the end of a prompt that are scored: all of them have a prefix in the cache."""
VOCABULARY = 256
KV_CACHE_BYTES = 64 << 20
MAX_MODEL_LEN = 4096
MEMORY_SHARE = 0.02
"""Share of the device's memory that vLLM wants to find free; the engines share it."""
UNSCALED = ("gemma3n_text", "gemma4_text")
"""Types of models whose scores have no scale but that of trained norms."""
BACKENDS = {"bloom": "TRITON_ATTN", "gemma4_text": "TRITON_ATTN", "mimo_v2_flash": "TRITON_ATTN_DIFFKV"}
"""Type of model -> the backend of `auto` on CUDA, where vLLM's choice lacks ALiBi or needs the CUTLASS DSL."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}


@dataclass(frozen=True)
class Outputs:
    """Outputs of an engine: log-probabilities of the last `CHUNK` tokens of each prompt, and its greedy tokens."""

    scored: list[list[float]]
    tokens: list[list[int]]

    def distance(self, other: Outputs) -> float:
        """Mean absolute difference of the log-probabilities, in nats."""
        return (torch.tensor(self.scored) - torch.tensor(other.scored)).abs().mean().item()

    def equal_tokens(self, other: Outputs) -> float:
        """Share of the greedy tokens before the first that differs."""
        pairs = [zip(ours, theirs, strict=True) for ours, theirs in zip(self.tokens, other.tokens, strict=True)]
        equal = [len(list(takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs]
        return sum(equal) / sum(map(len, self.tokens))


def run(architecture: str, dtypes: Sequence[str], new_tokens: int, results: str, log: str) -> None:
    """Measure one of `MODELS` and append what was found to the file `results`, a JSON object a line.

    The first of `dtypes` is what the others are compared with; `new_tokens` are made behind each prompt. An error ends
    the process, after a line that names it.
    """
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)

    def emit(dtype: str, **found: object) -> None:
        with Path(results).open("a") as file:
            file.write(json.dumps({"dtype": dtype, **found}) + "\n")

    dtype = dtypes[0]
    try:
        register(architecture)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODELS[architecture]))
            baseline = None
            for dtype in dtypes:
                with start(folder, dtype) as llm:
                    emit(dtype, **facts(llm))
                    found = outputs(llm, prompts(), new_tokens)
                    compared = scales(llm, found, new_tokens) if baseline is None else compare(found, baseline)
                    baseline = baseline or found
                    emit(dtype, **compared, done=True)
    except BaseException as error:  # recorded, and raised again
        emit(dtype, error=type(error).__name__, message=str(error))
        raise


def register(architecture: str) -> None:
    """Import the model here: vLLM would start a process to look at its class."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def start(folder: str, dtype: str):  # -> AbstractContextManager[LLM]
    """An engine with random weights, prompts in chunks and, on CUDA, graphs of its decodes."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = set_weights
    options: dict[str, Any] = {}
    config = json.loads(Path(folder, "config.json").read_text())
    if torch.cuda.is_available():
        options = {"enforce_eager": False, "compilation_config": GRAPHS, "gpu_memory_utilization": MEMORY_SHARE}
        options["additional_config"] = {"gdn_prefill_backend": "triton"}  # the default needs FlashInfer
        if dtype == "auto":
            options["attention_backend"] = BACKENDS.get(config["model_type"])
        keep_one_configuration()
    if "text_config" in config:
        options["language_model_only"] = True
    return engine(
        folder, dtype, load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=CHUNK, max_num_seqs=PROMPTS,
        enable_prefix_caching=False, **options,
    )  # fmt: skip


def keep_one_configuration() -> None:
    """Spare Triton the search for its kernels' fastest configuration, which takes a hybrid model a minute."""
    from triton.runtime.autotuner import Autotuner

    search = Autotuner.run

    def run_first(self: Autotuner, *arguments: Any, **options: Any) -> Any:
        self.configs = self.configs[:1]
        return search(self, *arguments, **options)

    if search.__name__ != run_first.__name__:
        Autotuner.run = run_first


def set_weights(_loader: Any, model: torch.nn.Module, config: Any) -> None:
    """Fill the weights of a model, the same in every engine.

    vLLM's dummy weights are almost 0, which makes all tokens equally likely. Matrices [..., out, in] get a
    standard deviation of 1 / sqrt(in), which keeps the size of activations, norms and biases what is usual.
    """
    for name, weight in model.state_dict().items():
        if not weight.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        random = torch.rand if weight.dim() < 2 else torch.randn
        values = random(weight.shape, generator=generator)
        if name.endswith(".A"):  # of a state-space model: how fast its states decay
            values = -0.5 - 0.5 * values.abs().clamp(max=1)
        elif weight.dim() < 2:
            values = values / 2 + 0.5 if name.endswith(".weight") else values - 0.5
            if name.endswith("q_norm.weight") and config.hf_text_config.model_type in UNSCALED:
                values /= len(values) ** 0.5
        else:
            values /= weight.shape[-1] ** 0.5
        weight.copy_(values)


def prompts(seed: int = 0) -> list[list[int]]:
    """Random token ids; another seed changes all but the last `CHUNK` of each prompt."""
    prefix_of, tail_of = (torch.Generator().manual_seed(number) for number in (1 + seed, 0))
    prefixes = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT_TOKENS - CHUNK), generator=prefix_of)
    return torch.cat([prefixes, torch.randint(3, VOCABULARY, (PROMPTS, CHUNK), generator=tail_of)], 1).tolist()


def outputs(llm: LLM, token_ids: list[list[int]], new_tokens: int) -> Outputs:
    """Run all prompts together."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    results = llm.generate([{"prompt_token_ids": ids} for ids in token_ids], sampling, use_tqdm=False)
    scored = []
    for ids, result in zip(token_ids, results, strict=True):
        known = list(zip(ids, result.prompt_logprobs, strict=True))[-CHUNK:]
        scored.append([at[token].logprob for token, at in known])
    return Outputs(scored, [list(result.outputs[0].token_ids) for result in results])


def scales(llm: LLM, found: Outputs, new_tokens: int) -> dict[str, float]:
    """References for a difference, in the same engine: the prompts in other batches, and after another prefix."""
    half = PROMPTS // 2
    one, two = (outputs(llm, some, new_tokens) for some in (prompts()[:half], prompts()[half:]))
    again = Outputs(one.scored + two.scored, one.tokens + two.tokens)
    other = outputs(llm, prompts(seed=1), new_tokens=1)
    return {**compare(again, found), "other_prefix": other.distance(found)}


def compare(found: Outputs, baseline: Outputs) -> dict[str, float]:
    """Return the distance of outputs from others, and their equal tokens."""
    return {"distance": found.distance(baseline), "equal_tokens": found.equal_tokens(baseline)}


def facts(llm: LLM) -> dict[str, Any]:
    """Description of an engine's layers, cache and graphs."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    config = llm.llm_engine.vllm_config
    named = get_layers_from_vllm_config(config, AttentionLayerBase).items()
    layers = [layer for name, layer in named if not name.endswith(".recent")]  # of the packed dtypes' recent window
    attending = [layer for layer in layers if hasattr(layer, "head_size")]
    return {
        "kinds": sorted({kind for layer in layers for kind in kinds(layer)}),
        "heads": sorted({f"{layer.num_heads}/{getattr(layer, 'num_kv_heads', 1)}" for layer in attending}),
        "head_sizes": sorted({layer.head_size for layer in attending}),
        "backends": sorted({layer.get_attn_backend().get_name() for layer in layers}),
        "kv_tokens": kv_tokens(llm),
        "graphs": config.compilation_config.cudagraph_mode.name,
    }


def kinds(layer: Any) -> list[str]:
    """Return marks of how a layer uses its cache."""
    if not hasattr(layer, "head_size"):
        return [f"state ({layer.get_attn_backend().get_name().removesuffix('_ATTN').lower()})"]
    if hasattr(layer, "kv_lora_rank"):
        return ["MLA"]
    chunk, window = getattr(layer, "attention_chunk_size", None), getattr(layer, "sliding_window", None)
    found = [f"chunks of {chunk}" if chunk else f"window of {window}" if window else "full"]
    marks = {"sinks": "sinks", "logits_soft_cap": "soft cap", "alibi_slopes": "ALiBi"}
    found += [mark for name, mark in marks.items() if bool_of(getattr(layer.impl, name, None))]
    if getattr(layer, "kv_sharing_target_layer_name", None):
        found.append("shared caches")
    return found


def bool_of(value: Any) -> bool:
    """Return True if an option of attention is set: a tensor, a list, or a number above 0."""
    return value is not None and (not isinstance(value, (int, float)) or value > 0)
