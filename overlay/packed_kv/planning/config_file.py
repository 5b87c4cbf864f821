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

LONGEST_NAME = 1024
"""Characters of a path or of an id of the Hugging Face Hub."""
PATIENCE = 5.0
"""Seconds within which the Hub has to answer."""


def load(source: str) -> tuple[Config, Path | None]:
    """The config of a folder, of a config.json or of an id of the Hugging Face Hub, and the folder where it lies.

    Raises BadInput.
    """
    if not source or len(source) > LONGEST_NAME or not source.isprintable():
        raise BadInput(f"{printable(source, 60)} is not a model name; give a folder, a config.json or an id of the Hub")
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise BadInput(f"{source} has no config.json; give the folder of a Hugging Face model")
        elif not path.is_file():
            path = _from_hub(source)
        config = read_json(path)
    except OSError as error:  # a part of the path is too long, or nobody may look into a folder
        raise BadInput(f"{source} cannot be read ({error.strerror}); give the folder of a model") from error
    except RuntimeError as error:  # ~user
        raise BadInput(f"{source} names no user's folder; give the folder of a model") from error
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"{path} {error}; give the folder of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path} holds no object; give the folder of a Hugging Face model")
    return config, path.parent


def model_name(source: str) -> str:
    """Name of a model that `load` has read: of its folder, whatever that links to, or its id on the Hub."""
    path = Path(source).expanduser()
    if not path.exists():
        return source
    path = Path(os.path.abspath(path))
    return path.parent.name if path.name == "config.json" else path.name


def _from_hub(name: str) -> Path:
    what = f"{name} is neither a folder nor a file"
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise BadInput(f"{what}; give the folder of a model, its config.json, or an id of the Hugging Face Hub")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ModuleNotFoundError as error:
        raise BadInput(f"{what}; to look on the Hugging Face Hub: pip install huggingface_hub") from error
    answers = _answers()  # else each of the library's five retries waits
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=not answers))
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
        return isinstance(error.reason, ssl.SSLError)  # the library may know other certificates
    except OSError:
        return False
    return True
