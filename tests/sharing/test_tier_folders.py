"""Folders of a disk tier in an engine's settings: which tiers become ours, and roots that cannot be written."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packed_kv.formats import FORMATS
from packed_kv.sharing import tiers
from packed_kv.sharing.file_tier import PackedFileTier
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the module under test."""
    found: list[str] = []
    monkeypatch.setattr(tiers.logger, "warning", lambda line, *parts: found.append(line % parts))
    return found


def test_a_root_whose_files_paths_are_too_long_is_one_line(tmp_path: Path) -> None:
    root = tmp_path
    while len(str(root)) < 3900:
        root = root / ("folder" * 10)
    assert "File name too long" in tiers._unusable(str(root))


def test_roots_that_cannot_be_made_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a folder that is there and takes none: the kernel's, a working directory that was removed; what no path
    may have; and more folders than Python's calls can be nested."""
    gone = tmp_path / "gone"
    gone.mkdir()
    (tmp_path / "nowhere").symlink_to("/nowhere")
    for root in ("/proc/kv", "/proc/kv/deeper", f"{tmp_path}/a\0b", f"{tmp_path}/nowhere", f"{tmp_path}/nowhere/kv"):
        assert tiers._unusable(root).startswith(f"root_dir {root!r}: ")
    try:
        assert "File name too long" in tiers._unusable(str(tmp_path) + "/d" * 2000)
    finally:  # pytest, and shutil.rmtree before Python 3.13, remove folders by calls of themselves
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)
    monkeypatch.chdir(gone)
    gone.rmdir()
    for root in ("kv", "kv/deeper"):
        assert tiers._unusable(root) == f"root_dir {root!r}: [Errno 2] No such file or directory: 'kv'"


def connectors(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a MultiConnector with one connector, whose options are these."""
    return {"connectors": [{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": options}]}


def settings(extra: dict[str, Any]) -> Any:
    """Stand-in for a VllmConfig, as far as `tiers` reads it."""
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig("MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra),
        model_config=SimpleNamespace(
            model="none",
            revision=None,
            use_mla=False,
            dtype="bfloat16",
            hf_config={},
            hf_text_config=SimpleNamespace(),
            architecture="LlamaForCausalLM",
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[]),
        additional_config={},
    )


def test_tiers_of_an_engine(tmp_path: Path, lines: list[str]) -> None:
    """Each tier `fs`, in connectors within others too, is ours; other tiers stay; a folder that is none is left out."""
    (tmp_path / "file").write_text("")
    good, other = {"type": "fs", "root_dir": str(tmp_path / "new"), "n_read_threads": 3}, {"type": "obj"}
    bad = {"type": "fs", "root_dir": str(tmp_path / "file" / "folder")}
    first, second = ({"secondary_tiers": tiers_} for tiers_ in ([bad, other], [good]))
    within = {"kv_connector": "MultiConnector", "kv_connector_extra_config": connectors(second)}
    outer = {"connectors": [*connectors(first)["connectors"], within, {"kv_connector": "OffloadingConnector"}]}
    tiers.replace_tiers(settings(outer), FORMATS["tq4"])
    (tier,) = second["secondary_tiers"]
    assert tier == {**good, "type": tiers.FILES, "page_format": tier["page_format"]}
    assert tier["page_format"].startswith("tq4-")
    assert first["secondary_tiers"] == [other]
    (line,) = lines
    assert "tier disabled" in line and line.endswith("; name a folder that this server can write as root_dir")
    assert str(tmp_path / "file") in line
    assert not [*(tmp_path / "new").iterdir()]
    assert SecondaryTierFactory.get_tier_class(tier) is PackedFileTier
    before = copy.deepcopy(outer)
    tiers.replace_tiers(settings(outer), FORMATS["tq4"])  # a second engine with the same settings
    assert outer == before


@pytest.mark.parametrize("folder", [{}, {"root_dir": ""}, {"root_dir": 3}])
def test_a_tier_without_a_folder(folder: dict[str, Any]) -> None:
    extra = connectors({"secondary_tiers": [{"type": "fs", **folder}]})
    with pytest.raises(ValueError, match='has no folder; write "root_dir": "PATH"'):
        tiers.check_tiers(settings(extra))
