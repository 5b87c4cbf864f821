"""A plan as a table."""

from __future__ import annotations

from collections.abc import Callable

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
    """A figure with a calibration file; where the figure without one differs, it follows in brackets."""
    shown = ["-" if value is None else show(value) for value in (calibrated, without)]
    return shown[0] if calibrated == without else f"{shown[0]} ({shown[1]})"
