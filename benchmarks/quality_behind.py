"""KL divergence and planted numbers behind prompts of SmolLM2, calibrated and not: docs/lab/quality.md.

    python benchmarks/quality_behind.py --inputs FOLDER --dtypes calibrated uncalibrated --out DIR

FOLDER has the model in smollm2/, its file smollm2_kv.json, and texts/fiction.txt and texts/technical.txt
(scripts/fetch_smollm2.py and fetch_texts.py fetch them). A setting leaves its report in DIR, in a file of its name.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import rows

OURS = ("tq4", "isoquant4", "turboquant25", "tq3", "turboquant35", "planarquant4", "isoquant3", "planarquant3")
SETTINGS = {
    "calibrated": ["--calibration", "smollm2_kv.json", "--dtypes", "fp8", *OURS, "int4_per_token_head"],
    "uncalibrated": ["--dtypes", *OURS],
}
OPTIONS = (
    "--model smollm2 --text texts/fiction.txt texts/technical.txt --lengths 1000 3500 7500 --windows 4 --tokens 192 "
    "--greedy 128 --tasks 16 --kinds single far --no-plots --kv-cache-memory 1500M --parallel 4"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--inputs", type=Path, default=Path("inputs"), help="default: %(default)s")
    add("--dtypes", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="settings (default: both)")
    add("--out", type=Path, default=Path("."), help="folder of the reports (default: here)")
    add("--commit", help="for the reports (default: what git says)")
    options = parser.parse_args()
    for setting in options.dtypes:
        folder = (options.out / setting).resolve()
        command = [sys.executable, "-m", "packed_kv_quality.cli", "generate", *OPTIONS.split(), *SETTINGS[setting]]
        command += ["--commit", options.commit or rows.commit_here(), "--output", str(folder)]
        if code := subprocess.run(command, cwd=options.inputs, check=False).returncode:
            return code
        shutil.copy(folder / "generate.json", options.out / f"{setting}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
