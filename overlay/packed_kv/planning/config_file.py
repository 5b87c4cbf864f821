"""Finds and reads a model's config.json: in a folder, as a file, or on the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path

from ..model_shape import BadInput, Config


def load(source: str) -> tuple[Config, Path | None]:
    """The config of a folder, of a config.json or of an id of the Hugging Face Hub, and the folder where it lies.

    Raises BadInput.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise BadInput(f"{source} has no config.json; give the folder of a Hugging Face model")
    elif not path.is_file():
        path = _from_hub(source)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is no config.json: {error}; give the folder of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path} is no config.json: it holds no object; give the folder of a Hugging Face model")
    return config, path.parent


def _from_hub(name: str) -> Path:
    what = f"{name} is no folder and no file"
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise BadInput(f"{what}; give the folder of a model, its config.json, or an id of the Hugging Face Hub")
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as error:
        raise BadInput(f"{what}; to look on the Hugging Face Hub: pip install huggingface_hub") from error
    try:
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"{what}, and the Hugging Face Hub gives no config.json of it ({reason})") from error
