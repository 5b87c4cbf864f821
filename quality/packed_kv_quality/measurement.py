"""Measure one KV-cache dtype in an engine of its own."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from packed_kv import FORMATS
from tqdm import tqdm

from .baseline import Baseline, BaselineWriter, Comparison, Positions, Scores, compare_exactly
from .engines import bytes_per_request, bytes_per_token, engine, kv_tokens
from .lockstep import at_once
from .recall import ANSWER_TOKENS
from .recall_map import LARGEST_BATCH, Cell, RecallSettings, recall_map
from .teacher_forced import fp8_storage, rounded_attention, scored_log_probs, token_kl
from .uncertainty import block_means, standard_error

if TYPE_CHECKING:
    from vllm import LLM

BASELINE = "auto"
"""The cache in the dtype of the model's activations, bf16 as a rule."""
STORAGE = "fp8-storage"
"""The baseline with every key and value rounded to e4m3 and back: what fp8 costs where nothing else is rounded."""
BATCHED_TOKENS = 2048
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs of decode steps without torch.compile, which would take longer than it saves."""


class EngineSettings(Protocol):
    """Settings with which an engine is started. `dtype` is the dtype of weights and activations, `additional_config` is
    for packed-kv's dtypes, and `parallel` engines run on the device at a time."""

    @property
    def model(self) -> str: ...
    @property
    def kv_cache_memory(self) -> int: ...
    @property
    def additional_config(self) -> dict[str, Any]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def parallel(self) -> int: ...
    def max_model_len(self) -> int: ...


class Refused(RuntimeError):
    """The engine does not start with this dtype; the message says why."""


@dataclass(frozen=True)
class Settings:
    """Settings that all dtypes share."""

    model: str
    windows: list[list[int]]
    """Token ids of the texts to score."""
    texts: list[str]
    """The text's name for each window."""
    chunk: int
    recall: RecallSettings
    kv_cache_memory: int
    additional_config: dict[str, Any]
    """vLLM's `additional_config` for packed-kv's dtypes."""
    dtype: str = "auto"
    """Dtype of weights and activations."""
    graphs: bool = False
    parallel: int = 1
    """Engines on the device at a time."""

    def max_model_len(self) -> int:
        lengths = [len(window) + 1 for window in self.windows]
        return max(lengths + [length + ANSWER_TOKENS for length in self.recall.lengths])

    def windows_at_once(self, llm: LLM) -> int:
        """Return the number of windows that the engine holds at once."""
        return at_once(llm, max(map(len, self.windows)) + 1, self.chunk, min(len(self.windows), LARGEST_BATCH))

    def by_text(self, positions: Positions) -> dict[str, Text]:
        """Figures per text, from figures of all positions."""
        sizes = [len(window) - 1 - self.chunk for window in self.windows]
        losses, kl = (tensor.split(sizes) for tensor in (positions.losses, positions.kl))
        found = {}
        for name in dict.fromkeys(self.texts):
            own = [index for index, text in enumerate(self.texts) if text == name]
            blocks = block_means([kl[index] for index in own])
            loss = statistics.fmean(losses[index].double().mean().item() for index in own)  # windows are equally long
            mean = statistics.fmean(kl[index].double().mean().item() for index in own)
            found[name] = Text(loss, mean, standard_error([blocks]), blocks)
        return found


@dataclass(frozen=True)
class Text:
    """Figures of one text: mean loss in nats, mean KL divergence with its standard error, and block means of it."""

    loss: float
    kl_mean: float
    kl_error: float | None
    kl_blocks: list[float]


@dataclass(frozen=True)
class Measurement:
    """One dtype: KV bytes of a token, KV tokens and KV bytes of a request beside its tokens as the engine counts them,
    scores, recall, the losses of all positions, by which dtypes are told apart, and figures by text."""

    dtype: str
    bytes_per_token: float
    kv_tokens: int
    scores: Scores
    recall: list[Cell]
    losses: list[float]
    texts: dict[str, Text]
    bytes_per_request: int = 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        """Inverse of `dataclasses.asdict`."""
        parts = {
            "scores": Scores(**values["scores"]),
            "recall": [Cell(**cell) for cell in values["recall"]],
            "texts": {name: Text(**text) for name, text in values["texts"].items()},
        }
        return cls(**{**values, **parts})

    def kl_blocks(self) -> list[list[float]]:
        """Block means of each text."""
        return [text.kl_blocks for text in self.texts.values()]


def measure_baseline(settings: Settings, path: Path, identity: dict[str, Any], top_k: int | None) -> None:
    """Run the baseline and write it to `path`.

    Its facts are its measurement, the measurement of `STORAGE`, `rounding` (the mean KL divergence of the same model
    with `rounded_attention`), `context_information` (see `BaselineWriter`), how many windows ran at once, and on what.
    """
    writer, rounding, stored = BaselineWriter(top_k), [], []
    with _engine(BASELINE, settings) as llm:
        together = settings.windows_at_once(llm)
        with _progress(BASELINE, settings, passes=3) as done:
            passes = [
                scored_log_probs(llm, settings.windows, settings.chunk, together, done, within)
                for within in (contextlib.nullcontext, rounded_attention, fp8_storage)
            ]
            for (exact, targets), (rounded, _), (as_fp8, _) in zip(*passes, strict=True):
                writer.append(exact, targets)
                rounding += token_kl(exact, rounded).tolist()
                stored.append(compare_exactly(exact, as_fp8, targets))
        found = _measurement(BASELINE, llm, settings, writer.positions())
        with fp8_storage(llm):
            in_fp8 = _measurement(STORAGE, llm, settings, Positions.joined(stored))
        share = _bytes_per_value(llm)
    in_fp8 = replace(in_fp8, bytes_per_token=found.bytes_per_token / share, kv_tokens=share * found.kv_tokens)
    facts = {
        "measurement": asdict(found),
        "storage": asdict(in_fp8),
        "rounding": statistics.fmean(rounding),
        "context_information": writer.context_information(),
        "windows_at_once": together,
        "made_with": made_with(),
    }
    writer.save(path, identity, facts)


def measure(dtype: str, settings: Settings, path: Path) -> Measurement:
    """Run one dtype and compare it with the baseline in the file `path`.

    Raises Refused if the engine does not start.
    """
    baseline = Baseline(path)
    comparison, together = Comparison(baseline), baseline.facts["windows_at_once"]
    with _engine(dtype, settings) as llm:
        with _progress(dtype, settings) as done:
            for log_probs, targets in scored_log_probs(llm, settings.windows, settings.chunk, together, done):
                comparison.append(log_probs, targets)
        return _measurement(dtype, llm, settings, comparison.positions())


@dataclass(frozen=True)
class Recall:
    """Recall of one dtype, with the KV bytes per token by the engine's count."""

    dtype: str
    bytes_per_token: float
    recall: list[Cell]


def measure_recall(dtype: str, settings: Settings) -> list[Recall]:
    """Measure recall alone, of one dtype; in the baseline's engine also `STORAGE`'s recall. Raises Refused."""
    with _engine(dtype, settings) as llm:
        size = bytes_per_token(llm)
        found = [Recall(dtype, size, _recall(dtype, llm, settings))]
        if dtype == BASELINE:
            with fp8_storage(llm):
                found.append(Recall(STORAGE, size / _bytes_per_value(llm), _recall(STORAGE, llm, settings)))
    return found


def made_with() -> dict[str, str]:
    """Versions and device of this process."""
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    versions = {"packed-kv": version("packed-kv"), "vllm": vllm_version, "torch": version("torch")}
    return {**versions, "device": current_platform.get_device_name()}


def _measurement(dtype: str, llm: LLM, settings: Settings, positions: Positions) -> Measurement:
    texts = settings.by_text(positions)
    scores = replace(positions.scores(), kl_error=standard_error([text.kl_blocks for text in texts.values()]))
    recall, losses = _recall(dtype, llm, settings), positions.losses.tolist()
    size, ring = bytes_per_token(llm), bytes_per_request(llm)
    return Measurement(dtype, size, kv_tokens(llm), scores, recall, losses, texts, ring)


def _bytes_per_value(llm: LLM) -> int:
    """Bytes per value of the baseline's cache; fp8 takes one."""
    return llm.llm_engine.vllm_config.model_config.dtype.itemsize


def _recall(dtype: str, llm: LLM, settings: Settings) -> list[Cell]:
    with progress_bar(f"{dtype}: recall", settings.recall.tokens()) as done:
        return recall_map(llm, settings.recall, done)


@contextlib.contextmanager
def start_engine(dtype: str, settings: EngineSettings, **more: Any) -> Iterator[LLM]:
    """An engine of one dtype; `more` are further arguments of `LLM`. Raises Refused if it does not start."""
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "kv_cache_memory_bytes": settings.kv_cache_memory,
        "max_model_len": settings.max_model_len(),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "max_num_seqs": LARGEST_BATCH,
        "async_scheduling": False,
        "enable_prefix_caching": False,  # prompts with a common beginning would not run in lockstep
        "use_tqdm_on_load": False,
    }
    if settings.parallel > 1:  # vLLM does not start on a device with less memory free, however little it takes
        options["gpu_memory_utilization"] = 0.9 / settings.parallel
    if settings.additional_config and dtype in FORMATS:
        options["additional_config"] = settings.additional_config
    options |= more
    with contextlib.ExitStack() as stack:
        try:
            llm = stack.enter_context(engine(settings.model, dtype, **options))
        except Exception as error:  # vLLM refuses with many types of errors
            raise Refused(" ".join(str(error).split()) or type(error).__name__) from error
        yield llm


def _engine(dtype: str, settings: Settings) -> contextlib.AbstractContextManager[LLM]:
    graphs: dict[str, Any] = {}
    if settings.graphs and dtype != BASELINE:  # the baseline runs with hooks, too, which graphs would not call
        graphs = {"enforce_eager": False, "compilation_config": DECODE_GRAPHS}
    return start_engine(dtype, settings, **graphs)


def _progress(dtype: str, settings: Settings, passes: int = 1) -> contextlib.AbstractContextManager[Callable]:
    return progress_bar(f"{dtype}: text", passes * sum(map(len, settings.windows)))


@contextlib.contextmanager
def progress_bar(title: str, tokens: int) -> Iterator[Callable[[int], object]]:
    """A progress bar over tokens, on a terminal."""
    with tqdm(total=tokens, desc=title, unit=" tokens", disable=None, leave=False) as bar:
        yield bar.update
