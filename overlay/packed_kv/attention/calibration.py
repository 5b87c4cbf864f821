"""Which calibration file serves a model, and which of its channels serve a layer of this rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger

from ..formats import Format
from ..outliers import FILE_NAME, Calibration, LayerCalibration, heads_of_rank, load
from .options import read_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.packed_kv")

MIXES_NEIGHBOURS = ("quaternion", "givens")
"""Rotations of a few channels at a time, for which it matters which channels share a scale."""
DRAFTS = {"mtp", "draft_model"}
"""Parts of the names of layers that are a draft's, though their numbers are those of the model's layers."""


@dataclass(frozen=True)
class RankCalibration:
    """The channels of this rank's layers, for one format."""

    file: Calibration
    fmt: Format
    tp_size: int
    tp_rank: int
    has_draft: bool

    def channels(self, layer_name: str, kv_heads: int, head_size: int) -> dict[str, list[list[int]]]:
        """Arguments of a layer's `PagedCodec`, for the `kv_heads` heads of this rank.

        Empty for the layers of a draft model, which the file does not describe. Raises CalibrationError for a layer
        that it should describe and does not.
        """
        layer = self._layer(layer_name)
        if layer is None:
            return {}
        if head_size != self.file.head_size:
            self.file.refuse(f"head_size {self.file.head_size}, but {layer_name} has {head_size}")
        if self.fmt.outlier_bits:
            rows = {"key_outliers": layer.key_outliers, "value_outliers": layer.value_outliers}
        else:
            orders = {"key_order": layer.key_order, "value_order": layer.value_order}
            rows = {name: order for name, order in orders.items() if order is not None}
        mine = {name: heads_of_rank(row, kv_heads, self.tp_size, self.tp_rank) for name, row in rows.items()}
        if any(len(row) != kv_heads for row in mine.values()):
            rank = f"rank {self.tp_rank} of {self.tp_size}"
            self.file.refuse(
                f"{self.file.kv_heads} KV heads do not deal out to the {kv_heads} of {layer_name} on {rank}"
            )
        return mine

    def _layer(self, name: str) -> LayerCalibration | None:
        numbers = [int(part) for part in name.split(".") if re.fullmatch(r"[0-9]+", part)]
        layer = self.file.layers.get(numbers[0]) if len(numbers) == 1 and not DRAFTS & {*name.split(".")} else None
        if layer is None and not self.has_draft:
            self.file.refuse(f"has no entry for the model's layer {name}")
        return layer


def find_calibration(config: VllmConfig, fmt: Format) -> RankCalibration | None:
    """The calibration of a model, checked, for the layers that this process builds.

    None if there is no file, if the format needs none, or while a draft model is built. Says once which file it is, or
    that there is none and what that means. Raises CalibrationError for a file that does not fit.
    """
    model = config.model_config
    if not _reads_file(fmt) or model.runner_type == "draft":
        return None
    path = read_options(config.additional_config).calibration
    if path is None:
        path = _model_folder(model.model, model.revision) / FILE_NAME
        if not path.is_file():
            if fmt.outlier_bits:
                logger.warning_once(
                    "KV cache calibration: no %s, so %s stores the first %d channels of each head with more bits, "
                    "whichever are large; to choose them run: tq-calibrate model %s",
                    path,
                    fmt.name,
                    fmt.outlier_channels(model.get_head_size()),
                    model.model,
                    scope="local",
                )
            else:
                logger.info_once(
                    "KV cache calibration: no %s, so %s keeps the order of the channels; tq-calibrate model %s may "
                    "find a better one",
                    path,
                    fmt.name,
                    model.model,
                    scope="local",
                )
            return None
    calibration = load(path)
    has_other_layers = model.is_hybrid or model.has_noops or getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    calibration.check_model(
        layers=model.get_total_num_hidden_layers(),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        every_layer=not has_other_layers,
    )
    ordered = any(layer.key_order or layer.value_order for layer in calibration.layers.values())
    use = "outlier channels" if fmt.outlier_bits else "channel order" if ordered else "no channel order"
    logger.info_once(
        "KV cache calibration: %s for %s from %s, made for %s",
        use,
        fmt.name,
        calibration.path,
        calibration.recipe,
        scope="local",
    )
    return RankCalibration(
        calibration,
        fmt,
        get_tensor_model_parallel_world_size(),
        get_tensor_model_parallel_rank(),
        has_draft=config.speculative_config is not None,
    )


def transforms_of_model(config: VllmConfig, fmt: Format) -> dict[int, dict[str, Any]]:
    """What calibration does to the pages of a format: layer -> arguments of its `PagedCodec` for all heads.

    Needs no process group and is the same on every rank. Empty where nothing is changed by calibration. Raises
    CalibrationError for a file that cannot be read; whether it fits the model, `find_calibration` says.
    """
    model = config.model_config
    path = _named_file(config.additional_config) or _model_folder(model.model, model.revision) / FILE_NAME
    if not _reads_file(fmt) or not path.is_file():
        return {}
    file = load(path)
    whole = RankCalibration(file, fmt, tp_size=1, tp_rank=0, has_draft=False)
    layers = {layer: whole.channels(f"layers.{layer}", file.kv_heads, file.head_size) for layer in sorted(file.layers)}
    return {layer: arguments for layer, arguments in layers.items() if arguments}


def _reads_file(fmt: Format) -> bool:
    return bool(fmt.outlier_bits) or fmt.rotation in MIXES_NEIGHBOURS


def _model_folder(model: str, revision: str | None) -> Path:
    """Where a model's files are: its own folder, or the snapshot of a model of the Hugging Face Hub."""
    path = Path(model)
    if path.exists():
        return path.parent if path.is_file() else path
    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else path
