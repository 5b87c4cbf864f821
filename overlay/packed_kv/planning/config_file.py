"""Finds and reads a model's config.json: in a folder, as a file, or on the Hugging Face Hub."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..json_file import printable, read_json
from ..model.config_defaults import Config
from ..model.config_fields import BadInput

QUANTIZATION = "hf_quant_config.json"
"""Model-Optimizer's file, which vLLM reads where config.json has no quantization_config."""
LONGEST_NAME = 1024
"""Characters of a path or of an id of the Hugging Face Hub."""
GGUF, ORIGINAL = ".gguf", "give the Hugging Face model that it was made from"
PATIENCE = 5.0
"""Seconds within which the Hub has to answer."""


def load(source: str) -> tuple[Config, Path | None]:
    """The config of a folder, of a config.json or of an id of the Hugging Face Hub, and the folder where it lies; with
    a quantization_config from Model-Optimizer's file where vLLM would read it. Raises BadInput.
    """
    if not source or len(source) > LONGEST_NAME or not source.isprintable():
        raise BadInput(f"{printable(source, 60)} is not a model name; give a folder, a config.json or an id of the Hub")
    is_local = answers = True
    try:
        path = Path(os.path.expanduser(source))
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise BadInput(f"{source} has no config.json{_other_model(path.parent)}")
        elif not path.is_file():
            is_local = False
            path, answers = _from_hub(source)
        elif path.suffix.lower() == GGUF:
            raise BadInput(f"{source} is a GGUF file, which is not read here; {ORIGINAL}")
        config = read_json(path)
        if isinstance(config, dict) and config.get("quantization_config") is None:
            beside = path.with_name(QUANTIZATION) if is_local else _quantization_from_hub(source, answers)
            if beside is not None and beside.is_file():
                path = beside
                config["quantization_config"] = read_json(path)
    except OSError as error:  # a part of the path is too long, or nobody may look into a folder
        raise BadInput(f"{source} cannot be read ({error.strerror}); give the folder of a model") from error
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{path} {error}; give the folder of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path} holds no object; give the folder of a Hugging Face model")
    return config, path.parent


def _other_model(folder: Path) -> str:
    """Say what a folder without config.json holds instead, and what to pass."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        try:
            found = read_json(adapter)
        except ValueError:
            found = None
        base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
        model = f"its model, {printable(base, 100)}" if isinstance(base, str) and base else "its model"
        return f": it is an adapter (LoRA); give {model}"
    if (folder / "params.json").is_file():
        return ": params.json is Mistral's own format, which is not read here; give the model's config.json"
    if any(file.suffix.lower() == GGUF for file in folder.iterdir()):
        return f": GGUF is not read here; {ORIGINAL}"
    return "; give the folder of a Hugging Face model"


def model_name(source: str) -> str:
    """Name of a model that `load` has read: its folder's name, with links resolved, or its id on the Hub."""
    path = Path(os.path.expanduser(source))
    if not path.exists():
        return source
    path = Path(os.path.abspath(path))
    return path.parent.name if path.name == "config.json" else path.name


def _from_hub(name: str) -> tuple[Path, bool]:
    """Return the config.json of an id, and whether the Hub answers; if not, the file was fetched earlier. Raises
    BadInput."""
    what = f"{name} is neither a folder nor a file"
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise BadInput(f"{what}; give the folder of a model, its config.json, or an id of the Hugging Face Hub")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ModuleNotFoundError as error:
        raise BadInput(f"{what}; to look on the Hugging Face Hub: pip install huggingface_hub") from error
    answers = _answers()  # otherwise the library waits in each of five retries
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=not answers)), answers
    except (OSError, ValueError) as error:
        if not answers or isinstance(error, LocalEntryNotFoundError):
            reason = "it does not answer"
        elif isinstance(error, GatedRepoError):
            reason = "who reads it must have accepted its terms there, and run: hf auth login"
        elif isinstance(error, RepositoryNotFoundError):
            reason = "there is none, or it is private; then run: hf auth login"
        else:
            reason = printable(str(error).strip().splitlines()[0])
        what += f", and its config.json cannot be fetched from the Hugging Face Hub ({reason})"
        raise BadInput(f"{what}; give the folder of a model, or its config.json") from error


def _quantization_from_hub(name: str, answers: bool) -> Path | None:
    """Model-Optimizer's file beside a fetched config.json; None: there is none, or it cannot be fetched."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(name, QUANTIZATION, local_files_only=not answers))
    except (EntryNotFoundError, OSError, ValueError):
        return None


def _answers() -> bool:
    """True if the Hugging Face Hub can be reached within seconds, through a proxy if one is set."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the library may use other certificates
    except OSError:
        return False
    return True
