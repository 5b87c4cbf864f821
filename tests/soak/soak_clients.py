"""Clients of a soak: streams of random lengths, shared prefixes, cancelled requests, and a sample.

Prompts are token ids. A client's requests begin with one of a few shared prefixes, so that the prefix cache has
something to find; now and then it asks one of the sample's prompts instead, whose tokens are known from an idle
server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from soak_server import NAME

CANCELLED_SHARE = 0.1
"""Share of the requests, but for the sample's, that are cancelled."""


@dataclass(frozen=True)
class Load:
    """Lengths in tokens: of prompts and answers up to these, of prefixes and the sample's answers exactly."""

    vocabulary: int
    prompt: int
    answer: int
    prefix: int
    sample_answer: int
    prefixes: int = 4
    samples: int = 8
    sample_share: float = 0.1

    def prefix_tokens(self, number: int) -> list[int]:
        return random.Random(f"prefix {number}").choices(range(3, self.vocabulary), k=self.prefix)

    def prompt_tokens(self, draw: random.Random) -> list[int]:
        own = draw.randint(1, max(1, self.prompt - self.prefix))
        return self.prefix_tokens(draw.randrange(self.prefixes)) + draw.choices(range(3, self.vocabulary), k=own)

    def sample_prompt(self, number: int) -> list[int]:
        return self.prompt_tokens(random.Random(f"sample {number}"))


@dataclass
class Result:
    """Results of the clients; `parted` has, for each sample that differed, how many tokens were the same."""

    tokens: int = 0
    requests: int = 0
    cancelled: int = 0
    errors: list[str] = field(default_factory=list)
    samples: int = 0
    parted: list[int] = field(default_factory=list)


async def stream(
    session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int, salt: str | None = None
) -> AsyncIterator[list[int]]:
    """Greedy tokens of a completion as they come. Raises aiohttp.ClientError, or RuntimeError for an error in the
    stream. `salt`: share no cached prefix with requests of another."""
    body: dict[str, Any] = {
        "model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    if salt:
        body["cache_salt"] = salt
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return
            if data:
                part = json.loads(data)
                if "choices" not in part:
                    raise RuntimeError(f"the stream has an error: {data[:300]}")
                yield part["choices"][0].get("token_ids") or []
    raise RuntimeError("the stream ended too soon")


async def alone(url: str, load: Load, salt: str) -> list[list[int]]:
    """The sample's tokens, asked one at a time, with nothing cached."""
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for number in range(load.samples):
            prompt = load.sample_prompt(number)
            parts = stream(session, url, prompt, load.sample_answer, f"{salt} {number}")
            found.append([token async for part in parts for token in part])
    return found


async def client(
    number: int, url: str, load: Load, expected: list[list[int]], tokens: int, end: float, result: Result,
    is_enough: Callable[[], bool] = lambda: True,
) -> None:  # fmt: skip
    """Ask until `tokens` tokens have come and that `is_enough`, or the clock says `end`."""
    draw, received = random.Random(f"client {number}"), 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        while (received < tokens or not is_enough()) and time.monotonic() < end:
            sample = draw.randrange(load.samples) if draw.random() < load.sample_share else None
            prompt = load.prompt_tokens(draw) if sample is None else load.sample_prompt(sample)
            length = load.sample_answer if sample is not None else draw.randint(1, load.answer)
            cancel_at = draw.randrange(1, length + 1) if sample is None and draw.random() < CANCELLED_SHARE else None
            result.requests += 1
            made: list[int] = []
            try:
                async for part in stream(session, url, prompt, length):
                    made += part
                    received += len(part)
                    result.tokens += len(part)
                    if cancel_at and len(made) >= cancel_at:
                        result.cancelled += 1
                        break
            except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
                result.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(1)  # a server that is gone refuses at once
                continue
            if cancel_at is None and len(made) != length:
                result.errors.append(f"{len(made)} tokens where {length} were asked for")
            if sample is not None:
                result.samples += 1
                same = next((i for i, (a, b) in enumerate(zip(made, expected[sample], strict=False)) if a != b), None)
                if same is not None:
                    result.parted.append(same)


async def all_clients(
    url: str, load: Load, clients: int, expected: list[list[int]], tokens: int, end: float, result: Result,
    is_enough: Callable[[], bool],
) -> None:  # fmt: skip
    await asyncio.gather(*(client(i, url, load, expected, tokens, end, result, is_enough) for i in range(clients)))
