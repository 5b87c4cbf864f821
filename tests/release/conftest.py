"""The distributions as scripts/release.sh builds them, and an environment in which the wheel is installed.

torch, vLLM and the like are those of the environment that runs the tests: its folder of packages is put behind the new
one's, by a .pth file. Such a folder's own .pth files are not read, so this checkout's editable install is not seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from checkout import REPO
from installed_wheel import Distributions, Installed


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    folder = tmp_path_factory.mktemp("dist")
    environment = {**os.environ, "PACKED_KV_PYTHON": sys.executable}
    done = subprocess.run(
        [REPO / "scripts" / "release.sh", folder], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Distributions(wheel, source)


@pytest.fixture(scope="session")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, distributions.wheel], check=True)
    ours = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (ours / "big_packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _, *rest = (Path(sysconfig.get_path("scripts")) / "vllm").read_text().splitlines()  # the first line names a Python
    vllm = folder / "bin" / "vllm"
    vllm.write_text("\n".join([f"#!{python}", *rest, ""]))
    vllm.chmod(0o755)
    return Installed(folder)
