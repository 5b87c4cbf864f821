"""Choice of a model's calibration file, and of its channels for a layer of this rank."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger

from ..calibration_content import FIRST_WITH_ROPES
from ..calibration_file import FILE_NAME, Calibration, heads_of_rank, layer_number, load, why_no_file
from ..channel_calibration import MIXES_NEIGHBOURS, LayerCalibration
from ..formats import Format
from ..model.config_fields import BadInput
from ..model.rope import VARYING, rope_parameters
from ..model.shape import parse
from .options import read_options

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.packed_kv")

WORDS = {
    "key_outlier_channels": "outlier channels",
    "key_channel_order": "channel orders",
    "value_channel_order": "channel orders",
    "key_mean": "means of keys",
    "key_rope": "means of keys by position",
    "value_mean": "means of values",
    "key_scale": "scales of keys",
    "value_scale": "scales of values",
}
"""Part of a layer's calibration, as `LayerCalibration.known` names it -> its name in the log."""
OVERRIDES = ("hf_overrides", "hf_config_path")
"""Arguments of an engine that change its model's configuration."""
DRAFTS = {"mtp", "draft_model"}
"""Name parts of draft layers whose numbers coincide with the model's layers."""


@dataclass(frozen=True)
class RankCalibration:
    """The channels of this rank's layers, for one format."""

    file: Calibration
    fmt: Format
    tp_size: int
    tp_rank: int
    has_draft: bool

    def channels(self, layer_name: str, kv_heads: int, head_size: int, head_size_v: int) -> LayerCalibration:
        """The parts of the file that the format takes for a layer, for the `kv_heads` heads of this rank.

        Empty for the layers of a draft model, which the file does not describe. Raises CalibrationError for a layer
        that it should describe and does not.
        """
        layer = self._layer(layer_name)
        if layer is None:
            return LayerCalibration()
        if head_size != self.file.head_size:
            self.file.refuse(f"head_size {self.file.head_size}, but {layer_name} has {head_size}")
        if head_size_v != self.file.value_head_size:
            self.file.refuse(f"value_head_size {self.file.value_head_size}, but {layer_name} has {head_size_v}")

        def mine(rows: list[Any]) -> list[Any]:
            found = heads_of_rank(rows, kv_heads, self.tp_size, self.tp_rank)
            if len(found) != kv_heads:
                rank = f"rank {self.tp_rank} of {self.tp_size}"
                heads = f"{layer.kv_heads} KV heads"
                self.file.refuse(f"{heads} cannot be split into the {kv_heads} of {layer_name} on {rank}")
            return found

        return self.file.taken_by(self.fmt, layer).map_rows(mine)

    def uses(self) -> str:
        """The parts of the file that are used, in words; empty if none is."""
        layers = self.file.layers.values()
        there = {name for layer in layers for name in self.file.taken_by(self.fmt, layer).known()}
        if "key_rope" in there:
            there.remove("key_mean")
        words = [*dict.fromkeys(text for name, text in WORDS.items() if name in there)]
        if bits := self.file.key_bits.get(self.fmt.name):
            words.append(f"{', '.join(map(str, bits))} bits in groups of keys")
        return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))

    def _layer(self, name: str) -> LayerCalibration | None:
        number = None if DRAFTS & {*name.split(".")} else layer_number(name)
        layer = None if number is None else self.file.layers.get(number)
        if layer is None and not self.has_draft:
            self.file.refuse(f"has no entry for the model's layer {name}")
        return layer


def read_calibration(config: VllmConfig) -> Calibration | None:
    """The calibration file of an engine's model, or None: there is none. Needs no process group. Raises
    CalibrationError for a file that does not fit the model."""
    model = config.model_config
    path = read_options(config.additional_config).calibration
    if path is None:
        path = model_folder(model.model, model.revision) / FILE_NAME
        if not path.is_file():
            return None
    calibration = load(path)
    has_other_layers = model.is_hybrid or model.has_noops or getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    kv_heads, head_size = heads_of(model)
    calibration.check_model(
        layers=model.get_total_num_hidden_layers(),
        kv_heads=kv_heads,
        head_size=head_size,
        every_layer=not has_other_layers,
    )
    if model.use_mla and calibration.key_bits:
        calibration.refuse("key_group_bits are of keys, and this model stores latents")
    if model.use_mla and any(layer.value.mean is not None for layer in calibration.layers.values()):
        calibration.refuse("value_channel_mean is of values, and this model stores latents")
    calibration.check_rope(rope_parameters(model.hf_text_config), f"{_command(model)} --out {shlex.quote(str(path))}")
    return calibration


def find_calibration(config: VllmConfig, fmt: Format) -> RankCalibration | None:
    """The calibration of a model, checked, for the layers that this process builds.

    None if there is no file, or while a draft model is built. Logs once which file is used and what it changes, or that
    there is none and what that means. Raises CalibrationError for a file that does not fit.
    """
    model = config.model_config
    if model.runner_type == "draft":
        return None
    calibration = read_calibration(config)
    if calibration is None:
        _say_that_there_is_none(model_folder(model.model, model.revision) / FILE_NAME, fmt, model)
        return None
    rank = RankCalibration(
        calibration,
        fmt,
        get_tensor_model_parallel_world_size(),
        get_tensor_model_parallel_rank(),
        has_draft=config.speculative_config is not None,
    )
    no_means = all(layer.key.mean is None for layer in calibration.layers.values())
    hint = f"; it has no means of keys, which {_command(model)} would find" if no_means else ""
    turns = any(rope["rope_type"] not in VARYING for rope in rope_parameters(model.hf_text_config).values())
    if not no_means and turns and calibration.version < FIRST_WITH_ROPES:
        hint = f"; its means of keys are for short contexts, {_command(model)} makes them for all"
    logger.info_once(
        "KV cache calibration: %s for %s from %s, made for %s%s",
        rank.uses() or "nothing",
        fmt.name,
        calibration.path,
        calibration.recipe,
        hint,
        scope="local",
    )
    return rank


def heads_of(model: ModelConfig) -> tuple[int, int]:
    """KV heads of this model's file, and channels of their keys: a latent (MLA) is K and V of one head."""
    if model.use_mla:
        return 1, model.hf_text_config.kv_lora_rank
    return model.get_total_num_kv_heads(), model.get_head_size()


def _say_that_there_is_none(path: Path, fmt: Format, model: ModelConfig) -> None:
    reason = _why_no_file(model)
    if fmt.outlier_bits:
        logger.warning_once(
            "KV cache calibration: no %s; %s gives its extra bits to the first %d channels of each head. %s",
            path,
            fmt.name,
            fmt.outlier_channels(heads_of(model)[1]),
            f"None can be made ({reason}); tq4 needs none" if reason else f"To choose them, run: {_command(model)}",
            scope="local",
        )
    elif not reason:
        logger.info_once(
            "KV cache calibration: no %s; %s serves uncalibrated%s. To lower its error, run: %s",
            path,
            fmt.name,
            ", in the model's order of channels" if fmt.rotation in MIXES_NEIGHBOURS else "",
            _command(model),
            scope="local",
        )


def _command(model: ModelConfig) -> str:
    """A command that makes a file for the model with this engine's configuration."""
    given = {name: value for name in OVERRIDES if (value := getattr(model, name, None))}
    command = f"tq-calibrate model {shlex.quote(model.model)}"
    if not given:
        return command
    try:
        return f"{command} --engine vllm --engine-options {shlex.quote(json.dumps(given))}"
    except TypeError:  # a function, which a command cannot be given
        return (
            f"{command} --engine vllm --engine-options JSON (with hf_overrides that do what the engine's function does)"
        )


def _why_no_file(model: ModelConfig) -> str:
    """Say why tq-calibrate makes no file for the model; "": it makes one, or its config is not known here."""
    try:
        return why_no_file(parse(model.hf_config.to_dict(), model.model))
    except BadInput:
        return ""


def transforms_of_model(config: VllmConfig, fmt: Format) -> dict[int, dict[str, Any]]:
    """Calibration that the pages of a format depend on: layer -> `LayerCalibration.known` of all heads.

    Needs no process group and is the same on every rank. Empty where nothing is changed by calibration. Raises
    CalibrationError for a file that cannot be read, or a named file that is missing; `find_calibration` checks whether
    it fits the model.
    """
    model = config.model_config
    named = read_options(config.additional_config).calibration
    path = named or model_folder(model.model, model.revision) / FILE_NAME
    if named is None and not path.is_file():
        return {}
    file = load(path)
    whole = RankCalibration(file, fmt, tp_size=1, tp_rank=0, has_draft=False)
    sizes = file.head_size, file.value_head_size
    layers = {
        number: whole.channels(f"layers.{number}", layer.kv_heads, *sizes).known()
        for number, layer in sorted(file.layers.items())
    }
    return {layer: known for layer, known in layers.items() if known}


def model_folder(model: str, revision: str | None) -> Path:
    """Folder of a model's files: the model's folder, its file's folder, or its snapshot of the Hugging Face Hub."""
    path = Path(model)
    if path.exists():
        return path.parent if path.is_file() else path
    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else path
