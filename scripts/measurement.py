"""What the quality harness measures of one KV-cache dtype, in an engine of its own."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baseline import Baseline, BaselineWriter, Comparison, Scores
from engines import bytes_per_token, engine, kv_tokens
from packed_kv import FORMATS
from recall import ANSWER_TOKENS
from recall_map import Cell, recall_map
from teacher_forced import rounded_hidden_states, scored_log_probs, token_kl
from tqdm import tqdm

if TYPE_CHECKING:
    from vllm import LLM

BASELINE = "auto"
"""The dtype of the model's activations: bf16, as a rule."""
BATCHED_TOKENS = 2048


class Refused(RuntimeError):
    """The engine does not start with this dtype; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What all dtypes share."""

    model: str
    windows: list[list[int]]
    """Token ids of the texts to score."""
    chunk: int
    lengths: list[int]
    """Of recall prompts, in tokens; empty: no recall."""
    depths: list[float]
    facts: int
    seed: int
    kv_cache_memory: int
    calibration: str | None = None

    def max_model_len(self) -> int:
        return max([len(window) + 1 for window in self.windows] + [length + ANSWER_TOKENS for length in self.lengths])


@dataclass(frozen=True)
class Measurement:
    """One dtype: KV bytes of a token and KV tokens as the engine counts them, scores, recall, and the losses of all
    positions, by which dtypes are told apart."""

    dtype: str
    bytes_per_token: float
    kv_tokens: int
    scores: Scores
    recall: list[Cell]
    losses: list[float]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        """Inverse of `dataclasses.asdict`."""
        parts = {"scores": Scores(**values["scores"]), "recall": [Cell(**cell) for cell in values["recall"]]}
        return cls(**{**values, **parts})


def measure_baseline(settings: Settings, path: Path, identity: dict[str, Any], top_k: int | None) -> None:
    """Run the baseline and write it to `path`.

    Its facts are its measurement, `rounding` (the mean KL divergence of the same model with `rounded_hidden_states`),
    `context_information` (see `BaselineWriter`), and what it ran on.
    """
    writer, rounding = BaselineWriter(top_k), []
    with _engine(BASELINE, settings) as llm:
        with _progress(BASELINE, settings, passes=2) as done:
            exact = scored_log_probs(llm, settings.windows, settings.chunk, done)
            rounded = scored_log_probs(llm, settings.windows, settings.chunk, done, rounded_hidden_states)
            for (log_probs, targets), (once_more, _) in zip(exact, rounded, strict=True):
                writer.append(log_probs, targets)
                rounding += token_kl(log_probs, once_more).tolist()
        found = _measurement(BASELINE, llm, settings, *writer.own_scores())
    facts = {
        "measurement": asdict(found),
        "rounding": statistics.fmean(rounding),
        "context_information": writer.context_information(),
        "made_with": made_with(),
    }
    writer.save(path, identity, facts)


def measure(dtype: str, settings: Settings, path: Path) -> Measurement:
    """Run one dtype and compare it with the baseline in the file `path`.

    Raises Refused if the engine does not start.
    """
    comparison = Comparison(Baseline(path))
    with _engine(dtype, settings) as llm:
        with _progress(dtype, settings) as done:
            for log_probs, targets in scored_log_probs(llm, settings.windows, settings.chunk, done):
                comparison.append(log_probs, targets)
        return _measurement(dtype, llm, settings, *comparison.result())


def made_with() -> dict[str, str]:
    """Versions and device of this process."""
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    versions = {"packed-kv": version("packed-kv"), "vllm": vllm_version, "torch": version("torch")}
    return {**versions, "device": current_platform.get_device_name()}


def _measurement(dtype: str, llm: LLM, settings: Settings, scores: Scores, losses: list[float]) -> Measurement:
    recall = []
    if settings.lengths:
        title = f"{dtype}: recall"
        recall = recall_map(llm, settings.lengths, settings.depths, settings.facts, settings.seed, title)
    return Measurement(dtype, bytes_per_token(llm), kv_tokens(llm), scores, recall, losses)


@contextlib.contextmanager
def _engine(dtype: str, settings: Settings):
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": settings.kv_cache_memory,
        "max_model_len": settings.max_model_len(),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "max_num_seqs": 16,
        "use_tqdm_on_load": False,
    }
    if settings.calibration and dtype in FORMATS:
        options["additional_config"] = {"packed_kv": {"calibration": settings.calibration}}
    with contextlib.ExitStack() as stack:
        try:
            llm = stack.enter_context(engine(settings.model, dtype, **options))
        except Exception as error:  # vLLM refuses by many types of error
            raise Refused(" ".join(str(error).split()) or type(error).__name__) from error
        yield llm


@contextlib.contextmanager
def _progress(dtype: str, settings: Settings, passes: int = 1):
    """A progress bar over the tokens of the text, on a terminal."""
    total = passes * sum(map(len, settings.windows))
    with tqdm(total=total, desc=f"{dtype}: text", unit=" tokens", disable=None, leave=False) as bar:
        yield bar.update
