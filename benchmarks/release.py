"""All rows of the tables of steps in README.md and docs/speed.md, at one commit, in runs that can be resumed.

    python benchmarks/release.py --out DIR [--cards 0 1 ...] [--parts NAME ...] [--seconds S]

`PARTS` lists what is measured. Each part of each dtype is a run of its own, on one of the cards, and leaves its rows in
DIR/runs/PART-DTYPE/; a run that ended well is not repeated. None is started once --seconds have passed. At the end, the
rows of all runs are put together, a file a kind, in DIR: these go into results/release/. `--list` starts nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import rows

HERE = Path(__file__).resolve().parent
OURS = ("tq4", "turboquant35", "turboquant25")


@dataclass(frozen=True)
class Part:
    """A benchmark's script and options, and the dtypes that it measures."""

    script: str
    options: str
    dtypes: tuple[str, ...] = ("auto", "fp8", *OURS)


GLM = HERE / "shapes" / "glm-4.7-flash"
PARTS = {
    "steps": Part("decode.py", "--shapes 32x8192 128x2048 8x32768 1x32768 8x1024 --steps 32 --prefill 8192 --prompts 2 "
        "--budget 20e9"),
    "mixed": Part("mixed.py", "--shapes 64x2048 32x8192 8x1024 --first 8 --steps 16"),
    "drafts": Part("decode.py", "--drafts 0 3 7 --shapes 32x8192 --steps 32 --prefill --budget 0", ("auto", *OURS)),
    "latents": Part("decode.py", f"--model {GLM} --shapes 64x8192 8x32768 8x1024 --steps 32 --prefill 8192 --prompts 2 "
        "--budget 0 --max-requests 64", ("auto", *OURS)),
}  # fmt: skip
"""Name -> what is measured."""


def run(name: str, dtype: str, out: Path, card: str, commit: str) -> bool:
    """Measure a part of a dtype on a card. Return True if it ended well, now or earlier."""
    part, folder = PARTS[name], out / "runs" / f"{name}-{dtype}"
    if (folder / "done").exists():
        return True
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):
        old.unlink()
    command = [sys.executable, str(HERE / part.script), "--dtypes", dtype, *part.options.split()]
    command += ["--out", str(folder), "--commit", commit]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card} if card else None
    started = time.monotonic()
    with (folder / "log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    seconds = time.monotonic() - started
    print(f"{name} {dtype}: {'done' if code == 0 else f'exit code {code}'}, {seconds:.0f} s", flush=True)
    if code == 0:
        (folder / "done").touch()
    return code == 0


def collect(out: Path) -> list[Path]:
    """Put the rows of all runs that ended well together, in files of the parts' names and kinds. Raises ValueError if
    they are of several commits, cards or versions."""
    found: dict[str, list[dict[str, str]]] = {}
    for folder in sorted((out / "runs").iterdir()):
        part = folder.name.partition("-")[0]
        for file in sorted(folder.glob("*.csv")) if (folder / "done").exists() else ():
            name = file.name if part == "steps" else f"{part}_{file.name}"
            found.setdefault(name, []).extend(rows.read(file))
    for name, of_file in found.items():
        made = {tuple(row[column] for column in rows.MACHINE) for row in of_file}
        if len(made) > 1:
            raise ValueError(f"{name} has rows of {sorted(made)}; measure them again in another folder")
        with (out / name).open("w", newline="") as target:
            writer = csv.DictWriter(target, list(of_file[0]))
            writer.writeheader()
            writer.writerows(of_file)
    return [out / name for name in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--cards", nargs="+", default=[""], help="CUDA devices that measure side by side (default: the first)")
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--dtypes", nargs="+", help="of these alone")
    add("--seconds", type=float, default=float("inf"), help="start nothing after so many (default: no limit)")
    add("--commit", help="for the rows (default: what git says)")
    add("--list", action="store_true", help="print what would run")
    options = parser.parse_args()
    wanted = [(name, dtype) for name in options.parts for dtype in PARTS[name].dtypes
              if not options.dtypes or dtype in options.dtypes]  # fmt: skip
    if options.list:
        for name, dtype in wanted:
            done = (options.out / "runs" / f"{name}-{dtype}" / "done").exists()
            print(f"{name} {dtype}: {PARTS[name].script} {PARTS[name].options}{' (done)' if done else ''}")
        return 0
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for one in wanted:
        waiting.put(one)
    commit, end, failed = options.commit or rows.commit_here(), time.monotonic() + options.seconds, []

    def measure(card: str) -> None:
        while time.monotonic() < end:
            try:
                name, dtype = waiting.get_nowait()
            except queue.Empty:
                return
            if not run(name, dtype, options.out, card, commit):
                failed.append(f"{name} {dtype}")

    workers = [threading.Thread(target=measure, args=(card,)) for card in options.cards]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    left = waiting.qsize()
    for file in collect(options.out):
        print(f"rows: {file}")
    if failed or left:
        print(f"failed: {', '.join(failed) or 'none'}; not begun: {left}. Call it again to go on.")
    return int(bool(failed or left))


if __name__ == "__main__":
    sys.exit(main())
