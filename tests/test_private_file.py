"""Files of folders where others may have put anything: what is opened, what is replaced, what is cleaned away."""

from __future__ import annotations

import ast
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import REPO
from packed_kv.private_file import (
    LOCK,
    TEMPORARY,
    NotRegular,
    Untrusted,
    locked,
    new_name,
    open_own,
    open_regular,
    own_folder,
    read_own,
    replace_file,
    replacing,
    sweep,
    temporary_folder,
    why_not_replaced,
)

ROOTS = ("overlay/packed_kv", "calibration", "quality")
OPENS = {
    "open", "fdopen", "read_text", "write_text", "read_bytes", "write_bytes", "touch", "save_file", "savefig",
    "safe_open", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "truncate",
    "memfd_create",
}  # fmt: skip
"""Names of functions that open files."""
OWN = "a file of the package, or one without a name"
INPUT = "a text that a user names, which may be a pipe"
ENGINE = "weights that the engine reads as well"
TEMPORARY_FOLDER = "below temporary_folder"
EXCEPTIONS = {
    ("overlay/packed_kv/model/config_defaults.py", "read_text"): OWN,
    ("overlay/packed_kv/planning/measured.py", "read_text"): OWN,
    ("overlay/packed_kv/kernels/cuda/source.py", "read_text"): OWN,
    ("overlay/packed_kv/kernels/cpu/build.py", "read_text"): OWN,
    ("overlay/packed_kv/kernels/cpu/build.py", "open"): OWN,
    ("overlay/packed_kv/kernels/cpu/build.py", "memfd_create"): OWN,
    ("overlay/packed_kv/kernels/cpu/build.py", "write_text"): TEMPORARY_FOLDER,
    ("overlay/packed_kv/kernels/cpu/build.py", "write_bytes"): TEMPORARY_FOLDER,
    ("overlay/packed_kv/kernels/cpu/build.py", "read_bytes"): TEMPORARY_FOLDER,
    ("overlay/packed_kv/kernels/cpu/compiler.py", "read_text"): "/proc/cpuinfo",
    ("overlay/packed_kv/selftest/__main__.py", "fdopen"): "its own standard output",
    ("overlay/packed_kv/commands/main.py", "open"): "/dev/null",
    ("overlay/packed_kv/commands/selftest.py", "TemporaryFile"): OWN,
    ("overlay/packed_kv/commands/selftest.py", "read_text"): "metadata of the installed distribution",
    ("overlay/packed_kv/sharing/file_tier.py", "open"): "O_DIRECT, O_NOFOLLOW and random names: checks of its own",
    ("overlay/packed_kv/sharing/model_identity.py", "read_bytes"): ENGINE,
    ("overlay/packed_kv/sharing/model_identity.py", "open"): ENGINE,
    ("overlay/packed_kv/settings/self_calibration.py", "read_bytes"): OWN,
    ("calibration/tq_calibrate/text.py", "read_text"): INPUT,
    ("calibration/tq_calibrate/run.py", "read_text"): "the function of text.py",
    ("calibration/tq_calibrate/weights.py", "safe_open"): ENGINE,
    ("calibration/tq_calibrate/report.py", "savefig"): "into memory",
    ("quality/packed_kv_quality/plots.py", "savefig"): "into memory",
    ("quality/packed_kv_quality/arguments.py", "read_text"): INPUT,
    ("quality/packed_kv_quality/recall.py", "read_text"): OWN,
    ("quality/packed_kv_quality/baseline.py", "save_file"): "over the file of replacing",
    ("quality/packed_kv_quality/baseline.py", "safe_open"): "after open_regular; memory is mapped",
    ("quality/packed_kv_quality/servers.py", "read_text"): "the log below the folder that benchmarks/serve.py made",
    ("quality/packed_kv_quality/servers.py", "open"): "the log below the folder that benchmarks/serve.py made",
    ("quality/long_context.py", "read_text"): INPUT,
    ("quality/json_answers.py", "read_text"): INPUT,
    ("quality/behind_hits.py", "read_text"): INPUT,
    ("quality/latent_quality.py", "read_text"): INPUT,
    ("quality/section_widths.py", "read_text"): INPUT,
}
"""(File, function) that opens without `private_file`, and why it may."""


def opened(path: Path) -> set[str]:
    """Names of functions in `OPENS` that a file calls, but for `open` with open_regular or a descriptor of ours."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            safe = any(word.arg == "opener" and ast.unparse(word.value) == "open_regular" for word in node.keywords)
            if name in OPENS and not safe:
                found.add(name)
    return found


def test_every_other_file_is_an_exception_with_a_reason() -> None:
    found = {
        (str(path.relative_to(REPO)), name)
        for root in ROOTS
        for path in (REPO / root).rglob("*.py")
        if path.name != "private_file.py"
        for name in opened(path)
    }
    assert found == EXCEPTIONS.keys(), sorted(found ^ EXCEPTIONS.keys())


def test_the_search_for_opened_files_finds_them(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("open('a')\nos.open('a', 0)\npath.open()\nPath('a').write_text('')\nopen(p, opener=open_regular)\n")
    assert opened(file) == {"open", "write_text"}
    file.write_text("with open(path, 'a', opener=open_regular) as file:\n    file.read()\n")
    assert opened(file) == set()


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotRegular):
        open_regular(tmp_path / "fifo")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with own_folder(tmp_path, "") as folder, pytest.raises(Untrusted, match="fifo is not a regular file; delete it"):
        read_own(folder, tmp_path / "fifo")
    with own_folder(tmp_path, "") as folder, pytest.raises(Untrusted, match="fifo is not a regular file; delete it"):
        open_own(folder, tmp_path / "fifo", os.O_WRONLY)


def test_a_lock_leaves_the_content_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("precious")
    (tmp_path / "lock").chmod(0o600)
    (tmp_path / "link").symlink_to("lock")
    with own_folder(tmp_path, "") as folder:
        with locked(folder, tmp_path / "lock", lambda: None):
            assert (tmp_path / "lock").read_text() == "precious"
        with pytest.raises(Untrusted), locked(folder, tmp_path / "link", lambda: None):
            pass
    assert (tmp_path / "lock").read_text() == "precious"


def test_what_has_the_name_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "result").symlink_to("victim")
    umask = os.umask(0o027)
    try:
        replace_file(tmp_path / "result", b"new")
    finally:
        os.umask(umask)
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "result").is_symlink() and (tmp_path / "result").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "result").stat().st_mode) == 0o640
    with pytest.raises(ValueError, match="closed"), replacing(tmp_path / "result") as (file, _):
        file.close()
    assert (tmp_path / "result").read_text() == "new" and len(os.listdir(tmp_path)) == 2


def test_names_in_the_making_are_random(tmp_path: Path) -> None:
    names = set()
    for _ in range(20):
        with replacing(tmp_path / "a") as (_, temporary):
            names.add(temporary.name)
    assert len(names) == 20 and all(map(TEMPORARY.fullmatch, names))


def test_a_name_that_no_file_can_have_is_told_before(tmp_path: Path) -> None:
    assert why_not_replaced(tmp_path / ("a" * 256)).endswith(" cannot be written (File name too long)")
    assert why_not_replaced(tmp_path / "a\0b").endswith(" cannot be written (embedded null byte)")


def is_immutable(path: Path) -> bool:
    return subprocess.run(["chattr", "+i", str(path)], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "out is a folder"),
        (os.mkfifo, "out is not a regular file"),
        (lambda path: path.write_text("old"), ""),
        (lambda path: path.symlink_to("/dev/full"), ""),
        (lambda path: path.symlink_to("nowhere"), ""),
        (lambda path: path.parent.chmod(0o555), "cannot be written to (Permission denied)"),
    ],
    ids=["folder", "FIFO", "file", "link to a device", "dangling link", "folder without permission"],
)
def test_what_cannot_be_replaced_is_told_before(make: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    make(path)
    if reason.endswith("denied)") and not os.geteuid():
        pytest.skip("root may write there")
    found = why_not_replaced(path)
    assert reason in found and bool(reason) == bool(found)
    assert [name for name in os.listdir(tmp_path) if name != "out"] == []
    if not reason:
        replace_file(path, b"new")
        assert path.read_bytes() == b"new"


def test_an_immutable_file_is_told_before(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch()
    try:
        if not is_immutable(path):
            pytest.skip("chattr is not possible here")
        assert why_not_replaced(path) == f"{path} cannot be replaced (Operation not permitted)"
    finally:
        subprocess.run(["chattr", "-i", str(path)], capture_output=True)


def test_another_users_file_in_a_sticky_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").touch()
    tmp_path.chmod(0o1777)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert why_not_replaced(tmp_path / "out").endswith(f"belongs to user {owner}, who alone can replace it there")


def test_a_full_disk_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk still takes names and empty files."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        reason = why_not_replaced(tmp_path / "deeper" / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert reason == f"{tmp_path} cannot be written to (File too large)" and not os.listdir(tmp_path)


MAKING = """\
import subprocess, sys
from pathlib import Path
from packed_kv.private_file import replacing, temporary_folder

with replacing(Path(sys.argv[1], "result")), temporary_folder() as (folder, lock):
    if sys.argv[2:]:
        print(subprocess.Popen(["sleep", "300"], pass_fds=(lock,)).pid, flush=True)
    print(folder, flush=True)
    sys.stdin.read()
"""


def making(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A process that makes a file and, in TMPDIR, a folder."""
    command = [sys.executable, "-c", MAKING, str(folder), *more]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_leftovers_of_killed_processes_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(socket, "gethostname", lambda: "another")
        others = f".{new_name()}"
    bystanders = {"packed_kv-notes", new_name().removesuffix(".tmp"), f"{new_name()}.txt", others}
    for name in bystanders:
        (tmp_path / name).touch()
    with making(tmp_path) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline()
        made = set(os.listdir(tmp_path)) - bystanders
        assert len(made) == 2 and all(map(TEMPORARY.fullmatch, made))
        for name in made:
            os.utime(tmp_path / name, (0, 0))  # age does not count
        sweep(tmp_path)
        assert set(os.listdir(tmp_path)) == made | bystanders
        maker.kill()
    assert set(os.listdir(tmp_path)) == made | bystanders
    owner = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: owner + 1)
        sweep(tmp_path)
        assert set(os.listdir(tmp_path)) == made | bystanders
    sweep(tmp_path)
    assert set(os.listdir(tmp_path)) == bystanders


def test_a_compiler_that_outlives_its_process_keeps_its_folder(tmp_path: Path) -> None:
    with making(tmp_path, "with a child") as maker:
        assert maker.stdout is not None
        child, folder = int(maker.stdout.readline()), Path(maker.stdout.readline().strip())
        maker.kill()
    try:
        sweep(tmp_path)
        assert os.listdir(tmp_path) == [folder.name], "the file has gone, the folder is in use"
    finally:
        os.kill(child, 9)
    while Path(f"/proc/{child}/fd").exists() and os.listdir(f"/proc/{child}/fd"):  # until its descriptors are closed
        pass
    sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_link_with_the_name_of_a_leftover_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    (victim / LOCK).touch()
    (tmp_path / new_name()).symlink_to("victim")
    sweep(tmp_path)
    assert (victim / "file").exists()


@pytest.mark.parametrize(
    ("mode", "has_lock", "stays"),
    [(0o777, True, True), (0o770, True, True), (0o1777, False, True), (0o1777, True, False), (0o700, True, False)],
    ids=["of all", "of a group", "without a lock", "sticky", "own"],
)
def test_a_folder_that_others_may_have_renamed_stays(mode: int, has_lock: bool, stays: bool, tmp_path: Path) -> None:
    """In a TMPDIR without a sticky bit anybody can give a user's own folder the name of a leftover."""
    left = tmp_path / new_name()
    left.mkdir()
    (left / "file").touch()
    if has_lock:
        (left / LOCK).touch()
    tmp_path.chmod(mode)
    sweep(tmp_path)
    assert (left / "file").exists() == stays


def test_what_is_loaded_is_made_where_nobody_can_rename_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    reason = r"others can rename what is in it \(.*mode 777, no sticky bit\)"
    with pytest.raises(PermissionError, match=reason), temporary_folder():
        pass
    with temporary_folder(anywhere=True) as (folder, _):
        assert folder.parent == shared
    with temporary_folder(own) as (folder, _):
        assert folder.parent == own and stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o770)
    with pytest.raises(PermissionError, match="own"), temporary_folder(own):
        pass
    shared.chmod(0o1777)
    with temporary_folder(own) as (folder, _):
        assert folder.parent == shared


def test_a_lock_that_a_umask_left_open_is_closed_to_others(tmp_path: Path) -> None:
    """Nobody reads a lock, so what others wrote into it does not count."""
    lock = tmp_path / "lock"
    lock.touch()
    lock.chmod(0o664)
    with own_folder(tmp_path, "") as folder:
        with locked(folder, lock, lambda: None):
            assert stat.S_IMODE(lock.stat().st_mode) == 0o644
        lock.chmod(0o664)
        with pytest.raises(Untrusted, match="others can write"):
            open_own(folder, lock)


def test_a_folder_that_a_umask_left_open_is_told_with_its_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    remedy = rf"others can write {tmp_path} \(mode 775\); run: chmod go-w {tmp_path}, or name another"
    with pytest.raises(Untrusted, match=remedy), own_folder(tmp_path, "name another"):
        pass


def test_a_dangling_link_as_folder_is_told_before(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert why_not_replaced(tmp_path / "link" / "out") == f"{tmp_path / 'link'} is a link that leads nowhere"


def test_a_temporary_folder_is_private_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder() as (folder, _):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.parent == tmp_path
        (folder / "file").touch()
    assert os.listdir(tmp_path) == []
