"""Streams text through a model that transformers loads, and gathers the statistics of its queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import transformers

from .collect import ATTENTION, Collector
from .errors import UserError
from .model import load_config, load_model, shape_of
from .statistics import Statistics, check_head_size
from .sums import Sums
from .text import load_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class TransformersModel:
    """A model as transformers configures it. Raises UserError."""

    def __init__(self, model: str, dtype: str, device: str, batch_size: int) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.name, self.batch_size = model, batch_size
        self.config = load_config(model)
        check_head_size(shape_of(self.config).head_size)
        self.device = _device(device)
        self.dtype = _dtype(dtype, self.device)

    @property
    def text_config(self) -> PretrainedConfig:
        """The config of the language model."""
        return self.config.get_text_config()

    @property
    def longest(self) -> int | None:
        """Longest context in tokens, or None if the configuration does not say."""
        return getattr(self.text_config, "max_position_embeddings", None)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model. Raises UserError."""
        return load_tokenizer(self.name)

    def run(
        self, sequences: list[list[int]], held: list[list[int]], progress: Callable[[int], object]
    ) -> tuple[Statistics, Sums]:
        """Statistics over whole sequences, and sums over held-out sequences; `progress` is told the tokens of each
        batch.

        Raises UserError.
        """
        collector = Collector()
        model = load_model(self.name, ATTENTION, self.dtype, self.device)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        largest = max(map(max, (*sequences, *held)))
        if largest >= vocabulary:
            raise UserError(f"{self.name}: its tokenizer gives token {largest}, its vocabulary has {vocabulary}")
        collector.run(model, batches(sequences, self.batch_size), progress)
        statistics = collector.statistics()
        collector.sums.begin_anew()
        collector.run(model, batches(held, self.batch_size), progress)
        statistics.source = {
            "engine": f"transformers {transformers.__version__}",
            "batch_size": self.batch_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": self.device.type,
        }
        return statistics, collector.sums


def batches(sequences: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Batches of up to `size` sequences of equal length."""
    for _, alike in groupby(sequences, key=len):
        equal = list(alike)
        yield from (equal[at : at + size] for at in range(0, len(equal), size))


def _dtype(name: str, device: torch.device) -> str:
    """The dtype to run in. On a CPU it is fp32 even for a bf16 checkpoint: bf16 is several times slower there."""
    return "float32" if name == "auto" and device.type == "cpu" else name


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} is not there; use cpu, cuda or cuda:N") from error
    return device
