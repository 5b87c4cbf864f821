"""Break one line in each of ten places, and look whether the tests of `scripts/test.sh` see it.

    python tests/mutations.py [PLACE ...]     in the environment of the tests; 10 to 30 s a place

Works on a copy of the last commit. Of each place it runs the narrow selection of the quick tests that holds it, first
as committed (it must pass), then with the broken line (a test of it must fail). Exit code 1: a selection did neither,
or a line is not there any more; then write here what stands there now.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    file: str
    line: str
    broken: str
    tests: str
    """Arguments of pytest."""


MUTATIONS = {
    "bit order": Mutation(
        "overlay/packed_kv/codecs/bitpack.py",
        "return torch.arange(0, count * step, step, device=device)",
        "return torch.arange(0, count * step, step, device=device).flip(0)",
        "tests/codecs/test_bitpack.py tests/codecs/test_format_bytes.py",
    ),
    "scale": Mutation(
        "overlay/packed_kv/codecs/scalar.py",
        "return (scale.to(torch.int16) << 7)",
        "return (scale.to(torch.int16) << 6)",
        "tests/codecs/test_format_bytes.py",
    ),
    "window's edge": Mutation(
        "overlay/packed_kv/reference/attention.py",
        "hidden = (distance < 0) | (distance >= sliding_window)",
        "hidden = (distance < 0) | (distance > sliding_window)",
        "tests/reference/test_active_blocks.py -k naive_attention",
    ),
    "slot -1": Mutation(
        "overlay/packed_kv/codecs/pages.py",
        "stored = slots >= 0",
        "stored = slots >= -1",
        "tests/codecs/test_pages.py",
    ),
    "merge": Mutation(
        "overlay/packed_kv/kernels/triton/merge.py",
        "weights = tl.exp2(maxima - top[:, None])",
        "weights = tl.exp2(maxima - maxima)",
        "tests/kernels/triton/test_decode.py -k formats",
    ),
    "calibration's mean": Mutation(
        "calibration/tq_calibrate/sums.py",
        "later = max(1, self.tokens - self.first_tokens)",
        "later = max(1, self.tokens)",
        "tests/calibration/test_sums.py tests/calibration/test_collect.py",
    ),
    "fingerprint": Mutation(
        "overlay/packed_kv/sharing/fingerprint.py",
        '"calibration": transforms_of_model(config, fmt),',
        '"calibration": None,',
        "tests/sharing/test_page_keys.py -k fingerprint",
    ),
    "TP's heads": Mutation(
        "overlay/packed_kv/calibration_file.py",
        "first = tp_rank // max(1, tp_size // len(heads)) * kv_heads",
        "first = tp_rank // max(1, tp_size // len(heads))",
        "tests/test_calibration_file.py -k heads_of_each_rank",
    ),
    "prefix hit": Mutation(
        "overlay/packed_kv/window/slots.py",
        "first[request] = max([low, *((entry + 1) * block_size for entry in missing)])",
        "first[request] = low",
        "tests/kernels/triton/test_ring.py -k plan",
    ),
    "refusal": Mutation(
        "overlay/packed_kv/refusals/rules.py",
        "(f.layer.head_size <= 0 or f.layer.head_size % HEAD_DIM_MULTIPLE)",
        "f.layer.head_size <= 0",
        "tests/refusals/test_refusal_table.py",
    ),
}


def main() -> int:
    places = sys.argv[1:] or list(MUTATIONS)
    if unknown := set(places) - set(MUTATIONS):
        sys.exit(f"mutations.py: no place {', '.join(sorted(unknown))}; known: {', '.join(MUTATIONS)}")
    unseen = []
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPO, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        for place in places:
            print(f"{place}: {(said := look(Path(folder), MUTATIONS[place]))}", flush=True)
            if not said.startswith("seen"):
                unseen.append(place)
    return bool(unseen)


def look(copy: Path, mutation: Mutation) -> str:
    """Return what the tests say of a broken line: "seen by ..." or what is wrong."""
    path = copy / mutation.file
    text = path.read_text()
    if text.count(mutation.line) != 1:
        return f"{mutation.file} has {text.count(mutation.line)} times: {mutation.line}"
    if (code := run(copy, mutation.tests)[0]) != 0:
        return f"pytest ends with {code} on the unbroken line: {mutation.tests}"
    path.write_text(text.replace(mutation.line, mutation.broken))
    code, failed = run(copy, mutation.tests)
    path.write_text(text)
    return f"seen by {len(failed)} tests, as {failed[0]}" if code == 1 and failed else f"NOT SEEN by {mutation.tests}"


def run(copy: Path, tests: str) -> tuple[int, list[str]]:
    """pytest's exit code, and the tests that failed."""
    roots = os.pathsep.join(str(copy / part) for part in ("overlay", "calibration", "quality"))
    words = tests.split()
    command = [sys.executable, "-m", "pytest", "--quick", "-q", "-rf", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": roots, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    return done.returncode, [line.split()[1] for line in lines if line.startswith("FAILED ")]


if __name__ == "__main__":
    sys.exit(main())
