"""What Hopper's decode kernels do with an SM's cycles, by NVIDIA Nsight Compute (`ncu`, of the CUDA toolkit).

    python benchmarks/profile_kernels.py [--decode GROUPxTOKENS[+RECENT] ...] [--latent HEADS ...] [--csv FILE]

Runs itself under `ncu` and reads the counters of one launch a case: isoquant4 over 32 requests of 8,192 tokens, with 8
KV heads of 128 channels, GROUP query heads of each, TOKENS query tokens a request and RECENT tokens of a window, as
benchmarks/kernels.py times it; and latents in tq4 over 64 requests of 4,096 tokens, as benchmarks/latent_kernels.py
does. `ncu` repeats a launch for each group of counters, from empty caches, so `us` is not the kernel's time in a graph.
Counters need rights that a container may lack: then `ncu` says ERR_NVGPUCTRPERM.

Columns of the CSV file besides `us`: `warps` on a scheduler; `issued`, the share of its cycles in which it issues, and
`instructions`, how many; of their peak, the shares of the pipes `alu` (PRMT, LOP3, shifts, integers), `fma`, `tensor`
and `xu` (exponentials, conversions), of `shared` (the data pipe of shared memory and L1, products' operands included)
and of `dram`; and the cycles between two instructions of a warp, by Nsight Compute's reasons (`stall_...`).
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rows import append, commit_here, machine

DECODE = ("4x1", "4x2", "4x4", "16x1", "4x4+64", "4x8", "4x16")
LATENT = ("16", "20", "32", "64", "128")
METRICS = {
    "us": "gpu__time_duration.sum",
    "warps": "smsp__warps_active.avg.per_cycle_active",
    "issued": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.avg",
    "alu": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "xu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
SHARES = ("issued", "alu", "fma", "tensor", "xu", "shared", "dram")
STALLS = (
    "selected", "not_selected", "wait", "math_pipe_throttle", "dispatch_stall", "long_scoreboard", "short_scoreboard",
    "mio_throttle", "barrier", "gmma", "branch_resolving", "no_instruction",
)  # fmt: skip
METRICS |= {f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS}


def decode_launch(case: str) -> Callable[[], None]:
    """One layer's attention of benchmarks/kernels.py."""
    import kernels

    kernels.LAYERS = 1
    columns, _, recent = case.partition("+")
    group, tokens = map(int, columns.split("x"))
    layers = kernels.Layers("isoquant4", 32, 8192, int(recent or 0), group=group, query_tokens=tokens)
    return layers.rounds("cuda", None, 0)["cuda"]


def latent_launch(heads: str) -> Callable[[], None]:
    """One layer's attention of benchmarks/latent_kernels.py."""
    import latent_kernels
    from packed_kv.codecs.latent import LatentCodec
    from packed_kv.formats import FORMATS

    codec = LatentCodec(FORMATS["tq4"], latent_kernels.RANK, latent_kernels.ROPE, device="cuda")
    batch = latent_kernels.Batch(64, 4096, int(heads), 1, 0, codec.slot_bytes)
    batch.layers = 1
    return latent_kernels.packed_round(batch, codec, latent_kernels.packed_pages(codec), 0)


def launch(options: argparse.Namespace) -> None:
    """Launch each case once behind `cudaProfilerStart`, where all is compiled."""
    import torch

    launches = [decode_launch(case) for case in options.decode] + [latent_launch(heads) for heads in options.latent]
    for function in launches:
        function()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for function in launches:
        function()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profile(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the metrics of each case in turn."""
    cases = ["--decode", *options.decode, "--latent", *options.latent]
    command = [
        options.ncu, "--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(METRICS.values()),
        "--kernel-name", "regex:^(decode|latent_decode)$", "--page", "raw", "--print-units", "base", "--csv",
        sys.executable, __file__, "--launch", *cases,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]  # others are `ncu`'s remarks
    found = list(csv.DictReader(table))[1:]  # behind the head, units
    if done.returncode or len(found) != len(options.decode) + len(options.latent):
        sys.exit(f"{options.ncu} ended with {done.returncode} and {len(found)} launches:\n{done.stdout}{done.stderr}")
    return [{name: float(row[metric].replace(",", "")) for name, metric in METRICS.items()} for row in found]


def as_text(name: str, value: float) -> str:
    if name == "us":
        return f"{value / 1e3:.1f}"
    if name in SHARES:
        return f"{value / 100:.3f}"
    return f"{value:.0f}" if name == "instructions" else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", nargs="*", default=DECODE, metavar="GROUPxTOKENS[+RECENT]")
    parser.add_argument("--latent", nargs="*", default=LATENT, metavar="HEADS")
    parser.add_argument("--ncu", default=shutil.which("ncu") or "/usr/local/cuda/bin/ncu")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch(options)
        return
    if not Path(options.ncu).exists():
        parser.error(f"there is no {options.ncu}; install Nsight Compute, or say where it is with --ncu")
    made_with = {**machine(with_vllm=False), "commit": options.commit or commit_here()}
    cases = [("decode", case) for case in options.decode] + [("latent_decode", heads) for heads in options.latent]
    for (kernel, case), found in zip(cases, profile(options), strict=True):
        row: dict[str, object] = {name: as_text(name, value) for name, value in found.items()}
        print(f"{kernel:13} {case:7}", " ".join(f"{name} {row[name]}" for name in row if "stall" not in name))
        if options.csv:
            append(options.csv, {"kernel": kernel, "case": case, **row, **made_with})


if __name__ == "__main__":
    main()
