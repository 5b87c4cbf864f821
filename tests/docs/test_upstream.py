"""The tests in the texts for upstream (docs/upstream/) pass on the patched vLLM that runs these."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import REPO
from packed_kv.vllm_compat import version_without_rows
from vllm.v1.kv_cache_interface import KVQuantMode

TEXTS = sorted(path for path in (REPO / "docs" / "upstream").glob("*.md") if path.name != "README.md")


NEWER = {
    "custom-mode": lambda: "CUSTOM" in KVQuantMode.__members__,
    "sparse-latents": lambda: not version_without_rows(),
}
"""Texts about what 0.32 does not have -> whether this vLLM has it."""


def snippet(text: Path) -> str:
    (code,) = (
        code for code in re.findall(r"^```python\n(.*?)^```", text.read_text(), re.M | re.S) if "def test" in code
    )
    return code


def test_each_test_passes(tmp_path: Path) -> None:
    for text in TEXTS:
        if text.stem not in NEWER or NEWER[text.stem]():
            (tmp_path / f"test_{text.stem}.py").write_text(snippet(text))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "27 passed" in done.stdout


def test_each_patch_has_its_text() -> None:
    patches = (REPO / "vllm_patches" / "v0.33.0" / "series").read_text().split()
    index = (TEXTS[0].parent / "README.md").read_text()
    for patch in patches:
        added = len(re.findall(r"^\+(?!\+\+)", (REPO / "vllm_patches" / "v0.33.0" / patch).read_text(), re.M))
        files = len(re.findall(r"^\+\+\+", (REPO / "vllm_patches" / "v0.33.0" / patch).read_text(), re.M))
        assert re.search(rf"v0\.33\.0/{re.escape(patch)}\) \| {files} \| {added} \|", index), patch
    assert len(TEXTS) == len(patches) + 1


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_each_text_has_its_parts(text: Path) -> None:
    headings = re.findall(r"^## (.*)", text.read_text(), re.M)
    assert headings == ["Problem", "Change", "Test", "What it lets others do"]
