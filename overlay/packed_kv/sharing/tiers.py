"""Folders for KV pages in an engine's settings: packed pages get files with a checksum, in a folder that works.

Before an engine starts, vLLM's tier `fs` in `--kv-transfer-config` becomes `file_tier.PackedFileTier`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ..private_file import why_not_replaced
from ..settings.connectors import connectors
from .fingerprint import page_format

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..formats import Format
    from ..refusals.facts import Connector

logger = init_logger("vllm.packed_kv")

FILES = "packed_kv_fs"
"""The tier's name among vLLM's."""
LONGEST = 240
"""Characters that a file's path may have behind the tier's folder; it has up to 190."""


def check_tiers(config: VllmConfig) -> None:
    """Raise ValueError for a tier `fs` without a folder."""
    for _, tiers in _tiers(config):
        for tier in filter(_is_fs, tiers):
            if not isinstance(tier.get("root_dir"), str) or not tier["root_dir"]:
                raise ValueError(f'--kv-transfer-config: the tier {tier} has no folder; write "root_dir": "PATH"')


def replace_tiers(config: VllmConfig, fmt: Format) -> None:
    """Replace each tier `fs` by `PackedFileTier`, for pages of the calibration file that exists by now; drop, with a
    line in the log, tiers that cannot be written."""
    for connector, tiers in _tiers(config):
        _register()
        usable = []
        for tier in tiers:
            if not _is_fs(tier):
                usable.append(tier)
            elif reason := _unusable(tier["root_dir"]):
                logger.warning(
                    "KV pages on disk: tier disabled (%s); name a folder that this server can write as root_dir", reason
                )
            else:
                usable.append({**tier, "type": FILES, "page_format": page_format(config, fmt)})
        connector.options["secondary_tiers"] = usable


def _tiers(config: VllmConfig) -> Iterator[tuple[Connector, list[Any]]]:
    """Connectors and their tiers, where one of these is `fs`."""
    for connector in connectors(config.kv_transfer_config):
        tiers = connector.options.get("secondary_tiers", [])
        if isinstance(tiers, list) and any(map(_is_fs, tiers)):
            yield connector, tiers


def _is_fs(tier: object) -> bool:
    return isinstance(tier, dict) and tier.get("type") in ("fs", FILES)


def _register() -> None:
    """Make the tier known to vLLM, in this process: the engine core's, where tiers are made."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    with contextlib.suppress(ValueError):  # registered by an engine before
        SecondaryTierFactory.register_tier(FILES, f"{__package__}.file_tier", "PackedFileTier")


def _unusable(root: str) -> str:
    """Say why nothing can be written into a folder, which is made if it is missing; "": it can."""
    pages = Path(root, "_" * LONGEST)
    try:
        private_folder(pages.parent)
    except (OSError, ValueError) as error:  # ValueError: a NUL
        return f"root_dir {root!r}: {error}"
    reason = why_not_replaced(pages)
    return f"root_dir {root!r}: {reason}" if reason else ""


def private_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing, for their owner alone: pages tell prompts. Raises
    OSError; also where the folder above is there and takes none, as /proc or a working directory that was removed."""
    if path.is_dir():
        return
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(0o700, exist_ok=True)
