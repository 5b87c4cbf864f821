"""Draw the quality harness's plots from its JSON files. Imports matplotlib, which nothing else here needs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from packed_kv import FORMATS
from packed_kv.json_file import read_json
from packed_kv.private_file import replace_file

from .arguments import BadInput
from .generation import Generation
from .measurement import Measurement
from .recall_map import Cell

OURS, OTHERS, GREY = "#1f5fa8", "#c25b12", "#666666"
MARKER = 5
"""Pixels around a point's centre that no label may touch."""
LABEL_PLACES = ((6, -3, "left"), (-6, -3, "right"), (6, 5, "left"), (6, -11, "left"), (-6, 5, "right"), (6, 14, "left"))
"""Points right of and above a point, in order of preference, and the side that is aligned there."""


def draw(results: Path) -> None:
    """pareto.png of the dtypes in a folder's quality.json, recall.png of the recall in it or in recall.json, and
    generate.png of its generate.json; of a quality.json under another NAME.json, NAME-pareto.png and NAME-recall.png
    beside it.

    Raises BadInput if there is none, or one of another version.
    """
    if (generated := results / "generate.json").exists():
        _draw_generation(generated)
    paths = [results] if results.is_file() else [results / name for name in ("quality.json", "recall.json")]
    if not any(path.exists() for path in (*paths, generated)):
        raise BadInput(f"{results} has neither quality.json, recall.json nor generate.json")
    prefix = f"{results.stem}-" if results.is_file() else ""
    for path in filter(Path.exists, paths):
        try:
            found = read_json(path)
            of_text = path.name != "recall.json"
            measured = [Measurement.from_dict({**row, "losses": []}) for row in found["rows"]] if of_text else []
            recall = {row["dtype"]: [Cell(**cell) for cell in row["recall"]] for row in found["rows"] if row["recall"]}
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path} is not of this version of packed-kv-quality") from error
        name = Path(found["run"]["settings"]["model"]).name
        if len(measured) > 2:
            title = f"{name}: quality and size of KV-cache dtypes"
            pareto(measured, found["limits"]["rounding"], title, path.with_name(f"{prefix}pareto.png"))
        if recall:
            recall_maps(recall, f"{name}: planted facts recalled, %", path.with_name(f"{prefix}recall.png"))


def _draw_generation(path: Path) -> None:
    try:
        found = read_json(path)
        rows = [Generation.from_dict(row) for row in found["rows"]]
        name = Path(found["run"]["settings"]["model"]).name
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not of this version of packed-kv-quality") from error
    generation(rows, f"{name}: quality behind prompts", path.with_name("generate.png"))


def generation(rows: Sequence[Generation], title: str, path: Path) -> None:
    """KL divergence behind prompts by their length, a panel a text; `rows` begins with the baseline."""
    baseline, *others = rows
    texts = list(dict.fromkeys(found.text for found in baseline.continuations))
    figure, grid = plt.subplots(
        1, len(texts), figsize=(4.5 * len(texts) + 1, 4.2), dpi=120, layout="constrained", squeeze=False, sharey=True
    )
    for axes, text in zip(grid.flat, texts, strict=True):
        for row in others:
            found = [part for part in row.continuations if part.text == text]
            lengths, kl = [part.prompt for part in found], [part.kl_mean for part in found]
            error = [part.kl_error or 0.0 for part in found]
            style = "-" if row.dtype in FORMATS else "--"
            axes.errorbar(lengths, kl, error, marker="o", linestyle=style, label=row.dtype, elinewidth=1)
        floors = [(int(length), floor) for length, floor in baseline.rounding.items()]
        axes.plot(*zip(*floors, strict=True), color=GREY, linestyle=":", label="rounding alone")
        axes.set(xlabel="tokens of the prompt", title=text, yscale="log")
        axes.grid(alpha=0.3, which="both")
    grid.flat[0].set_ylabel(f"mean KL divergence to {baseline.dtype} (nats)")
    grid.flat[-1].legend(loc="best", fontsize=8)
    figure.suptitle(title)
    _save(figure, path)


@dataclass(frozen=True)
class Point:
    """A dtype in a plot of KL divergence against KV bytes per token; `kl_error`: standard error, None if not known."""

    dtype: str
    bytes_per_token: float
    kl_mean: float
    kl_error: float | None = None


def pareto(rows: Sequence[Measurement], rounding: float, title: str, path: Path) -> None:
    """KL divergence, with its standard error, against KV bytes per token; `rows` begins with the baseline."""
    points = [Point(row.dtype, row.bytes_per_token, row.scores.kl_mean, row.scores.kl_error) for row in rows]
    figure, axes = plt.subplots(figsize=(7.5, 5), dpi=120, layout="constrained")
    _draw_pareto(axes, points, rounding)
    axes.set(xlabel="KV bytes per token", ylabel=f"mean KL divergence to {rows[0].dtype} (nats)", title=title)
    axes.legend(loc="best")
    _label(axes, points[1:])
    _save(figure, path)


def pareto_by_length(
    panels: Mapping[str, tuple[Sequence[Point], Sequence[Point], float]], title: str, path: Path
) -> None:
    """The same in panels side by side: name -> points that begin with the baseline, points of our dtypes without a
    calibration file, and the KL divergence of rounding."""
    figure, grid = plt.subplots(
        1, len(panels), figsize=(4.4 * len(panels), 4.6), dpi=120, layout="constrained", squeeze=False, sharey=True
    )
    for axes, (name, (points, plain, rounding)) in zip(grid.flat, panels.items(), strict=True):
        x, y = [point.bytes_per_token for point in plain], [point.kl_mean for point in plain]
        axes.plot(x, y, "o", color=OURS, fillstyle="none", label="packed-kv, no calibration", zorder=2)
        _draw_pareto(axes, points, rounding)
        axes.set(xlabel="KV bytes per token", title=name)
    grid.flat[0].set_ylabel(f"mean KL divergence to {points[0].dtype} (nats)")
    grid.flat[0].legend(loc="best", fontsize=8)
    for axes, (points, plain, _) in zip(grid.flat, panels.values(), strict=True):
        _label(axes, points[1:], plain)
    figure.suptitle(title)
    _save(figure, path)


def _draw_pareto(axes: Axes, rows: Sequence[Point], rounding: float) -> None:
    """`rows` begins with the baseline."""
    baseline, *others = rows
    for names, color, label in ((True, OURS, "packed-kv"), (False, OTHERS, "others")):
        points = [row for row in others if (row.dtype in FORMATS) is names]
        if points:
            x, y = [row.bytes_per_token for row in points], [row.kl_mean for row in points]
            error = [row.kl_error or 0.0 for row in points]
            axes.errorbar(x, y, error, fmt="o", color=color, label=label, zorder=3, elinewidth=1)
    axes.axhline(rounding, color=GREY, linestyle="--", linewidth=1)
    axes.annotate("rounding alone", (0, rounding), (4, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points", size=8, color=GREY)  # fmt: skip
    axes.axvline(baseline.bytes_per_token, color=GREY, linewidth=1)
    axes.annotate(baseline.dtype, (baseline.bytes_per_token, 1), (-4, -12), xycoords=("data", "axes fraction"),
                  textcoords="offset points", ha="right", size=8, color=GREY)  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    front = [row for row in others if not any(_better(other, row) for other in others)]
    front.sort(key=lambda row: row.bytes_per_token)
    axes.plot([row.bytes_per_token for row in front], [row.kl_mean for row in front], color=GREY, linestyle=":")
    axes.grid(alpha=0.3, which="both")


def _save(figure: Figure, path: Path) -> None:
    """Write a PNG and close the figure. Raises BadInput."""
    image = io.BytesIO()
    figure.savefig(image, dpi=figure.dpi)
    plt.close(figure)
    try:
        replace_file(path, image.getvalue())
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror})") from error


def _better(one: Point, other: Point) -> bool:
    """True if `one` is at least as small and as near as `other`, and not both the same."""
    a, b = ((row.bytes_per_token, row.kl_mean) for row in (one, other))
    return a[0] <= b[0] and a[1] <= b[1] and a != b


def _label(axes: Axes, rows: Sequence[Point], others: Sequence[Point] = ()) -> None:
    """Label the points so that labels overlap neither points, `others` among them, nor each other, where possible."""
    axes.figure.canvas.draw()  # until then the axes have no position
    points = [axes.transData.transform((row.bytes_per_token, row.kl_mean)) for row in [*rows, *others]]
    taken = [Bbox.from_bounds(x - MARKER, y - MARKER, 2 * MARKER, 2 * MARKER) for x, y in points]
    for row in sorted(rows, key=lambda row: row.kl_mean):
        point = (row.bytes_per_token, row.kl_mean)
        for x, y, side in LABEL_PLACES:
            text = axes.annotate(row.dtype, point, (x, y), textcoords="offset points", size=8, ha=side)
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken) or (x, y, side) == LABEL_PLACES[-1]:
                taken.append(box)
                break
            text.remove()


def recall_maps(recall: Mapping[str, Sequence[Cell]], title: str, path: Path) -> None:
    """One heat map of recall per dtype: depth of the fact downwards, length of the prompt to the right."""
    columns = min(4, len(recall))
    lines = -(-len(recall) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(2.6 * columns + 0.8, 2.4 * lines + 0.6), layout="constrained", squeeze=False, dpi=120
    )
    for axes in grid.flat[len(recall) :]:
        axes.axis("off")
    for axes, (dtype, cells) in zip(grid.flat, recall.items(), strict=False):
        lengths = sorted({cell.length for cell in cells})
        depths = sorted({cell.depth for cell in cells})
        shares = {(cell.depth, cell.length): cell.recalled / cell.facts for cell in cells}
        values = [[shares[depth, length] for length in lengths] for depth in depths]
        image = axes.imshow(values, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                color = "black" if 0.15 < value < 0.85 else "white"
                axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", size=7, color=color)
        axes.set_title(dtype, size=9)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], size=7)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], size=7)
    figure.colorbar(image, ax=grid, label="facts recalled", shrink=0.8)
    figure.suptitle(title)
    figure.supxlabel("tokens of the prompt", size=9)
    figure.supylabel("depth of the fact", size=9)
    _save(figure, path)
