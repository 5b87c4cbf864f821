"""All rows of the tables of steps in README.md and docs/speed.md, at one commit, in runs that can be resumed.

    python benchmarks/release.py --out DIR [--cards 0 1 ...] [--parts NAME ...] [--seconds S]

`PARTS` lists what is measured. Each part of each dtype is a run of its own, on one of the cards, and leaves its rows in
DIR/runs/PART-DTYPE/; a run that ended well is not repeated. None is started once --seconds have passed. At the end, the
rows of all runs are put together in DIR, in files of the names that results/ has. `--list` starts nothing.
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
OTHERS = ("tq3", "isoquant4", "isoquant3", "planarquant4", "planarquant3", "int4_per_token_head",
          "turboquant_4bit_nc")


@dataclass(frozen=True)
class Part:
    """A benchmark's script and options, and the dtypes that it measures."""

    script: str
    options: str
    dtypes: tuple[str, ...] = ("auto", "fp8", *OURS)


GLM = HERE / "shapes" / "glm-4.7-flash"
PARTS = {
    "steps": Part("decode.py", "--shapes 32x8192 128x2048 8x32768 1x32768 8x1024 32x1024 --steps 32 "
        "--prefill 8192 32768 --prompts 2 --budget 20e9"),
    "others": Part("decode.py", "--shapes 32x8192 128x2048 8x32768 1x32768 8x1024 32x1024 --steps 32 --prefill "
        "--budget 0", OTHERS),
    "mixed": Part("mixed.py", "--shapes 64x2048 32x8192 8x1024 --first 8 --steps 16", ("auto", "fp8", "tq4",
        "turboquant25")),
    "latents": Part("decode.py", f"--model {GLM} --shapes 64x8192 8x32768 8x1024 --steps 32 --prefill 8192 --prompts 2 "
        "--budget 0 --max-requests 64", ("auto", *OURS)),
    "drafts": Part("decode.py", "--drafts 0 3 7 --shapes 32x8192 8x32768 --steps 32 --prefill --budget 0", ("auto",
        "fp8", "tq4", "turboquant25")),
}  # fmt: skip
"""Name -> what is measured."""
NAMES = {("drafts", "verify.csv"): "verify.csv", ("latents", "decode.csv"): "glm_flash.csv",
         ("latents", "prefill.csv"): "glm_flash_prefill.csv"}  # fmt: skip
"""Part and its file -> the file in results/, where that is another."""


def run(name: str, dtype: str, out: Path, card: str, commit: str) -> None:
    """Measure a part of a dtype on a card, if that did not end well before."""
    part, folder = PARTS[name], out / "runs" / f"{name}-{dtype}"
    if (folder / "done").exists():  # of this commit, as `main` has seen
        return
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):
        old.unlink()
    command = [sys.executable, str(HERE / part.script), "--dtypes", dtype, *part.options.split()]
    command += ["--out", str(folder), "--commit", commit]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card} if card else None
    started = time.monotonic()
    with (folder / "log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        said = f"exit code {code}"
    elif "not fit the KV cache" in (folder / "log").read_text():
        said = "a shape does not fit"
    else:
        said = "done"
        (folder / "done").write_text(commit)
    print(f"{name} {dtype}: {said}, {time.monotonic() - started:.0f} s", flush=True)


def collect(out: Path) -> list[Path]:
    """Put the rows of all runs that ended well together. Raises ValueError if they are of several commits, cards or
    versions; then nothing is written."""
    found: dict[str, list[dict[str, str]]] = {}
    for folder in sorted((out / "runs").iterdir()):
        part = folder.name.partition("-")[0]
        for file in sorted(folder.glob("*.csv")) if (folder / "done").exists() else ():
            found.setdefault(NAMES.get((part, file.name), file.name), []).extend(rows.read(file))
    made = {tuple(row[column] for column in rows.MACHINE) for of_file in found.values() for row in of_file}
    if len(made) > 1:
        raise ValueError(f"{out} has rows of {sorted(made)}; measure again in a folder of its own, on one kind of card")
    for name, of_file in found.items():
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
    commit = options.commit or rows.commit_here()
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    others = {done.read_text() for done in options.out.glob("runs/*/done")} - {commit}
    if others:
        parser.error(f"--out {options.out}: has runs of commit {', '.join(sorted(others))}, and this is {commit}")
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for one in wanted:
        waiting.put(one)
    end = time.monotonic() + options.seconds

    def measure(card: str) -> None:
        while time.monotonic() < end:
            try:
                name, dtype = waiting.get_nowait()
            except queue.Empty:
                return
            run(name, dtype, options.out, card, commit)

    workers = [threading.Thread(target=measure, args=(card,)) for card in options.cards]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for file in collect(options.out):
        print(f"rows: {file}")
    runs = options.out / "runs"
    missing = [f"{name} {dtype}" for name, dtype in wanted if not (runs / f"{name}-{dtype}" / "done").exists()]
    if missing:
        print(f"failed or not begun: {', '.join(missing)}. Call it again to go on.")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
