"""A plan as a table, and as a picture."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..model.config_fields import BadInput
from ..private_file import replace_file, why_not_replaced
from ..refusals.table import Refused
from .cache import DTYPES, capacity
from .plan import Demand, Row

HEADER = ("dtype", "bytes/token", "KV tokens", "requests", "MiB/request", "step ms", "tokens/s", "KL / fp8's", "recall")


def table(demand: Demand, rows: list[Row]) -> str:
    """The rows as text, numbers to the right."""
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in cells)
    ]
    numbers = {row.requests_in_step for row in rows if row.requests_in_step}
    title = f"{demand.model.name} on {demand.model.ranks} x {demand.card.name}, requests of {demand.serving.context:,}"
    title += f" tokens; steps of {max(numbers)} requests, or as many as fit" if numbers else ""
    return "\n".join([title, "", *(line.rstrip() for line in lines)])


def _cells(row: Row) -> tuple[str, ...]:
    if row.refused:
        return (row.dtype, f"{row.bytes_per_token:,}", "refused", *[""] * (len(HEADER) - 3))
    step = f"{row.step_ms:.2f}" if row.step_ms else "-"
    rate = f"{1e3 * row.requests_in_step / row.step_ms:,.0f}" if row.step_ms else "-"
    costs = (
        _both(row.kl, row.kl_uncalibrated, lambda value: f"{value:.2f}"),
        _both(row.recall, row.recall_uncalibrated, lambda value: f"{value}%"),
    )
    return (
        row.dtype, f"{row.bytes_per_token:,}", f"{row.kv_tokens:,}", f"{row.requests:,}",
        f"{row.request_bytes / 2**20:,.1f}", step, rate, *costs,
    )  # fmt: skip


def _both(calibrated: float | None, without: float | None, show: Callable[[float], str]) -> str:
    """A figure with a calibration file and, in brackets, without one where that differs."""
    shown = ["-" if value is None else show(value) for value in (calibrated, without)]
    return shown[0] if calibrated == without else f"{shown[0]} ({shown[1]})"


def check_plot(file: Path) -> None:
    """Raise BadInput for a file that `plot` could not write."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput("--plot needs matplotlib; pip install 'packed-kv[plots]'")
    if not os.path.isdir(file.parent):
        raise BadInput(f"--plot {file} cannot be written; name a file in a folder that is there and yours to write")
    if reason := why_not_replaced(file):
        raise BadInput(f"--plot {reason}; name a file, such as plan.png")


def plot(demand: Demand, file: Path) -> None:
    """Draw requests that fit against their context, a line a dtype, into `file` (PNG). Raises BadInput."""
    from matplotlib.figure import Figure

    longest = max(demand.model.max_len, demand.serving.context)
    contexts = [2**power for power in range(10, longest.bit_length()) if 2**power <= longest] or [longest]
    lines: dict[tuple[int, ...], list[str]] = {}
    for dtype in DTYPES:
        try:
            held = tuple(
                capacity(demand.model, dtype, replace(demand.serving, context=context), demand.kv_memory).requests
                for context in contexts
            )
        except Refused:
            continue
        lines.setdefault(held, []).append(dtype)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for held, names in lines.items():
        shown = [(context, number) for context, number in zip(contexts, held, strict=True) if number]
        axes.plot(*zip(*shown, strict=True) if shown else ([], []), marker="o", markersize=3, label=", ".join(names))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context // 1024}k" if context >= 1024 else str(context) for context in contexts])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _place: f"{value:,g}")
    axes.set_xlabel("tokens per request")
    axes.set_ylabel("requests that fit")
    axes.set_title(f"{demand.model.name}, {demand.kv_memory / 2**30:.1f} GiB of KV cache per card ({demand.card.name})")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    try:
        replace_file(file, image.getvalue())
    except OSError as error:
        raise BadInput(f"--plot {file} cannot be written: {error.strerror}") from error
