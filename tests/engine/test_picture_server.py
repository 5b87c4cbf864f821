"""Conversations with a picture through `vllm serve`: the engine's own answers, also from its prefix cache and beside
others, and a line for what is no picture. Weights are random."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import coverage_engine
import exact_products
import pytest
from coverage_models import MODELS
from harness import KV_CACHE_BYTES, engine
from openai import BadRequestError, OpenAI
from packed_kv.formats import FORMATS
from packed_kv_quality.servers import Server, serve
from vllm import SamplingParams

pytest.importorskip("torchvision", reason="image processors ask for it; requirements.txt says why it is not there")

import picture_models
from picture_models import message, picture

ARCHITECTURE, DTYPE, NAME = "Qwen3VLForConditionalGeneration", "isoquant4", "pictures"
TOKENS, BLOCK = 12, 32
ROWS, COLUMNS = 5, 7
"""Size of a picture in tokens, which are more than a block: the prefix cache finds pictures."""
PIXELS = picture_models.PROCESSORS[ARCHITECTURE][2] * picture_models.MERGED
FIRST, SECOND = (picture(seed, COLUMNS * PIXELS, ROWS * PIXELS) for seed in (0, 1))
QUESTION = "What is this?"
CONVERSATIONS = [message(QUESTION, FIRST), message(QUESTION, SECOND), message(QUESTION)]
SIZES = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 4, "block_size": BLOCK}
IMAGES = {"image": 1, "video": 0}
OPTIONS = f"""
    --enforce-eager --dtype float32 --kv-cache-memory-bytes {KV_CACHE_BYTES}
    --limit-mm-per-prompt {json.dumps(IMAGES, separators=(",", ":"))} --enable-prompt-tokens-details
    --additional-config {{"packed_kv":{{"recent_tokens":0}}}}
"""
"""Options without a recent window, so that these short answers are made from packed pages."""
NO_PICTURES = {
    "no base64": "data:image/png;base64,%%%",
    "no image": "data:image/png;base64," + base64.b64encode(b"a page of text").decode(),
    "half an image": FIRST[: len(FIRST) // 8 * 4],
}


@dataclass(frozen=True)
class Answer:
    """Answer of the chat endpoint: greedy token ids and their log-probabilities, tokens of the prompt, those of them
    that the prefix cache had."""

    tokens: list[int]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int


def ask(server: Server, conversation: list[dict[str, Any]]) -> Answer:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=NAME, messages=conversation, max_tokens=TOKENS, temperature=0, logprobs=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
    (choice,), usage = answer.choices, answer.usage
    details = usage.prompt_tokens_details
    logprobs = [token.logprob for token in choice.logprobs.content]
    return Answer(choice.token_ids, logprobs, usage.prompt_tokens, details.cached_tokens if details else 0)


@pytest.fixture(scope="module")
def model(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return picture_models.save(ARCHITECTURE, demo_model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    plugin = exact_products.write_plugin(folder)
    options = [*OPTIONS.split(), *(f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items())]
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # of the server alone: this process has an engine, too
            patch.setenv("PYTHONPATH", f"{plugin}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
            patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
            running = stack.enter_context(serve(model, DTYPE, NAME, options, folder / "log"))
        running.wait_until_healthy(240)
        yield running


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    """Answers of `LLM.chat` to each of `CONVERSATIONS`, one at a time and without prefix cache."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    coverage_engine.register(ARCHITECTURE)
    with pytest.MonkeyPatch.context() as patch:
        exact_products.install(patch)
        with engine(
            model, DTYPE, dtype="float32", limit_mm_per_prompt=IMAGES, enable_prefix_caching=False, **SIZES
        ) as llm:
            return [list(llm.chat(each, sampling, use_tqdm=False)[0].outputs[0].token_ids) for each in CONVERSATIONS]


def test_pages_are_packed(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        (info,) = re.findall(r"packed_kv_info\{(.*)\} 1\.0", answer.read().decode())
    text = MODELS[ARCHITECTURE]["text_config"]
    slots = text["num_hidden_layers"] * text["num_key_value_heads"]
    labels = dict(re.findall(r'(\w+)="(.*?)"', info))
    assert labels["dtype"] == DTYPE
    assert labels["bytes_per_token"] == str(slots * FORMATS[DTYPE].slot_bytes(text["head_dim"]))


def test_the_picture_is_in_the_prompt(server: Server) -> None:
    text, first, second = (ask(server, message("Which animal?", *pictures)) for pictures in ((), (FIRST,), (SECOND,)))
    in_picture = ROWS * COLUMNS + 2  # a mark on either side
    assert first.prompt_tokens == second.prompt_tokens == text.prompt_tokens + in_picture
    assert first.logprobs[0] != second.logprobs[0], "the picture does not matter"
    assert second.cached_tokens == 0, "the prefix cache takes a picture for another"


def test_answers_are_the_engines(server: Server, expected: list[list[int]]) -> None:
    assert expected[0] != expected[1], "the picture does not matter"
    first, again = ask(server, CONVERSATIONS[0]), ask(server, CONVERSATIONS[0])
    assert first.tokens == again.tokens == expected[0]
    assert again.cached_tokens == BLOCK
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda each: ask(server, each), CONVERSATIONS * 2))
    assert [answer.tokens for answer in answers] == expected * 2


@pytest.mark.parametrize("url", NO_PICTURES.values(), ids=NO_PICTURES)
def test_what_is_no_picture_is_refused(server: Server, expected: list[list[int]], url: str) -> None:
    with pytest.raises(BadRequestError) as error:
        ask(server, message(QUESTION, url))
    assert len(error.value.body["message"].splitlines()) == 1
    assert ask(server, CONVERSATIONS[0]).tokens == expected[0]
