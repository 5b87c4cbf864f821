"""Puts the rows of a release measurement into results/release/, an H100's into release/h100/, and their tables into
the docs.

    python benchmarks/adopt.py DIR      # DIR: --out of benchmarks/release.py

Only runs that ended well count. A file of DIR replaces the one of its name, with its entry in runs.toml; a file that
DIR does not have stays as it is. What a replaced file had and its successor lacks is named. Reports of quality behind
prompts go into results/generate-smollm2/, if both are there: their tables are of one card. Then measured.py runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import quality_rows
import release
import rows

RESULTS = Path(__file__).resolve().parent / "results"
FOLDERS = {"NVIDIA H200": "release", "NVIDIA H100 80GB HBM3": "release/h100"}
"""Card -> folder in results/ of its rows."""
WHAT = {
    "throughput.csv": "as many requests of an 8B-shaped model as 20 GB of KV cache hold, all at once",
    "decode.csv": "decode steps of an 8B-shaped model",
    "prefill.csv": "prompts of 8,192 and 32,768 tokens, alone, in chunks of 8,192",
    "mixed.csv": "steps that carry a prompt beside decodes",
    "glm_flash.csv": "decode steps of GLM-4.7-Flash's shape, which has latent attention",
    "glm_flash_prefill.csv": "prompts of 8,192 tokens of the same shape",
    "sparse.csv": "decode steps of the 61 layers of DeepSeek V3.2 with the attention of a rank of eight",
    "sparse_prefill.csv": "prompts of 8,192 and 65,536 tokens of the same shape, alone, in chunks of 8,192",
    "kimi_linear.csv": "decode steps of 8 layers of Kimi-Linear, two of them with latent attention",
    "verify.csv": "steps with drafts of n-grams",
    "verify_shapes.csv": "steps of shapes with more query heads per KV head, with and without drafts",
    "recent_window.csv": "decode steps with and without the recent window",
    "means.csv": "decode steps with means of keys by blocks of positions, and without a calibration file",
    "gpt_oss.csv": "decode steps of gpt-oss-20b's shape",
    "startup.csv": "seconds to an engine's first token, with empty caches and with those of the start before",
    "serve.csv": "`vllm bench serve` against `vllm serve`, 8, 32 and 96 requests at once",
    "serve_96.csv": "96 requests at once, with the settings for many streams",
    "async.csv": "the load of serve_96.csv on the engine without a server",
}
"""File -> what runs.toml says of it."""


def entry(folder: str, name: str, parts: list[str], commit: str) -> str:
    """The entry of runs.toml."""
    command = f"python3 benchmarks/release.py --out DIR --parts {' '.join(parts)}"
    return (f'[[file]]\nname = "{folder}/{name}"\nwhat = "{WHAT[name]}"\n'
            f'runs = [{{commit = "{commit}", command = "{command}"}}]\n')  # fmt: skip


def with_entry(text: str, name: str, made: str) -> str:
    """The text of runs.toml with an entry in the place of the one of its name, or before all others."""
    old = re.compile(rf'\[\[file\]\]\nname = "{re.escape(name)}"\n.*?(?=\n\[\[file\]\]|\Z)', re.DOTALL)
    if old.search(text):
        return old.sub(lambda _: made, text, count=1)
    return text.replace("[[file]]", f"{made}\n[[file]]", 1)


def cases(of_file: list[dict[str, str]]) -> set[tuple[str, ...]]:
    """Return the cases of rows: their columns that are neither measured nor of the machine."""
    names = ("dtype", "model", "drafts", "requests", "context", "prompt", "tokens", "recent_tokens", "means", "caches",
             "torch_compile", "concurrency")  # fmt: skip
    return {tuple(f"{name} {row[name]}" for name in names if row.get(name)) for row in of_file}


def adopt(folder: Path) -> None:
    """Replace the files. Raises ValueError if the rows are of several commits, cards or versions, or of a card that has
    no folder."""
    toml = RESULTS / "runs.toml"
    text = toml.read_text()
    for name, (parts, of_file) in release.gathered(folder).items():
        place, commit = FOLDERS.get(of_file[0]["gpu"]), of_file[0]["commit"]
        if place is None:
            raise ValueError(f"{folder} has rows of {of_file[0]['gpu']}, and FOLDERS no folder for them; add one")
        target = RESULTS / place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        lost = cases(rows.read(target)) - cases(of_file) if target.exists() else set()
        release.write(target, of_file)
        text = with_entry(text, f"{place}/{name}", entry(place, name, parts, commit))
        print(f"{place}/{name}: {len(of_file)} rows of {', '.join(dict.fromkeys(row['dtype'] for row in of_file))}")
        for case in sorted(lost):
            print(f"    no longer there: {', '.join(case)}")
    toml.write_text(text)
    of_quality = [folder / "runs" / f"quality-{name}" for name in release.PARTS["quality"].dtypes]
    if all((run / "done").exists() for run in of_quality):
        for report in (run / f"{run.name.removeprefix('quality-')}.json" for run in of_quality):
            content = re.sub(r"--output \S*/", "--output ", report.read_text(), count=1)  # no path of a machine
            (RESULTS / quality_rows.FOLDER / report.name).write_text(content)
            print(f"{quality_rows.FOLDER}/{report.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    adopt(parser.parse_args().folder)
    return subprocess.run([sys.executable, str(RESULTS.parent / "measured.py")], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
