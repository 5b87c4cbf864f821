"""The rows of README.md and docs/speed.md that one kind of card can give, at one commit, in runs that can be resumed.

    python benchmarks/release.py --out DIR [--cards 0 1 ...] [--parts NAME ...] [--seconds S]
    python benchmarks/adopt.py DIR      # then: puts the rows into results/release/, and the tables into the docs

`PARTS` lists what is measured; `ESSENTIAL` is measured if --parts names none. Each part of each dtype is a run of its
own, on the card that is free next, and leaves its rows in DIR/runs/PART-DTYPE/; a run that ended well is not repeated.
While one run measures, the next one on its card imports vLLM. None is begun that would not end within --seconds, and
what still runs then is ended. At the end, the rows of all runs are put together in DIR, in files of the names that
results/release/ has. `--list` starts nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import rows

HERE = Path(__file__).resolve().parent
OURS = ("tq4", "turboquant35", "turboquant25")
SHOWN = ("auto", "fp8", "tq4", "turboquant25")
"""The dtypes of most tables, slow ones last."""
OTHERS = ("tq3", "isoquant4", "isoquant3", "planarquant4", "planarquant3", "int4_per_token_head", "turboquant_4bit_nc")
SIX = "--shapes 32x8192 128x2048 8x32768 1x32768 8x1024 32x1024 --steps 32"
EXPERTS = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
AHEAD = ("decode.py", "mixed.py")
"""Scripts that take --begin."""


@dataclass(frozen=True)
class Part:
    """A benchmark's script and options, and the dtypes that it measures.

    seconds: those of a run on an H200; the first run on a machine that has just started takes a minute more.
    csv: the file of a script that has --csv; others have --out. served: options of `vllm serve` for each dtype.
    files: a file of the script -> the one in results/release/, where that is another. environment: of the script.
    """

    script: str
    options: str
    dtypes: tuple[str, ...] = ("auto", "fp8", *OURS)
    seconds: float = 40
    csv: str = ""
    served: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def shape(name: str) -> str:
    """The option for a model's shape, without measuring prompts and waves of requests."""
    return f"--model {HERE / 'shapes' / name} --prefill --budget 0 --steps 32"


def alone(options: str) -> str:
    """Options of decode.py for steps alone."""
    return f"{options} --prefill --budget 0"


VERIFIED = {"verify.csv": "verify_shapes.csv"}
PARTS = {
    "throughput": Part("decode.py", "--shapes --prefill --budget 20e9", ("turboquant25", "tq4", "fp8", "auto"), 40),
    "steps": Part("decode.py", f"{SIX} --prefill 8192 32768 --prompts 2 --budget 0", seconds=35),
    "mixed": Part("mixed.py", "--shapes 64x2048 32x8192 8x1024 --prefixes 0 --first 8 --steps 16", SHOWN, 70),
    "latents": Part("decode.py", f"{shape('glm-4.7-flash')} --shapes 64x8192 8x32768 8x1024 --prefill 8192 --prompts 2 "
        "--max-requests 64", ("auto", "tq4", "turboquant25"), 50, files={"decode.csv": "glm_flash.csv", "prefill.csv":
        "glm_flash_prefill.csv"}),
    "sparse": Part("decode.py", f"{shape('deepseek-v3.2-tp8')} --random-weights --block-size 64 --rope-bits 16 "
        "--kernels --shapes 8x8192 64x8192 --prefill 8192 65536 --prompts 3 --kv-cache-memory 30e9", ("fp8", "tq4"), 90,
        files={"decode.csv": "sparse.csv", "prefill.csv": "sparse_prefill.csv"}),
    "kimi": Part("decode.py", f"{shape('kimi-linear')} --no-search --kernels --shapes 8x1024 32x32768 "
        "--kv-cache-memory 16e9", ("auto", "tq4"), 45, files={"decode.csv": "kimi_linear.csv"}, environment=EXPERTS),
    "drafts": Part("decode.py", alone("--drafts 0 3 7 --shapes 32x8192 8x32768 --steps 32"), ("auto", "fp8", "tq4"),
        55),
    "others": Part("decode.py", alone(SIX), OTHERS, 40),
    "window0": Part("decode.py", alone("--recent-tokens 0 --shapes 32x8192 128x2048 8x32768 --steps 32"), ("tq4",), 25,
        files={"decode.csv": "recent_window.csv"}),
    "window64": Part("decode.py", alone("--recent-tokens 64 --shapes 32x8192 128x2048 8x32768 --steps 32"), ("tq4",),
        25, files={"decode.csv": "recent_window.csv"}),
    "unmeant": Part("decode.py", alone("--means none --shapes 32x8192 8x32768 32x8192 8x32768 --steps 48"), ("tq4",),
        25, files={"decode.csv": "means.csv"}),
    "means": Part("decode.py", alone("--means blocks --shapes 32x8192 8x32768 32x8192 8x32768 --steps 48"), ("tq4",),
        30, files={"decode.csv": "means.csv"}),
    "gptoss": Part("decode.py", f"{shape('gpt-oss-20b')} --shapes 32x8192 64x2048 1x32768", ("auto", "fp8", "tq4"), 35,
        files={"decode.csv": "gpt_oss.csv"}, environment=EXPERTS),
    "llama": Part("decode.py", f"{shape('llama-70b-tp4')} --drafts 0 3 7 15 --shapes 32x8192 8x32768 8x2048", ("auto",
        "fp8", "tq4"), 100, files=VERIFIED),
    "qwen": Part("decode.py", f"{shape('qwen3-235b-tp4')} --drafts 0 --shapes 32x8192 8x32768 8x2048", ("auto", "fp8",
        "tq4"), 40, files=VERIFIED, environment=EXPERTS),
    "glm": Part("decode.py", f"{shape('glm-4.5-tp8')} --drafts 0 --shapes 32x8192 8x32768 8x2048", ("auto", "fp8",
        "tq4"), 40, files=VERIFIED, environment=EXPERTS),
    "startup": Part("startup.py", "--fork --layers 8 --states cold warm", ("auto", "tq4", "turboquant25"), 90,
        "startup.csv"),
    "compiled": Part("startup.py", "--compile --fork --layers 8 --states cold warm", ("auto", "tq4", "turboquant25"),
        100, "startup.csv"),
    "server": Part("serve.py", "--concurrency 8 32 96 --rounds 2 --kv-cache-memory 8e9", seconds=140, csv="serve.csv"),
    "streams": Part("serve.py", "--concurrency 96 --rounds 2 --kv-cache-memory 8e9", SHOWN, 90, "serve_96.csv",
        "--api-server-count 4 --stream-interval 8"),
    "engine": Part("async_engine.py", "", SHOWN, 70),
    "quality": Part("quality_behind.py", "", ("calibrated", "uncalibrated"), 200),
}  # fmt: skip
"""Name -> what is measured. A name has no hyphen. `quality` has settings for dtypes, needs the folder inputs/ of
quality_behind.py in the working directory, and leaves reports of its own."""
ESSENTIAL = ("throughput", "steps", "mixed", "latents", "drafts")


@dataclass
class Run:
    """A part of a dtype on a card, whose rows go into `folder`."""

    name: str
    dtype: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def part(self) -> Part:
        return PARTS[self.name]

    @property
    def is_done(self) -> bool:
        """Return True if it ended well before, at the commit that `main` has compared."""
        return (self.folder / "done").exists()

    def begin(self, card: str, commit: str) -> None:
        """Start the process; a script of `AHEAD` imports what it needs and waits for `measure`."""
        part = self.part
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in (*self.folder.glob("*.csv"), self.folder / "begin"):
            old.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / part.script), "--dtypes", f"{self.dtype} {part.served}".strip()]
        command += [*part.options.split(), "--commit", commit]
        command += ["--csv", str(self.folder / part.csv)] if part.csv else ["--out", str(self.folder)]
        command += ["--begin", str(self.folder / "begin")] if part.script in AHEAD else []
        environment = {**os.environ, **part.environment, **({"CUDA_VISIBLE_DEVICES": card} if card else {})}
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def measure(self, end: float, commit: str) -> str:
        """Let the process measure, until `end` or three times as long as it should take; say how it ended."""
        assert self.process is not None
        (self.folder / "begin").touch()
        started = time.monotonic()
        limit = min(end, started + 3 * self.part.seconds + 60)
        while (code := self.process.poll()) is None and time.monotonic() < limit:
            time.sleep(0.1)
        self.stop()
        took = f"{time.monotonic() - started:.0f} s"
        if code is None:
            return f"stopped after {took}"
        if code:
            return f"exit code {code}, {took}"
        (self.folder / "done").write_text(commit)
        return f"done, {took}"

    def stop(self) -> None:
        """End the process and those that it has started; a benchmark that is interrupted ends its server."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):  # nothing of it is left
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Queue:
    """The runs to come, for the threads of the cards."""

    def __init__(self, wanted: list[Run], cards: int, end: float) -> None:
        self.runs: queue.SimpleQueue[Run] = queue.SimpleQueue()
        for run in wanted:
            self.runs.put(run)
        self.cards, self.end = cards, end

    def is_in_time(self, run: Run) -> bool:
        return time.monotonic() + run.part.seconds <= self.end

    def next(self) -> Run | None:
        """The next run that would end in time; those before it are left out."""
        while True:
            try:
                run = self.runs.get_nowait()
            except queue.Empty:
                return None
            if self.is_in_time(run):
                return run

    def measure(self, card: str, commit: str) -> None:
        """Measure on a card until nothing is left. The next run is taken before this one has ended, unless another card
        may be free for it sooner."""
        run = self.next()
        while run:
            if run.process is None:
                run.begin(card, commit)
            ahead = self.next() if self.runs.qsize() >= self.cards else None
            if ahead and ahead.part.script in AHEAD:
                ahead.begin(card, commit)
            if self.is_in_time(run):
                print(f"{run.name} {run.dtype}: {run.measure(self.end, commit)}", flush=True)
            run.stop()
            run = ahead or self.next()


def gathered(out: Path) -> dict[str, tuple[list[str], list[dict[str, str]]]]:
    """A file of results/release/ -> the parts of its rows, and the rows, of all runs that ended well. Raises ValueError
    if they are of several commits, cards or versions."""
    found: dict[str, tuple[list[str], list[dict[str, str]]]] = {}
    folders = [folder for folder in (out / "runs").iterdir() if (folder / "done").exists()]
    order = {f"{name}-{dtype}": at for at, (name, dtype) in enumerate(
        (name, dtype) for name, part in PARTS.items() for dtype in part.dtypes)}  # fmt: skip
    for folder in sorted(folders, key=lambda folder: order[folder.name]):
        name = folder.name.partition("-")[0]
        for file in sorted(folder.glob("*.csv")):
            parts, of_file = found.setdefault(PARTS[name].files.get(file.name, file.name), ([], []))
            parts += [] if name in parts else [name]
            of_file += rows.read(file)
    made = {tuple(row[column] for column in rows.MACHINE) for _, of_file in found.values() for row in of_file}
    if len(made) > 1:
        raise ValueError(f"{out} has rows of {sorted(made)}; measure again in a folder of its own, on one kind of card")
    return found


def write(file: Path, of_file: list[dict[str, str]]) -> None:
    """Write rows with the columns of the first."""
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, list(of_file[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(of_file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--cards", nargs="+", default=[""], help="CUDA devices that measure side by side (default: the first)")
    add("--parts", nargs="+", default=list(ESSENTIAL), choices=PARTS, metavar="NAME", help=f"of {', '.join(PARTS)} "
        f"(default: {' '.join(ESSENTIAL)})")  # fmt: skip
    add("--dtypes", nargs="+", help="of these alone")
    add("--seconds", type=float, default=float("inf"), help="that all may take (default: no limit)")
    add("--commit", help="for the rows (default: what git says)")
    add("--list", action="store_true", help="print what would run")
    options = parser.parse_args()
    wanted = [Run(name, dtype, options.out / "runs" / f"{name}-{dtype}") for name in options.parts
              for dtype in PARTS[name].dtypes if not options.dtypes or dtype in options.dtypes]  # fmt: skip
    if options.list:
        for run in wanted:
            done = " (done)" if run.is_done else ""
            print(f"{run.name} {run.dtype}: {run.part.seconds:g} s, {run.part.script} {run.part.options}{done}")
        return 0
    commit = options.commit or rows.commit_here()
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    others = {done.read_text() for done in options.out.glob("runs/*/done")} - {commit}
    if others:
        parser.error(f"--out {options.out}: has runs of commit {', '.join(sorted(others))}, and this is {commit}")
    waiting = Queue([run for run in wanted if not run.is_done], len(options.cards), time.monotonic() + options.seconds)
    workers = [threading.Thread(target=waiting.measure, args=(card, commit)) for card in options.cards]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        waiting.end = 0  # the threads end what runs
        for worker in workers:
            worker.join()
    for name, (_, of_file) in gathered(options.out).items():
        write(options.out / name, of_file)
        print(f"rows: {options.out / name}")
    if missing := [f"{run.name} {run.dtype}" for run in wanted if not run.is_done]:
        print(f"failed or not begun: {', '.join(missing)}. Call it again to go on.")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
