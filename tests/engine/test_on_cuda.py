"""The CUDA routes in the engine: graphs, torch.compile, chunks, drafts and tensor parallelism change no result.

CI has no GPU; `scripts/gpu_tests.sh` runs these with the kernel suite.
"""

from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, cast

import calibration_files
import pytest
import tiny_models
import torch
from harness import engine, mean_kl, model_of, teacher_forced_logits
from packed_kv.attention.layer import PairKernels
from packed_kv.formats import FORMATS
from vllm import LLM, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from packed_kv.attention.prefill import FlashPrefill

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TEXT = topics["assignment"] + topics["class"] + topics["comparisons"]
SAMPLING = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
LENGTHS = (3, 17, 64, 129, 333, 511, 730, 1100, 1500)


def greedy(llm: LLM) -> list[list[int]]:
    """Tokens that continue nine ragged prompts."""
    ids = llm.get_tokenizer().encode(TEXT)
    prompts = [{"prompt_token_ids": ids[13 * i : 13 * i + length]} for i, length in enumerate(LENGTHS)]
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, SAMPLING, use_tqdm=False)]


@pytest.mark.parametrize("name", ["isoquant4", "turboquant25"])
@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_graphs_give_eager_tokens(name: str, kernel: str, demo_model: str) -> None:
    config = {"packed_kv": {"decode_kernel": kernel}}
    with engine(demo_model, name, recent_tokens=None, additional_config=config) as llm:
        eager = greedy(llm)
    options = {"enforce_eager": False, "compilation_config": graphs(0, "FULL_DECODE_ONLY"), "additional_config": config}
    with engine(demo_model, name, recent_tokens=None, **options) as llm:
        assert greedy(llm) == eager


def test_compiled_graphs_give_compiled_tokens(demo_model: str) -> None:
    """torch.compile (which refuses graph breaks) rounds otherwise than eager mode, so graphs are compared with none."""
    found = {}
    for mode in ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE"):
        options = {"enforce_eager": False, "compilation_config": graphs(3, mode), "recent_tokens": None}
        with engine(demo_model, "isoquant4", **options) as llm:
            found[mode] = greedy(llm)
    assert found["PIECEWISE"] == found["NONE"]
    assert found["FULL_AND_PIECEWISE"] == found["NONE"]


def test_a_long_prompt_leaves_no_more_memory_behind_than_a_short_one(demo_model: str) -> None:
    """In fp32 prompts run in PyTorch, which takes their newest tokens as fp32 K and V in each layer: 18 MB of this
    prompt. The first prompt of all makes what stays."""
    left = []
    with engine(demo_model, "tq4", recent_tokens=None, dtype="float32") as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        for length in (1500, 20, 1500):
            llm.generate({"prompt_token_ids": ids[:length]}, SamplingParams(max_tokens=1), use_tqdm=False)
            torch.cuda.synchronize()
            left.append(torch.cuda.memory_allocated())
    assert abs(left[2] - left[1]) < 1 << 20, left


def graphs(mode: int, cudagraph_mode: str) -> dict:
    """Options with a graph of as many requests as `greedy` has: the CUDA kernel's grid, and so the order in which it
    adds, is another for a batch that is padded to more."""
    sizes = [1, 2, 4, 8, len(LENGTHS), 16]
    return {"mode": mode, "cudagraph_mode": cudagraph_mode, "cudagraph_capture_sizes": sizes}


CASES = [*((name, False) for name in FORMATS), ("turboquant25", True), ("isoquant3", True)]


@pytest.mark.parametrize(("name", "calibrated"), CASES)
def test_prefill_routes_agree(name: str, calibrated: bool, demo_model: str, tmp_path: Path) -> None:
    """Chunks of 1 token are decodes, of 64 prefills: both read packed prefixes. A chunk's own tokens are raw, so larger
    chunks are nearer to bf16, and a whole prompt equals it but for rounding; a small workspace costs no more."""
    with engine(demo_model, "auto") as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)[:600]
        bf16 = teacher_forced_logits(llm, token_ids, 64)
    options: dict = {}
    if calibrated:  # other channels for each layer and head; random ones, so that a mix-up shows
        file = calibration_files.write(tmp_path, calibration_files.content(6, 2, 128, 32))
        options["additional_config"] = {"packed_kv": {"calibration": str(file)}}
    with engine(demo_model, name, **options) as llm:
        decoded, chunked, whole = (teacher_forced_logits(llm, token_ids, chunk) for chunk in (1, 64, 600))
        for kernels in kernels_of(llm):
            flash_prefill(kernels).capacity = 112
        in_parts = teacher_forced_logits(llm, token_ids, 64)
        without_prefill_kernels(llm)
        in_pytorch = teacher_forced_logits(llm, token_ids, 64)
    measured = dict(chunked=chunked, in_parts=in_parts, decoded=decoded, in_pytorch=in_pytorch, whole=whole)
    costs = {route: mean_kl(bf16, logits) for route, logits in measured.items()}
    print(f"{name}: KL", ", ".join(f"{route} {cost:.4f}" for route, cost in costs.items()))
    assert costs["whole"] < costs["chunked"] / 5
    assert costs["in_parts"] == pytest.approx(costs["chunked"], rel=0.25)
    assert costs["chunked"] < costs["decoded"]
    assert costs["decoded"] == pytest.approx(costs["in_pytorch"], rel=0.25)


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_recent_window_on_every_route(name: str, demo_model: str) -> None:
    """Decodes and chunks of 64 with a window of 64 cost a fraction of what they cost without, whatever the route (a
    chunk of a prefill reads most of its nearest tokens raw anyway); the kernels' rings and PyTorch's cost the same."""
    with engine(demo_model, "auto") as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)[:600]
        bf16 = teacher_forced_logits(llm, token_ids, 64)
    costs = {}
    for window in (0, 64):
        with engine(demo_model, name, recent_tokens=window) as llm:
            routes = {chunk: teacher_forced_logits(llm, token_ids, chunk) for chunk in (1, 64)}
            without_prefill_kernels(llm)
            routes["in_pytorch"] = teacher_forced_logits(llm, token_ids, 64)
        costs[window] = {route: mean_kl(bf16, logits) for route, logits in routes.items()}
    print(f"{name}: KL", costs)
    bounds = {1: 0.2, 64: 0.5, "in_pytorch": 0.2}
    assert all(costs[64][route] < bound * costs[0][route] for route, bound in bounds.items())
    assert costs[64][1] == pytest.approx(costs[64]["in_pytorch"], rel=0.3)


MODELS = {
    "mistral": tiny_models.mistral,
    "gemma2": tiny_models.gemma2,
    "gemma3": tiny_models.gemma3,
    "head_dim_80": partial(tiny_models.llama, head_dim=80),
    "head_dim_112": partial(tiny_models.llama, head_dim=112),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_windows_soft_caps_and_head_sizes(make, tmp_path: Path) -> None:
    """No further from bf16 than the PyTorch route, which reads the chunk's own tokens back as well."""
    model = tiny_models.save(make(), tmp_path)
    token_ids = torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    with engine(model, "auto", **options) as llm:
        bf16 = teacher_forced_logits(llm, token_ids, 70)
    with engine(model, "isoquant4", **options) as llm:
        fused = teacher_forced_logits(llm, token_ids, 70)
        without_prefill_kernels(llm)
        in_pytorch = teacher_forced_logits(llm, token_ids, 70)
    print(f"{tmp_path.name}: KL {mean_kl(bf16, fused):.4f}, in PyTorch {mean_kl(bf16, in_pytorch):.4f}")
    assert mean_kl(bf16, fused) < 1.1 * mean_kl(bf16, in_pytorch)


@pytest.mark.parametrize(("name", "calibrated"), [("tq4", False), ("isoquant4", True)])
def test_attention_sinks(name: str, calibrated: bool, tmp_path: Path) -> None:
    """Decodes and chunks cost what they cost in PyTorch, which is tested to be exact, or less; with and without a
    recent window, and with means, which a softmax without sinks does not see. A captured decode is the eager one."""
    model = tiny_models.save(tiny_models.gpt_oss(), tmp_path)
    token_ids = torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    with engine(model, "auto", **options) as llm:
        bf16 = teacher_forced_logits(llm, token_ids, 70)
    if calibrated:
        calibration_files.write(tmp_path, calibration_files.content(4, 1, 64, 32, version=2, mean=0.3))
    for window in (0, None):
        with engine(model, name, recent_tokens=window, **options) as llm:
            decoded, chunked = (teacher_forced_logits(llm, token_ids, chunk) for chunk in (1, 70))
            without_prefill_kernels(llm)
            in_pytorch = teacher_forced_logits(llm, token_ids, 70)
        costs = [mean_kl(bf16, logits) for logits in (decoded, chunked, in_pytorch)]
        print(f"{name}, window {window}: KL decoded {costs[0]:.4f}, chunked {costs[1]:.4f}, in PyTorch {costs[2]:.4f}")
        assert costs[0] == pytest.approx(costs[2], rel=0.3)
        assert costs[1] < 1.1 * costs[2]
    captured = {"enforce_eager": False, "compilation_config": graphs(0, "FULL_DECODE_ONLY")}
    with engine(model, name, recent_tokens=None, **options, **captured) as llm:
        assert mean_kl(decoded, teacher_forced_logits(llm, token_ids, 1)) < costs[0] / 100


def test_values_of_fewer_channels(tmp_path: Path) -> None:
    """MiMo-V2's shape, with sinks and windows: as `test_attention_sinks`; and FlashAttention over padded values, which
    is what its versions without kernels for two sizes get."""
    model = tiny_models.save(tiny_models.mimo_v2(), tmp_path)
    token_ids = torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    options: dict = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    with engine(model, "auto", attention_backend="TRITON_ATTN_DIFFKV", **options) as llm:
        bf16 = teacher_forced_logits(llm, token_ids, 70)
    for window in (0, None):
        with engine(model, "tq4", recent_tokens=window, **options) as llm:
            decoded, chunked = (teacher_forced_logits(llm, token_ids, chunk) for chunk in (1, 70))
            for kernels in kernels_of(llm):
                prefill = flash_prefill(kernels)
                prefill.flash_attention, prefill.pads = replace(prefill.flash_attention, value_dim=192), True
                prefill.capacity = 112
            padded = teacher_forced_logits(llm, token_ids, 70)
            without_prefill_kernels(llm)
            in_pytorch = teacher_forced_logits(llm, token_ids, 70)
        costs = [mean_kl(bf16, logits) for logits in (decoded, chunked, padded, in_pytorch)]
        print(f"window {window}: KL decoded, chunked, padded, in PyTorch", *(f"{cost:.4f}" for cost in costs))
        assert costs[0] == pytest.approx(costs[3], rel=0.3)
        assert costs[1] < 1.1 * costs[3]
        assert costs[2] == pytest.approx(costs[1], rel=0.25)
    captured = {"enforce_eager": False, "compilation_config": graphs(0, "FULL_DECODE_ONLY")}
    with engine(model, "tq4", recent_tokens=None, **options, **captured) as llm:
        assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
        assert mean_kl(decoded, teacher_forced_logits(llm, token_ids, 1)) < costs[0] / 100


@pytest.mark.parametrize("heads", [32, 64])
def test_many_query_heads_decode_in_graphs(heads: int, tmp_path: Path) -> None:
    """64 query heads a KV head, as Step-3 has, are 8 tiles of columns."""
    model = tiny_models.save(tiny_models.llama(num_attention_heads=heads, num_key_value_heads=1), tmp_path)
    token_ids = torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    options: dict = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    with engine(model, "auto", **options) as llm:
        bf16 = teacher_forced_logits(llm, token_ids, 70)
    with engine(model, "tq4", **options) as llm:
        without_prefill_kernels(llm)
        in_pytorch = mean_kl(bf16, teacher_forced_logits(llm, token_ids, 70))
    captured = {"enforce_eager": False, "compilation_config": graphs(0, "FULL_DECODE_ONLY")}
    with engine(model, "tq4", **options, **captured) as llm:
        assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
        decoded = mean_kl(bf16, teacher_forced_logits(llm, token_ids, 1))
    print(f"tq4: KL decoded {decoded:.4f}, in PyTorch {in_pytorch:.4f}")
    assert decoded == pytest.approx(in_pytorch, rel=0.3)


def kernels_of(llm: LLM) -> list[PairKernels]:
    """The kernels of each layer."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl.attention.kernels for layer in layers if hasattr(layer, "impl")]


def flash_prefill(kernels: PairKernels) -> FlashPrefill:
    return cast("FlashPrefill", kernels.prefill)


def without_prefill_kernels(llm: LLM) -> None:
    """From now on, prefills run in PyTorch."""
    for kernels in kernels_of(llm):
        assert kernels.prefill is not None
        kernels.prefill = None


@pytest.mark.parametrize("drafts", [3, 12], ids="{}_drafts".format)
def test_drafts_change_no_token(drafts: int, demo_model: str) -> None:
    """In a process of its own: an n-gram engine leaves its process unfit for another."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        plain, drafted, steps = process.submit(generate_with_ngram, demo_model, drafts).result()
    assert drafted == plain
    assert steps < len(plain), "no draft token was accepted"


# Prompts, and how many tokens to generate. Steps with drafts round otherwise, so no token may be a near tie: by fp32
# on a CPU the two best are 0.05 or more apart, and 0.5 with the second prompt. The first one's next token has 0.006.
PROMPTS = (("one two three four five six seven eight nine ten\n" * 12, 32), ("import os\nimport sys\n" * 20, 100))


def generate_with_ngram(model: str, drafts: int) -> tuple[list[int], list[int], int]:
    ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    found: list = []
    for speculation in (None, ngram):
        options = {"enforce_eager": False, "compilation_config": graphs(0, "FULL_DECODE_ONLY")}
        with engine(
            model, "tq4", dtype="float16", speculative_config=speculation, recent_tokens=None, **options
        ) as llm:
            passes: list[object] = []
            model_of(llm).compute_logits = count_calls(model_of(llm).compute_logits, passes)
            tokens: list[int] = []
            for text, count in PROMPTS:
                prompt = llm.get_tokenizer().encode(text)
                sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
                (result,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
                tokens += result.outputs[0].token_ids
        found += [tokens, len(passes)]
    plain, _, drafted, steps = found
    return plain, drafted, steps


def count_calls(function, calls: list[object]):
    def counted(*args, **kwargs):
        calls.append(None)
        return function(*args, **kwargs)

    return counted


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_changes_less_than_quantising(ranks: int, demo_model: str) -> None:
    """2 KV heads: with 4 ranks each head is there twice. Sums over ranks round otherwise; a head that were read with
    another's pages, or stored with another's channels, would cost more than quantising does."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    found = []
    for dtype, size in (("auto", 1), ("isoquant4", 1), ("isoquant4", ranks)):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found.append(process.submit(prompt_log_probabilities, demo_model, dtype, size).result())
    bf16, alone, together = found
    quantised, split = (bf16 - alone).abs().mean().item(), (alone - together).abs().mean().item()
    print(f"{ranks} ranks: mean difference of log-probabilities {split:.4f}; quantising {quantised:.4f}")
    assert 0 < split < quantised / 3


def prompt_log_probabilities(model: str, dtype: str, ranks: int) -> torch.Tensor:
    """Log-probability of each token of a prompt but the first, read in chunks of 64."""
    executor = "mp" if ranks > 1 else "uni"
    options = {"tensor_parallel_size": ranks, "distributed_executor_backend": executor, "dtype": "float16"}
    with engine(model, dtype, max_num_batched_tokens=64, max_num_seqs=4, **options) as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)[:900]
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (result,) = llm.generate({"prompt_token_ids": token_ids}, sampling, use_tqdm=False)
    found = zip(result.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([tokens[token].logprob for tokens, token in found])


def test_sliding_windows_scheduled_ahead(tmp_path: Path) -> None:
    """With the next step scheduled before a step's tokens are known: the same tokens, as sliding layers' blocks are not
    freed before their last reader."""
    model = tiny_models.save(tiny_models.gemma3(), tmp_path)
    ids = torch.randint(3, 250, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [{"prompt_token_ids": ids[37 * i :][:n]} for i, n in enumerate((150, 40, 97, 300, 11, 222))]
    found = []
    for ahead in (False, True):
        options = {"enforce_eager": False, "compilation_config": graphs(0, "FULL_DECODE_ONLY"), "dtype": "bfloat16"}
        options |= {"async_scheduling": ahead, "skip_tokenizer_init": True, "recent_tokens": 32, "max_model_len": 512}
        with engine(model, "tq4", **options) as llm:
            assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == ahead
            sampling = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, detokenize=False)
            results = llm.generate(prompts, sampling, use_tqdm=False)
            found.append([list(result.outputs[0].token_ids) for result in results])
    assert found[0] == found[1]


def test_many_behind_a_long_shared_prefix(demo_model: str) -> None:
    """32 requests at once behind 1,500 cached tokens answer as each does by itself behind the same pages. vLLM 0.31 and
    older might have taken such a batch apart for cascade attention, which packed pages decline.

    A batch rounds its products differently. With `auto` tokens part only where two are as likely but for that. With
    packed pages a rounding moves codes of the tokens that follow: no first token feels that, and what later ones lose
    is a part of what quantizing costs.
    """
    alone, together = ({dtype: answers(dtype, demo_model, batch) for dtype in ("auto", "tq4")} for batch in (1, 32))
    parted = {dtype: likelihoods_lost(together[dtype], alone[dtype]) for dtype in alone}
    quantized = likelihoods_lost(alone["tq4"], alone["auto"])
    first = [a.outputs[0].logprobs[0] for a in together["tq4"]], [a.outputs[0].logprobs[0] for a in alone["tq4"]]
    moved = [abs(a[token].logprob - b[token].logprob) for a, b in zip(*first, strict=True) for token in a.keys() & b]
    print(f"nats lost where tokens part: {parted}, by quantizing {quantized}; first tokens move by {max(moved)}")
    assert max(parted["auto"], default=0) < 0.05 and max(moved) < 0.05
    assert all(map(math.isfinite, quantized)), "more logprobs are needed"
    assert sum(parted["tq4"]) < 0.5 * sum(quantized)


def answers(dtype: str, model: str, batch: int) -> list[RequestOutput]:
    """Answers of 32 tokens to 32 prompts with a prefix of 1,500 in the cache, `batch` of them at once."""
    options = {"enforce_eager": False, "compilation_config": graphs(0, "FULL_DECODE_ONLY"), "max_num_seqs": 32}
    options |= {"dtype": "float16"}  # bfloat16's logits are multiples of 1/16 here, and ties many
    sampling = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=20)
    with engine(model, dtype, **options) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        shared, rest = ids[:1500], ids[1500:]
        prompts = [{"prompt_token_ids": shared + rest[11 * i :][: 20 + i]} for i in range(32)]
        llm.generate({"prompt_token_ids": shared}, SAMPLING, use_tqdm=False)
        found = [
            answer
            for first in range(0, len(prompts), batch)
            for answer in llm.generate(prompts[first : first + batch], sampling, use_tqdm=False)
        ]
    assert all(answer.num_cached_tokens >= 1488 for answer in found)
    return found


def likelihoods_lost(ours: list[RequestOutput], theirs: list[RequestOutput]) -> list[float]:
    """How many nats less likely than their token ours is where two answers part, by them; of those that do."""
    lost = []
    for (mine,), (other,) in ((a.outputs, b.outputs) for a, b in zip(ours, theirs, strict=True)):
        for a, b, step in zip(mine.token_ids, other.token_ids, other.logprobs, strict=True):
            if a != b:
                lost.append(step[b].logprob - step[a].logprob if a in step else math.inf)
                break
    return lost
