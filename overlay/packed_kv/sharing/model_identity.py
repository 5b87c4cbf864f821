"""Identity of the model that computed a page: a name for its weights, equal wherever they lie."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings.calibration import model_folder
from ..settings.model_options import model_numbers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
DESCRIPTIONS = {"config.json", "params.json", "quantize_config.json", "hf_quant_config.json", "adapter_config.json"}
"""Files that decide, besides `WEIGHTS` and Python modules, what a model computes of its token ids."""
SAMPLES = 2048
"""Places of a file of weights that are read, at most."""
SAMPLE = 256
"""Bytes read there."""
LONGEST_HEADER = 100_000_000
"""Bytes of a header of safetensors, which allows no more."""


def model_identity(config: VllmConfig) -> list[Any]:
    """Identity of a model's keys and values: its weights, and everything else that decides its numbers.

    A model of the Hugging Face Hub counts by its commit; a folder or file by its content, whatever its path and times.
    """
    model = config.model_config
    # Of a model that is streamed from a store, `model` is a copy without weights.
    source = getattr(model, "model_weights", "")
    return [_weights(model.model, model.revision), source, model_numbers(config)]


def _weights(model: str, revision: str | None) -> str:
    path = Path(model)
    folder = model_folder(model, revision)
    if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name):
        return folder.name  # also before its weights are there, and where vLLM runs offline from the folder
    if not path.exists():
        return f"{model} {revision}"
    return content_of(path)


def content_of(path: Path) -> str:
    """A digest of a file of weights, or of a folder's files that decide what a model or an adapter computes."""
    files = [path] if path.is_file() else sorted(filter(_counts, path.iterdir()))
    states = [(file, file.stat()) for file in files]
    return _digest(tuple((str(file), state.st_size, state.st_mtime_ns) for file, state in states))


def _counts(file: Path) -> bool:
    return (file.suffix in WEIGHTS | {".py"} or file.name in DESCRIPTIONS) and file.is_file()


@functools.lru_cache(maxsize=64)
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    """Digest of names, sizes and content of files (path, bytes, time in ns), of weights by samples."""
    digest = hashlib.sha256()
    for path, size, _time in files:
        file = Path(path)
        sampled = file.suffix in WEIGHTS
        digest.update(f"{'weights' if sampled else file.name} {size}\0".encode())
        digest.update(_samples(file, size) if sampled else file.read_bytes())
    return digest.hexdigest()


def _samples(path: Path, size: int) -> bytes:
    """Read a few bytes from the middle of each tensor, if the file tells where tensors are; else evenly spread
    bytes."""
    with open(path, "rb") as file:
        centres = _tensors(file.read(8), file, size) if path.suffix == ".safetensors" else []
        centres = centres or [size * i // SAMPLES for i in range(SAMPLES)]
        found = []
        for centre in centres[:: -(-len(centres) // SAMPLES)]:
            file.seek(max(0, min(centre, size) - SAMPLE // 2))
            found.append(file.read(SAMPLE))
    return b"".join(found)


def _tensors(length: bytes, file: Any, size: int) -> list[int]:
    """The byte at which each tensor of a file of safetensors has its middle, in order; none if it says nothing."""
    header_bytes = int.from_bytes(length, "little")
    if not 0 < header_bytes <= min(size, LONGEST_HEADER):
        return []
    try:
        header = json.loads(file.read(header_bytes))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        return sorted(8 + header_bytes + (int(start) + int(end)) // 2 for start, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
