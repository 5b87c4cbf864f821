"""`tq-calibrate report`: heat maps of a file's channel energies, one PNG per layer, and an HTML page with them."""

from __future__ import annotations

import html
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from packed_kv.private_file import replace_file, why_not_replaced

from .errors import UserError
from .show import ROLES, Rows, read, stored_rms, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:80em;margin:2em auto;padding:0 1em}}img{{width:100%}}</style>
<h1>{title}</h1>
<p>Size of each channel on a logarithmic scale: the mean of K over the text, which is not stored, and root mean squares
of what turboquant stores: K (after norm and RoPE) less its mean, and V, both scaled. Dots mark the outlier channels,
which get a bit more. docs/lab/calibration.md of packed-kv says how they are chosen.</p>
<pre>{summary}</pre>
{layers}
</html>
"""


def report(path: str, folder: Path) -> Path:
    """Write the report of a calibration file into a folder, which is created if missing. Returns the path of the page.

    Raises CalibrationError for an unsound file, UserError for one without energies or if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("matplotlib is missing, which draws the report; pip install 'packed-kv[plots]'") from error
    calibration, content = read(path)
    entries = dict(sorted(zip(calibration.layers, content["layers"].values(), strict=True)))
    if any(not entry.get(f"{role}_channel_rms") for entry in entries.values() for role in ROLES):
        raise UserError(f"{path} has no energies of channels; make a new file with: tq-calibrate model MODEL")
    digits = len(str(max(entries)))
    images = {layer: f"layer-{layer:0{digits}d}.png" for layer in entries}
    page = folder / "index.html"
    for name in (page.name, *images.values()):
        if reason := why_not_replaced(folder / name):
            raise UserError(f"--out: {reason}; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for layer, entry in entries.items():
            known = calibration.layers[layer]
            figure = Figure(figsize=(20, 1.6 + 0.3 * known.kv_heads), layout="constrained")
            means = known.key.mean or [[0.0] * calibration.head_size] * known.kv_heads
            key, value = (stored_rms(role, known, entry) for role in ROLES)
            left, middle, right = figure.subplots(1, 3)
            what = "the mean of K" if known.key.rope is None else "the mean of K before RoPE"
            _heat_map(left, what, means, [])
            _heat_map(middle, "K as stored", key, known.key.outlier_channels)
            _heat_map(right, "V as stored", value, known.value.outlier_channels)
            figure.suptitle(f"layer {layer}")
            image = io.BytesIO()
            figure.savefig(image, dpi=100)
            replace_file(folder / images[layer], image.getvalue())
        shown = "\n".join(f'<img src="{name}" alt="{name}">' for name in images.values())
        title = html.escape(f"KV calibration of {content.get('model_name') or path}")
        text = PAGE.format(title=title, summary=html.escape(summary(path)), layers=shown)
        replace_file(page, text.encode())
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written ({error.strerror})") from error
    return page


def _heat_map(axes: Axes, title: str, sizes: Rows, outliers: list[list[int]]) -> None:
    """Magnitudes [KV heads][head_size], with dots at the outlier channels of each head."""
    logarithms = [[math.log10(max(abs(size), 1e-6)) for size in head] for head in sizes]
    image = axes.imshow(logarithms, aspect="auto", interpolation="nearest", cmap="viridis")
    channels = [channel for head in outliers for channel in head]
    rows = [row for row, head in enumerate(outliers) for _ in head]
    axes.scatter(channels, rows, s=6, c="white", edgecolors="black", linewidths=0.4)
    axes.set(title=title, xlabel="channel", ylabel="KV head", yticks=range(0, len(sizes), -(-len(sizes) // 8)))
    axes.figure.colorbar(image, ax=axes, label="log10")
