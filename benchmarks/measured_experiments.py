"""The tables of docs/reliability.md and docs/quality.md that `measured.py` makes from results/. `RELIABILITY` and
`QUALITY` name them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from measured_rows import ORDER, RESULTS, file_named, files, load
from tables import Table


def soak_restarts() -> list[Table]:
    """Runs of tests/soak/soak_restarts.py, a column each."""
    names = [file.name for file in files() if file.name.startswith("soak_restarts")]
    reports = [json.loads((RESULTS / name).read_text()) for name in names]
    rows = [{**file_named(name).runs[0], "file": name} for name in names]
    columns = [_soak(report, row) for report, row in zip(reports, rows, strict=True)]
    heads = [f"{row.get('gpu') or 'CPU'}: {row['model']}" for row in rows]
    table = Table(["soak with restarts", *heads], 1 + len(names))
    for number, line in enumerate(columns[0]):
        table.add([line, *(column[line] for column in columns)], [] if number else rows)
    return [table]


def _soak(found: Mapping, row: Mapping) -> dict[str, str]:
    kills = found["kills"]
    left = sum(len(kill.get(what, ())) for kill in kills for what in ("processes_left", "locks_held"))
    same = found["samples"] - found["samples_parted"]
    hits = f"{found['prefix_cache_hits']:,} of {found['prompt_tokens']:,}; {found['offloaded_hits']:,}"
    return {
        "dtype": found["dtype"],
        'kills: while "auto" calibrates; while files are written': f"1; {len(kills) - 1}",
        "seconds until the server had ended by itself": ", ".join(str(kill["seconds"]) for kill in kills),
        "its processes and calibration locks left": str(left),
        "vLLM's files of host memory left in /dev/shm": str(sum(kill["host_memory_left"] for kill in kills)),
        "answers of restarted servers; prompt tokens from disk": (
            f"{found['answers_from_disk']}; {found['tokens_from_disk']:,}"
        ),
        "of these, with other tokens": str(found["answers_from_disk_wrong"]),
        "then clients, seconds": f"{found['clients']}, {found['seconds']:.0f}",
        "requests; generated tokens, per client": (
            f"{found['requests']:,}; {found['tokens']:,}, {found['tokens_a_client']:,}"
        ),
        "errors": str(found["errors"]),
        "cancelled; preempted": f"{found['cancelled']:,}; {found['preemptions']:,}",
        "prompt tokens found in the prefix cache; behind it": hits,
        "answers of the sample that were the same under load": f"{same:,} of {found['samples']:,}",
        "alone again, after the load: the same": f"{found['alone_again_the_same']} of {found['alone']}",
        "memory of all processes, begin, middle, end; growth": _memory(found, "host"),
        "memory of the GPU": _memory(found, "device") if row.get("gpu") else "",
        "files of pages; bad; begun": f"{found['files']:,}; {len(found['bad_files'])}; {found['files_begun']}",
    }


def _memory(found: Mapping, what: str) -> str:
    return f"{', '.join(f'{used:,}' for used in found[f'{what}_mib'])} MiB; {found[f'{what}_growth_mib']:.0f} MiB"


LATENT_CODINGS = {"plain": "bf16 (not coded)", "fp8": "fp8: e4m3, scale 1", "nvfp4": "NVFP4-like"}
ROPE_CODINGS = {"8": "RoPE at 8 bits", "8e4m3": "RoPE in e4m3, a scale a token", "4": "RoPE at 4 bits"}


def latents() -> list[Table]:
    """What latents cost, coded in ways that quality/latent_quality.py names."""
    rows = {(row["coding"], row["calibrated"]): row for row in load("latent_quality.csv")}
    table = Table(["coding", "file", "bytes", "KL", "of fp8", "of NVFP4-like", "perplexity"], 2)
    ropes = ("", *(f"-rope{rope}" for rope in ROPE_CODINGS))
    names = dict.fromkeys([*LATENT_CODINGS, *(f"{dtype}{rope}" for dtype in ORDER for rope in ropes)])
    for name in names:
        for calibrated in ("yes", "no"):
            row = rows.get((name, calibrated))
            if row is None or (calibrated == "no" and name in LATENT_CODINGS):
                continue
            dtype, _, rope = name.partition("-rope")
            title = LATENT_CODINGS.get(name) or f"`{dtype}`{rope and f', {ROPE_CODINGS[rope]}'}"
            file = "" if name in LATENT_CODINGS else calibrated
            costs = _kl(row, [rows[base, "yes"] for base in ("fp8", "nvfp4")])
            table.add([title, file, row["bytes"], *costs, row["perplexity"]], [row])
    return [table]


def latents_window() -> list[Table]:
    """The same with the recent window, and without."""
    rows = {(row["coding"], row["calibrated"]): row for row in load("latent_window.csv")}
    table = Table(["coding", "window", "file", "bytes", "KL", "of fp8", "of NVFP4-like"], 3)
    for (name, calibrated), row in rows.items():
        coding, _, rope = name.partition("-rope")
        dtype, _, window = coding.partition("-window")
        title = LATENT_CODINGS.get(name) or f"`{dtype}`{rope and f', {ROPE_CODINGS[rope]}'}"
        setting = ["", ""] if name in LATENT_CODINGS else [window or "0", calibrated]
        costs = _kl(row, [rows[base, "yes"] for base in ("fp8", "nvfp4")])
        table.add([title, *setting, row["bytes"], *costs], [row])
    return [table]


def _kl(row: Mapping, bases: Sequence[Mapping]) -> list[str]:
    """The KL of a row, and its ratios to others'."""
    kl = float(row["kl"])
    ratios = [f"{kl / float(base['kl']):.2f}" if kl else "" for base in bases]
    return [f"{kl:.5f} ± {float(row['kl_error']):.5f}", *ratios]


RELIABILITY: Mapping[str, Callable[[], Sequence[Table]]] = {"soak-restarts": soak_restarts}
QUALITY: Mapping[str, Callable[[], Sequence[Table]]] = {"latents": latents, "latents-window": latents_window}
