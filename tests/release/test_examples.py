"""Every file of examples/ runs on the demo model, as a user starts it, where the wheel is installed."""

from __future__ import annotations

import asyncio
import importlib.util
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
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from checkout import REPO
from installed_wheel import Installed
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


def test_disaggregated_proxy():
    """The prefill server is asked for one token, the decode server for the client's, with what the first one said."""
    spec = importlib.util.spec_from_file_location("proxy", EXAMPLES / "disaggregated_proxy.py")
    proxy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proxy)
    asked: list[dict] = []
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}

    async def prefill(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if asked[-1]["prompt"] == "too long":
            return web.json_response({"error": "too long"}, status=400)
        return web.json_response({"kv_transfer_params": params})

    async def decode(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(body=b"data: 1\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async def ask(prompt: str) -> tuple[int, str, bytes]:
        servers = [TestServer(web.Application()) for _ in range(2)]
        for server, answer in zip(servers, (prefill, decode), strict=True):
            server.app.router.add_post("/v1/completions", answer)
            await server.start_server()
        app = proxy.make_app(*(str(server.make_url("")).rstrip("/") for server in servers))
        async with TestClient(TestServer(app)) as client:
            body = {"prompt": prompt, "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
            response = await client.post("/v1/completions", json=body)
            answer = response.status, response.content_type, await response.read()
        for server in servers:
            await server.close()
        return answer

    assert asyncio.run(ask("hello")) == (200, "text/event-stream", b"data: 1\n\ndata: [DONE]\n\n")
    first, second = asked
    own = {"do_remote_decode": True, "do_remote_prefill": False}
    assert first == {"prompt": "hello", "max_tokens": 1, "stream": False, "kv_transfer_params": own}
    assert (second["max_tokens"], second["stream"], second["kv_transfer_params"]) == (9, True, params)
    assert asyncio.run(ask("too long"))[0] == 400
    assert len(asked) == 3
