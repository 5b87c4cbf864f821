"""scripts/gpu_tests.sh: which tests each part runs, in how many processes, and that a failure of one is told. No GPU:
python3 is a fake."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from checkout import REPO

SCRIPT = REPO / "scripts" / "gpu_tests.sh"
PYTHON = """#!/bin/bash
[[ $1 == -m ]] || exit 0
if [[ $7 == --collect-only ]]; then
    if [[ "$*" == *"$UNCOLLECTED"* ]]; then echo "an import fails"; exit 2; fi
    for file in "${@:8}"; do
        if [[ $file == tests/* ]]; then for i in {1..20}; do echo "$file::test_$i"; done; fi
    done
    echo "20 tests collected"
else
    said=
    for word in "${@:7}"; do
        if [[ $word == @* ]]; then word=$(tr '\n' ' ' <"${word#@}"); fi
        said+=" $word"
    done
    echo "ran$said"
    [[ "$said" != *"$FAILING"* ]]
fi
"""
"""Collects 20 tests of each file, and says what it runs."""
SANITIZER = """#!/bin/bash
while [[ $1 != python3 ]]; do shift; done
"$@"
"""


CORES = "#!/bin/bash\necho 16\n"


@pytest.fixture
def path(tmp_path: Path) -> str:
    for name, text in (("python3", PYTHON), ("compute-sanitizer", SANITIZER), ("nproc", CORES)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def run(
    path: str, *arguments: str, failing: str = "nothing", uncollected: str = "nothing"
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    environment = {**os.environ, "PATH": path, "FAILING": failing, "UNCOLLECTED": uncollected}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def files(part: str) -> set[str]:
    return set(re.findall(r"(tests/\S+)::test_1 ", part))


def processes(part: str) -> int:
    return len(re.findall("^ran .*::", part, re.MULTILINE))


def test_parts_one_after_the_other(path: str) -> None:
    done = run(path)
    assert done.returncode == 0, done.stderr
    kernels, selftest, engine, picked, memcheck = done.stdout.split("== ")[1:]
    assert files(kernels) == {"tests/codecs/test_cuda.py", "tests/attention/test_sparse_steps.py", "tests/kernels"}
    assert "ran tests/selftest/test_selftest_on_cuda.py" in selftest
    assert {"tests/engine/test_on_cuda.py", "tests/engine/test_mixed_on_cuda.py"} < files(engine)
    assert {"tests/engine/test_sparse_on_cuda.py", "tests/engine/test_hy4_on_cuda.py"} < files(picked)
    for part in (kernels, engine, picked):
        assert all(part.count(f"{file}::test_{i} ") == 1 for file in files(part) for i in range(1, 21))
    assert [processes(part) for part in (kernels, engine, picked)] == [8, 5, 4]
    cases = re.findall(r'^    "(tests/.*?)"', SCRIPT.read_text(), re.MULTILINE)
    assert memcheck.count("ran tests/") == 8 and len(cases) > 20
    assert all(memcheck.count(case) == 1 for case in cases)


@pytest.mark.parametrize(("cores", "expected"), [(1, (1, 1, 1, 1)), (32, (16, 10, 4, 16))])
def test_processes_by_cores(path: str, cores: int, expected: tuple[int, int, int, int]) -> None:
    Path(path.split(os.pathsep)[0], "nproc").write_text(f"#!/bin/bash\necho {cores}\n")
    kernels, _, engine, picked, memcheck = run(path).stdout.split("== ")[1:]
    assert (*map(processes, (kernels, engine, picked)), memcheck.count("ran tests/")) == expected


def test_generations_only_by_name(path: str) -> None:
    assert "--as-capability" not in run(path).stdout
    done = run(path, "generations", failing="--as-capability 8.0")
    assert done.returncode == 1 and done.stderr == "gpu_tests.sh: failed: generations\n"
    ran = re.findall("^ran --as-capability (\\S+) ", done.stdout, re.MULTILINE)
    assert ran == ["8.0"] * 8 + ["8.9"] * 8  # which follows what fails as 8.0
    folders = files(done.stdout)
    assert "tests/kernels/triton" in folders and all((REPO / folder).exists() for folder in folders)


@pytest.mark.parametrize("failing", ["test_drafts.py", "test_combine[inf]"])
def test_a_failure_is_told(path: str, failing: str) -> None:
    part = "engine" if "drafts" in failing else "memcheck"
    done = run(path, failing=failing)
    assert done.returncode == 1 and done.stderr == f"gpu_tests.sh: failed: {part}\n"


def test_what_cannot_be_collected_is_told(path: str) -> None:
    done = run(path, uncollected="tests/engine/test_hy4")
    assert done.returncode == 1 and done.stderr == "gpu_tests.sh: failed: picked\n"
    assert "an import fails" in done.stdout.split("== ")[4]


def test_unknown_parts_are_refused(path: str) -> None:
    done = run(path, "kernels", "kernel")
    assert done.returncode == 2 and "no part 'kernel'" in done.stderr and not done.stdout
