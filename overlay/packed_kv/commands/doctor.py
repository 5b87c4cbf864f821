"""Check what a server with packed pages needs. Each line begins with OK or says what to do.

Exit code: 0 if every line is OK, 1 if not, 2 for bad arguments and a config.json that cannot be used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..calibration_file import FILE_NAME, CalibrationError, why_no_file
from ..calibration_file import load as load_calibration
from ..formats import FORMATS
from ..gpu_generations import LEAST_CAPABILITY
from ..json_file import printable
from ..kernels.cpu.compiler import BuildError, best_target, find_compiler
from ..kernels.cuda import LATENT, LATENT_ROWS, runs_on
from ..kernels.kernel_cache import NoHome, cache_folder, why_not_kept
from ..kernels.served import CUDA, Engine, Latents, Pairs, who_serves
from ..model.cache_scheme import describe_cache_scheme
from ..model.config_fields import BadInput, nested
from ..model.rope import Parameters
from ..model.shape import Model, expanded_size, parse
from ..planning.config_file import load, model_name
from ..planning.plan import layers
from ..private_file import open_regular, why_not_replaced
from ..refusals.table import refusals_of_model, untried
from .arguments import EXIT_BAD_INPUT, GIB, LONGEST_LINE, Parser, installed_vllm

LEAST_PYTHON = (3, 11)
CONFIG = "config.json"
HEAD_DIM, GROUP = 128, 4
"""Head size and query heads per KV head for which kernels are named if no model is given."""
PROBE_SECONDS = 300
SELFTEST = "whether these kernels are right here: packed-kv selftest"
OWN_SOURCES = b"packed_kv/kernels/"
"""Part of the source path of each of our kernels; Triton keeps the path with the compiled kernel."""
BEGINNING = 4096
"""Bytes read of each file of Triton's cache, which may be shared and hold thousands."""


@dataclass(frozen=True)
class Finding:
    """A line of the answer. If not `ok`, it says what to do. `is_bad_input`: an argument cannot be used."""

    ok: bool
    text: str
    is_bad_input: bool = False

    def __str__(self) -> str:
        return printable(f"OK    {self.text}" if self.ok else self.text, LONGEST_LINE)


def main(arguments: Sequence[str] | None = None, prog: str = "packed-kv doctor") -> int:
    """The command. Returns its exit code."""
    options = parser(prog).parse_args(arguments)
    code = 0
    for finding in findings(options):
        code = max(code, 0 if finding.ok else EXIT_BAD_INPUT if finding.is_bad_input else 1)
        print(finding, flush=True)
    return code


def parser(prog: str = "packed-kv doctor") -> argparse.ArgumentParser:
    """The arguments of the command."""
    made = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", metavar="MODEL", help="folder, config.json, or Hugging Face Hub id")
    made.add_argument("--tiers", type=Path, nargs="+", default=[], metavar="DIR",
                      help="folders that pages will be offloaded to")  # fmt: skip
    return made


def findings(options: argparse.Namespace) -> Iterator[Finding]:
    """All lines, as they are found."""
    yield _python()
    model, folder, source = None, None, options.model
    if source is not None:
        if Path(source).name == CONFIG and Path(os.path.expanduser(source)).is_file():
            source = str(Path(source).parent)
        try:
            config, folder = load(source)
            refused = refusals_of_model(config, vllm=installed_vllm())
            if all(refusal.rule.option for refusal in refused):
                model = parse(config, model_name(source))
                refused = refusals_of_model(config, model)
        except BadInput as error:
            yield Finding(False, str(error), is_bad_input=True)
        else:
            if model:
                yield Finding(True, f"{model.name}: {layers(model)}")
                if asked := describe_cache_scheme(nested(model.config, "quantization_config")):
                    yield Finding(True, f"{model.name}: {asked}")
                if warning := untried(config):
                    yield Finding(True, f"{model.name}: {warning}")
            for refusal in refused:
                name = printable(model_name(source))
                yield Finding(bool(refusal.rule.option), f"{name}: {refusal.sentence()}")
    has_torch, vllm = importlib.util.find_spec("torch") is not None, _vllm()
    if not has_torch:
        yield Finding(False, "PyTorch is not installed; it comes with vLLM: pip install vllm")
    yield vllm
    yield _entry_point()
    found: dict[str, Any] = {}
    if has_torch and importlib.util.find_spec("vllm") is not None:
        found = _probe(model, folder if source and not os.path.isfile(source) else None)
        yield from _engine(found, model)
    if model:
        yield _calibration(source, model, folder, found.get("ropes"))
    yield from map(_tier, options.tiers)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    needed = ".".join(map(str, LEAST_PYTHON))
    if sys.version_info < LEAST_PYTHON:
        return Finding(False, f"Python {version} is too old; use {needed} or later")
    return Finding(True, f"Python {version}, packed-kv {_version('packed-kv')}")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a distribution"


def _vllm() -> Finding:
    """Find vLLM's version, and say as packed-kv-patch does whether it is patched. Reads files, imports no vLLM."""
    pins, tree = (import_module(f"packed_kv_patches.{name}") for name in ("pins", "tree"))
    if importlib.util.find_spec("vllm") is None:
        versions = [f"{wheel.distribution}=={pin.version}" for pin in pins.load().values() for wheel in pin.wheels]
        return Finding(False, f"vLLM is not installed; pip install one of: {', '.join(versions)}")
    try:
        installed = tree.locate(None, pins.load())
        found = tree.inspect(installed)
    except pins.PatchError as error:
        return Finding(False, str(error))
    name = f"{installed.distribution} {installed.pin.version}"
    if found.state is tree.State.PATCHED:
        return Finding(True, f"{name}, patched")
    if found.state is tree.State.CHANGED:
        return Finding(False, f"{name} is {found.state.value}; run: packed-kv patch status")
    return Finding(False, f"{name} is {found.state.value}; run: packed-kv patch apply")


def _entry_point() -> Finding:
    """Check that vLLM finds the plugin; VLLM_PLUGINS may exclude it."""
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "packed_kv" not in names:
        return Finding(False, "vLLM finds no plugin, as packed-kv is not installed here; run: pip install packed-kv")
    if _is_excluded():
        return Finding(False, f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} excludes the plugin; add packed_kv to it")
    return Finding(True, "plugin installed")


def _is_excluded() -> bool:
    """True if VLLM_PLUGINS is set and does not name the plugin, which vLLM then does not load."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is not None and "packed_kv" not in allowed.split(",")


def _probe(model: Model | None, folder: Path | None) -> dict[str, Any]:
    """Findings of a process that loads vLLM, or "failed" with the reason. `folder`: the folder of the model's
    config.json."""
    command = [sys.executable, "-P", "-m", f"{__package__}.probe", str(_heads(model)[0])]
    if model and folder:
        command.append(str(folder))
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=quiet, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"vLLM does not load within {PROBE_SECONDS} s; try: python -c 'import vllm'"}
    if run.returncode or not run.stdout.strip():
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        return {"failed": f"vLLM does not load ({last}); try: python -c 'import vllm', and install it again"}
    return json.loads(run.stdout.strip().splitlines()[-1])


def _engine(found: dict[str, Any], model: Model | None) -> Iterator[Finding]:
    """Findings of the process that loads vLLM: plugin, device, FlashAttention, decode kernel, the model's config."""
    if "failed" in found:
        yield Finding(False, found["failed"])
        return
    missing = [name for name in FORMATS if name not in found["registered"]]
    if missing and _is_excluded():
        yield Finding(True, "dtypes not looked for, as the plugin is excluded")
    elif missing:
        yield Finding(False, f"the plugin does not register {', '.join(missing)}; run: packed-kv patch apply")
    else:
        yield Finding(True, f"plugin loads: {', '.join(found['registered'])} (PyTorch {found['torch']})")
    yield from _device(found, *_heads(model), has_latents=model is not None and model.has_latents)
    if model and found.get("unknown"):
        yield Finding(False, f"{model.name}: {found['unknown']}")
    elif model and (reason := found.get("unreadable")):
        by_code = found["has_code"]
        unread = f"cannot read the config ({printable(reason)}); use another model"
        said = "needs --trust-remote-code" if by_code else unread
        yield Finding(by_code, f"{model.name}: vLLM {said}")


def _device(found: dict[str, Any], head_dim: int, group: int, has_latents: bool = False) -> Iterator[Finding]:
    if found["platform"] == "cpu":
        yield _cpu_kernels()
        yield from _cache()
        yield Finding(True, SELFTEST)
        return
    if found["platform"] != "cuda" or not found["devices"]:
        yield Finding(False, f"no CUDA device answers (platform {found['platform']}); look at: nvidia-smi")
        return
    major, minor = found["capability"]
    capability = major, minor
    name = f"{found['devices']} x {found['device']}, compute capability {capability[0]}.{capability[1]}"
    if capability < LEAST_CAPABILITY:
        yield Finding(False, f"{name}: packed pages need 8.0 or later; use another GPU")
        return
    yield Finding(True, f"{name}, {found['memory'] / GIB:.1f} GiB")
    if found["flash_attention"] is None:
        slow = f"no FlashAttention for heads of {head_dim} channels, so prefill would run in PyTorch, many times slower"
        yield Finding(False, f"{slow}; install the wheel of vLLM that was built for this CUDA")
    else:
        yield Finding(True, f"FlashAttention {found['flash_attention']}")
    if has_latents:
        yield Finding(True, f"decodes of latents are served by {_latent_kernel(capability)}")
    else:
        yield Finding(True, _decode_kernel(capability, head_dim, group))
    if runs_on(capability):
        yield from _cache()
    yield Finding(True, _triton_kernels())
    yield Finding(True, SELFTEST)


def _cpu_kernels() -> Finding:
    """Check that kernels can be compiled for this processor, and count the compiled ones."""
    try:
        compiler, target = find_compiler(), best_target()
    except BuildError as error:
        return Finding(False, f"platform CPU: attention would run in PyTorch, many times slower: {error}")
    state = _compiled(f"*-{target.name}-*.so", "libraries")
    return Finding(True, f"platform CPU: kernels in C++ for {target.name} by {compiler.version}, {state}")


def _compiled(pattern: str, kind: str) -> str:
    """Say how many kernels are in the cache, and where the cache is."""
    try:
        folder = cache_folder()
    except NoHome:
        return "to be compiled at each start"
    number = len(list(folder.glob(pattern)))
    return f"{number} {kind} compiled in {folder}" if number else f"to be compiled at the first start, into {folder}"


def _cache() -> Iterator[Finding]:
    """A finding if compiled kernels cannot be kept."""
    if reason := why_not_kept():
        yield Finding(False, f"each start would compile the kernels again: {reason}")


def _latent_kernel(capability: tuple[int, int]) -> str:
    rank, rope_dim = LATENT
    served = who_serves(Engine("cuda", capability), Latents(None, rank, rope_dim, heads=1))
    if served.kernel != CUDA:
        return f"the Triton kernel ({served.reason})"
    shape = f"those of {rank} channels and {rope_dim} of RoPE"
    return f"the CUDA kernel: {shape}, up to {LATENT_ROWS} query heads of a GPU times query tokens; else by Triton's"


def _decode_kernel(capability: tuple[int, int], head_dim: int, group: int) -> str:
    served = who_serves(Engine("cuda", capability), Pairs(None, head_dim, group))
    heads = f"heads of {head_dim} channels, {group} query heads per KV head"
    if served.kernel != CUDA:
        return f"decodes of {heads} are served by the Triton kernel ({served.reason})"
    return f"decodes of {heads} are served by the CUDA kernel, {_compiled('decode-*.cubin', 'variants')}"


def _triton_kernels() -> str:
    """Count the variants of our kernels in Triton's cache. With torch.compile, vLLM keeps another cache for each of its
    compilations."""
    home = Path(os.path.expanduser(os.environ.get("TRITON_HOME") or "~"))
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    number = sum(OWN_SOURCES in _beginning(file) for file in folder.glob("*/*.ttir"))
    state = f"{number} variants compiled in" if number else "to be compiled at the first start, into"
    return f"Triton kernels: {state} {folder}"


def _beginning(file: Path) -> bytes:
    """The first bytes of a file in a cache, where Triton names the kernel's source. Empty for a file that cannot be
    read: it may have been deleted, or be another user's."""
    try:
        with open(file, "rb", opener=open_regular) as opened:
            return opened.read(BEGINNING)
    except OSError:
        return b""


def _heads(model: Model | None) -> tuple[int, int]:
    """Channels of a head in the prefill of the model's first attention layer, and its query heads per KV head."""
    if model is None:
        return HEAD_DIM, GROUP
    layer = model.attention[0]
    if layer.rope_size:  # latents are expanded
        return expanded_size(model.config), layer.kv_heads
    return layer.head_size, model.query_heads(layer) // layer.kv_heads


def _calibration(name: str, model: Model, folder: Path | None, ropes: dict[str, Parameters] | None) -> Finding:
    """The file that an engine would use, or that there is none. `ropes`: the model's; None: not known."""
    file = (folder or Path()) / FILE_NAME
    if not file.is_file():
        kept = sorted(_cache_root().glob(f"packed_kv/{model.name.rpartition('/')[2]}-*.json"))
        if not kept:
            if reason := why_no_file(model):
                return Finding(True, f"no calibration, and none can be made: {reason}; tq4 needs none")
            return Finding(True, f"no calibration (optional); to lower the error: packed-kv calibrate model {name}")
        return Finding(True, f'calibration of "auto" kept in {kept[-1]} (used with "calibration": "auto")')
    try:
        found = load_calibration(file)
        found.check_model(**model.calibrated_shape())
        if ropes is not None:
            found.check_rope(ropes)
    except CalibrationError as error:
        return Finding(False, str(error))
    unlike = ", not compared with the model's RoPE" if found.ropes and ropes is None else ""
    return Finding(True, f"calibration of {len(found.layers)} layers, made for {found.recipe}, in {file}{unlike}")


def _cache_root() -> Path:
    """vLLM's cache folder, found as its `envs.py` finds it."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("VLLM_CACHE_ROOT") or f"{cache}/vllm"))


def _tier(folder: Path) -> Finding:
    """Check that pages can be written into a folder."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        return Finding(False, f"--tiers {folder}: {there} is not a folder; name another")
    if there != folder:
        return Finding(False, f"--tiers {folder} is not a folder; run: mkdir -p {folder}")
    if reason := why_not_replaced(folder / "pages"):
        return Finding(False, f"--tiers: {reason}; give it to the user who serves, or name another")
    state = os.statvfs(folder)
    return Finding(True, f"tier {folder}: {state.f_bavail * state.f_frsize / GIB:.1f} GiB free")
