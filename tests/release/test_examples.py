"""Every file of examples/ runs on the demo model, as a user starts it, where the wheel is installed."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed_wheel import REPO, Installed
from packed_kv import FORMATS

EXAMPLES = REPO / "examples"
START_SECONDS = 240
SMALL = ("--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20))


def test_each_example_has_a_test():
    source = Path(__file__).read_text()
    missing = [path.name for path in EXAMPLES.iterdir() if path.is_file() and f'"{path.name}"' not in source]
    assert not missing


def test_offline_serves_a_prompt_from_the_wheel(installed: Installed):
    done = installed.run("python", EXAMPLES / "offline.py")
    answers = re.findall(r"^'(.+)' -> '(.+)'$", done.stdout, re.MULTILINE)
    assert len(answers) == 2
    assert all(len(answer.split()) > 5 for _, answer in answers), answers
    said = done.stdout + done.stderr
    assert re.search(r"KV cache dtype tq4: 1632 bytes per token \(bf16: 6144\)", said), said[-3000:]
    assert str(REPO / "overlay") not in said


@pytest.fixture(scope="module")
def server(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [EXAMPLES / "serve.sh", REPO / "models" / "demo-7m", *SMALL, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=installed.environment, cwd=installed.folder
        )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while not answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-6000:]
            time.sleep(0.3)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def test_a_client_is_answered_by_the_server(installed: Installed, server: str):
    prompt, _, answer = installed.run("python", EXAMPLES / "client.py", server).stdout.partition("\n")
    assert "secret number of Julia" in prompt
    assert len(answer.split()) > 5


def test_packed_cache_generates_over_fewer_bytes(installed: Installed):
    found = installed.run("python", EXAMPLES / "packed_cache.py", "--dtype", "turboquant25", "--tokens", "40").stdout
    numbers = re.search(r"^(\d+) tokens .*: ([\d,]+) bytes, ([\d,]+) in", found, re.MULTILINE).groups()
    tokens, whole, packed = (int(number.replace(",", "")) for number in numbers)
    layers, heads, sequences = 6, 2, 2
    assert whole == (tokens - 1) * sequences * layers * heads * 512
    window = 64 * 2 * (128 + 4)
    assert packed == sequences * layers * heads * ((tokens - 1) * FORMATS["turboquant25"].slot_bytes(128) + window)
    assert found.count("Once upon a time") == 2


def test_calibration_is_worth_something(installed: Installed):
    arguments = ("--calibration-tokens", "2048", "--tokens", "128", "--dtypes", "turboquant35")
    found = installed.run("python", EXAMPLES / "calibrate_and_compare.py", *arguments).stdout
    plain, calibrated = map(float, re.search(r"turboquant35 +([\d.]+) +([\d.]+)", found).groups())
    assert 0 < calibrated < plain
