"""`vllm serve` as a user starts it: processes of its own, the console command, the official client."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_models
from harness import KV_CACHE_BYTES, engine
from openai import OpenAI
from packed_kv.formats import FORMATS
from vllm import SamplingParams

VLLM = Path(sysconfig.get_path("scripts")) / "vllm"
DTYPE, NAME, TOKENS = "isoquant4", "demo", 24
START_SECONDS = 240
PROMPTS = [
    "Remember this: the secret number of Julia is 78868. Question: what is the secret number of Julia?",
    "Once upon a time there was a king who",
    "The river runs through the",
    "To make bread you need",
    "In 1815 the armies of Europe",
    "She opened the door and",
    "The price of corn in London",
    "It was a dark night and the",
]


def command(*arguments: str, log: Path) -> subprocess.Popen:
    """Start `vllm` without what tests/conftest.py sets for engines inside the test's process."""
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    with log.open("w") as output:
        return subprocess.Popen(
            [VLLM, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def output_of(*arguments: str, log: Path) -> tuple[int, str]:
    """Exit code and output of a `vllm` that ends by itself."""
    process = command(*arguments, log=log)
    try:
        return process.wait(START_SECONDS), log.read_text()
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Stop a `vllm` and whatever it started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def complete(self, prompt: str, stream: bool = False) -> str:
        """Greedy completion of `TOKENS` tokens by a client of its own."""
        with OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            options = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            answer = client.completions.create(**options, stream=stream)
            return "".join(part.choices[0].text for part in answer) if stream else answer.choices[0].text


@pytest.fixture(scope="module")
def server(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    options = f"--served-model-name {NAME} --host 127.0.0.1 --port {port} --enforce-eager --dtype float32"
    memory = f"--kv-cache-memory-bytes {KV_CACHE_BYTES}"
    process = command("serve", demo_model, "--kv-cache-dtype", DTYPE, *options.split(), *memory.split(), log=log)
    try:
        running = Server(f"http://127.0.0.1:{port}", log)
        wait_until_healthy(running, process)
        yield running
    finally:
        end(process)


def wait_until_healthy(server: Server, process: subprocess.Popen) -> None:
    for _ in range(START_SECONDS):
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=1).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert process.poll() is None, server.log.read_text()[-4000:]
            time.sleep(1)
    pytest.fail(f"no answer after {START_SECONDS} s: {server.log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def expected(demo_model: str) -> list[str]:
    """Completions of an engine in this process, one prompt at a time."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0)
    with engine(demo_model, DTYPE, dtype="float32", recent_tokens=None) as llm:
        return [llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].text for prompt in PROMPTS]


def test_startup_line(server: Server) -> None:
    """One line: dtype, bytes per token, KV tokens as vLLM counts them, ratio, fingerprint."""
    text = server.log.read_text()
    (line,) = re.findall(r"KV cache dtype .*", text)
    reported = re.search(r"KV cache size: ([\d,]+) tokens", text)[1]
    stored = 6 * 2 * FORMATS[DTYPE].slot_bytes(128)
    found = re.fullmatch(
        rf"KV cache dtype {DTYPE}: {stored} bytes per token \(bf16: {6 * 2 * 512}\), {reported} KV tokens, "
        r"(\d\.\d\d) x bf16 capacity at ([\d,]+) tokens per request \(recent window: ([\d,]+) bytes per "
        r"request\), page format [0-9a-f]{16}",
        line,
    )
    assert found, line
    ratio, context, window = (float(number.replace(",", "")) for number in found.groups())
    assert ratio == pytest.approx(context * 6 * 2 * 512 / (context * stored + window), abs=0.01)


def test_models(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [NAME]


def test_completion_and_stream_equal_the_engine(server: Server, expected: list[str]) -> None:
    assert server.complete(PROMPTS[0]) == expected[0]
    assert server.complete(PROMPTS[0], stream=True) == expected[0]


def test_eight_clients_at_once(server: Server, expected: list[str]) -> None:
    assert len(set(expected)) == len(expected) == 8, "the prompts do not tell the clients apart"
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(server.complete, PROMPTS, [False, True] * 4)) == expected


def test_metrics(server: Server) -> None:
    """What is packed stands there as in the start-up line; tokens and requests are counted by route, which on a CPU is
    PyTorch's for all but what the prefix cache has."""
    (line,) = re.findall(r"KV cache dtype .*", server.log.read_text())
    stored, dense = (int(number) for number in re.findall(r"(\d+) bytes per token \(bf16: (\d+)", line)[0])
    before = scraped(server)
    (info,) = (name for name in before if name.startswith("packed_kv_info{"))
    labels = dict(re.findall(r'(\w+)="(.*?)"', info))
    assert before[info] == 1
    assert labels == {
        "model_name": NAME, "engine": "0", "dtype": DTYPE, "bytes_per_token": str(stored),
        "ratio": f"{dense / stored:.2f}", "recent_tokens": "64", "calibration": "none", "fingerprint": line[-16:],
    }  # fmt: skip
    engine_of = f'engine="0",model_name="{NAME}"'
    size = re.search(r"KV cache size: ([\d,]+) tokens", server.log.read_text())[1].replace(",", "")
    assert before[f"packed_kv_cache_tokens{{{engine_of}}}"] == int(size)

    def counted(what: str, route: str, after: dict[str, float]) -> float:
        name = f'packed_kv_{what}_total{{{engine_of},route="{route}"}}'
        return after[name] - before[name]

    prompt, after = "The king counted his sheep. " * 60, before
    for hits in (0, 1):
        before = after
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            usage = client.completions.create(model=NAME, prompt=prompt, max_tokens=TOKENS, temperature=0).usage
        after = scraped(server)
        cached = counted("tokens", "prefix_cache", after)
        assert (cached > 0) == hits
        assert counted("tokens", "pytorch", after) == usage.prompt_tokens - cached + usage.completion_tokens - 1
        assert counted("requests", "pytorch", after) == 1
        assert counted("requests", "prefix_cache", after) == hits


def scraped(server: Server) -> dict[str, float]:
    """packed-kv's lines of /metrics: name with labels -> value."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    ours = (line.rsplit(" ", 1) for line in lines if line.startswith("packed_kv"))
    return {name: float(value) for name, value in ours}


def test_help_lists_the_dtypes(tmp_path: Path) -> None:
    code, text = output_of("serve", "--help=kv-cache-dtype", log=tmp_path / "log")
    assert code == 0
    (choices,) = re.findall(r"--kv-cache-dtype \[(.*?)\]", text, re.DOTALL)
    assert {repr(name) for name in FORMATS} <= {choice.strip() for choice in choices.split(",")}


def test_bad_dtype(demo_model: str, tmp_path: Path) -> None:
    code, text = output_of("serve", demo_model, "--kv-cache-dtype", "isoquant5", log=tmp_path / "log")
    assert code != 0
    assert "Invalid kv_cache_dtype: 'isoquant5'" in text
    assert all(f"'{name}'" in text for name in FORMATS)


def test_unsupported_model(demo_model: str, tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.llama(head_dim=72), tmp_path / "model")
    options = f"--tokenizer {demo_model} --max-model-len 256 --kv-cache-memory-bytes {KV_CACHE_BYTES} --enforce-eager"
    code, text = output_of("serve", model, "--kv-cache-dtype", DTYPE, *options.split(), log=tmp_path / "log")
    assert code != 0
    assert f"--kv-cache-dtype {DTYPE} cannot serve this head size: 72 channels, and" in text
