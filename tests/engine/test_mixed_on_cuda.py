"""Steps with prompts as whole CUDA graphs (`attention/mixed.py`), in vLLM: prompts of many lengths, behind hits of the
prefix cache and new, beside decodes. CI has no GPU; `scripts/gpu_tests.sh` runs these.

Tokens of two engines cannot tell a fault from rounding: keys that round otherwise get other codes, and on a CPU the
same schedule in bf16 and in fp32 is apart by up to 0.23 nats of a token, with 9 of 21 requests ending otherwise. So
each replay is repeated without a graph from the same pages and rings, and held against it step by step (`Repeats`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
from harness import count_preemptions, engine
from packed_kv.attention.limits import longest_decode
from packed_kv.attention.metadata import PackedMetadata, PackedMetadataBuilder
from packed_kv.attention.step import StepCache
from packed_kv_quality.engines import model_runner
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
TEXT = topics["assignment"] + topics["class"] + topics["comparisons"] + topics["operator-summary"]
PREFIXES, NEW = (0, 16, 1200), (1, 2, 15, 16, 17, 128, 500)
STEP_TOKENS, TOKENS = 320, 24
MOST_KL, MEAN_KL = 0.1, 0.005
"""Nats, of a row and of all, between a replay and the ordinary route from the same pages: rounding of one step."""
MOST_LEAD, MEDIAN_APART, FEWEST_EQUAL = 0.6, 0.04, 0.25
"""Between engines: the most lead of a token, in nats, over another that is drawn instead; the median of what tokens'
log probabilities are apart; and the share of requests that end alike. On a CPU, bf16 and fp32: 0.38, 0.012 and 12 of
21."""
OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": True, "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 16, "recent_tokens": None,
    "enforce_eager": False, "max_model_len": 2048,
}  # fmt: skip
REPLAYS = 200
Line = list[tuple[int, float]]
"""Tokens of a request, each with its logarithm of a probability."""


def graphs(mode: str) -> dict[str, Any]:
    return {"mode": 3, "cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}


def ids_of(llm: LLM) -> list[int]:
    """Return the tokens that prompts are taken from: random ones where the model has no tokenizer."""
    if not llm.model_config.skip_tokenizer_init:
        return llm.get_tokenizer().encode(TEXT)
    return torch.randint(3, 250, (8192,), generator=torch.Generator().manual_seed(0)).tolist()


def serve(llm: LLM, **options: Any) -> tuple[list[Line], list[list[float]]]:
    """Return what follows all prompts behind all prefixes, and each token's lead over the next likeliest."""
    ids = ids_of(llm)
    assert llm.reset_prefix_cache()
    llm.generate({"prompt_token_ids": ids[: PREFIXES[-1]]}, SamplingParams(max_tokens=1), use_tqdm=False)
    prompts = [
        {"prompt_token_ids": ids[:prefix] + ids[37 * i + 50 : 37 * i + 50 + new]}
        for i, (prefix, new) in enumerate((prefix, new) for prefix in PREFIXES for new in NEW)
    ]
    of_all = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 2, "detokenize": False}
    sampling = SamplingParams(**{**of_all, **options})
    lines, leads = [], []
    for request in llm.generate(prompts, sampling, use_tqdm=False):
        for result in request.outputs:
            found = [sorted((x.logprob for x in of_token.values()), reverse=True) for of_token in result.logprobs or ()]
            chosen = zip(result.token_ids, result.logprobs or (), strict=True)
            lines.append([(token, of_token[token].logprob) for token, of_token in chosen])
            leads.append([first - second for first, second, *_ in found])
    return lines, leads


def check_alike(lines: list[Line], expected: list[Line], leads: list[list[float]]) -> None:
    """Check that requests have the same tokens up to where two are almost alike, and log probabilities that are near;
    the message has a line for each request."""
    equal, apart, largest, told = 0, [], 0.0, []
    for number, (ours, theirs, lead) in enumerate(zip(lines, expected, leads, strict=True)):
        differ = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a[0] != b[0]), None)
        own = [abs(a[1] - b[1]) for a, b in zip(ours[:differ], theirs[:differ], strict=True)]
        apart += own
        where = f"up to {max(own, default=0.0):.3f} nats apart, at token {own.index(max(own)) if own else None}"
        if differ is None:
            equal += 1
        else:
            largest = max(largest, lead[differ])
            where += f"; token {differ} is {ours[differ]} for {theirs[differ]}, which led by {lead[differ]:.3f}"
        told.append(f"request {number}: {where}")
    assert all(math.isfinite(x) for x in apart), "\n".join(told)
    median = statistics.median(apart) if apart else math.inf
    summary = f"{equal} of {len(lines)} equal, largest lead {largest:.3f}, median apart {median:.4f}"
    is_alike = largest < MOST_LEAD and median < MEDIAN_APART and equal >= FEWEST_EQUAL * len(lines)
    assert is_alike, "\n".join([summary, *told])


class Repeat(NamedTuple):
    """A replay beside its repetitions: what it was; what is wrong with it but numbers; and for each row the larger KL
    of the two repetitions from it."""

    what: str
    wrong: list[str]
    kl: torch.Tensor


class Repeats:
    """Repeats each replay of a mixed step, from the pages and rings before it: with its own launches in its own sizes,
    and by the ordinary route. What the replay left stays."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        self.runner, self.found = model_runner(llm), list[Repeat]()
        self.prepared: Any = None
        self.prepare = self.runner.model_state.prepare_attn
        self.run = ModelCudaGraphManager.run_fullgraph
        monkeypatch.setattr(self.runner.model_state, "prepare_attn", self.record)
        monkeypatch.setattr(ModelCudaGraphManager, "run_fullgraph", lambda manager, desc: self.repeat(manager, desc))
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        caches = [layer.kv_cache for layer in layers if torch.is_tensor(getattr(layer, "kv_cache", None))]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in caches if x.numel()}
        self.memory = [torch.empty(0, dtype=torch.uint8, device=self.runner.device).set_(x) for x in storages.values()]

    def record(self, *arguments: Any, **options: Any) -> Any:
        result = self.prepare(*arguments, **options)
        self.prepared = arguments, result
        return result

    def repeat(self, manager: Any, desc: Any) -> Any:
        from vllm.config.compilation import CUDAGraphMode

        if desc.uniform_token_count is not None:
            return self.run(manager, desc)
        (batch, _, *rest), padded = self.prepared
        rest = rest[:4]  # block tables, slots, groups of layers, configuration of the cache
        before = [x.clone() for x in self.memory]
        output = self.run(manager, desc)
        rows = batch.num_tokens
        replayed, after = output[:rows].clone(), [x.clone() for x in self.memory]

        def again(metadata: dict[str, Any]) -> torch.Tensor:
            for memory, old in zip(self.memory, before, strict=True):
                memory.copy_(old)
            return self.forward(batch, metadata, rest[1], rest[3])[:rows].clone()

        own = again({name: self.as_graph(of_layer) for name, of_layer in padded.items()})
        same_pages = all(torch.equal(x, y) for x, y in zip(self.memory, after, strict=True))
        ordinary = again(self.prepare(batch, CUDAGraphMode.NONE, *rest))
        for memory, new in zip(self.memory, after, strict=True):
            memory.copy_(new)
        wrong = []
        if not replayed.isfinite().all():
            wrong.append("not finite")
        wrong += ["padding is not finite"] * (not output[rows:].isfinite().all())
        wrong += ["other bits of the output"] * (not torch.equal(own, replayed))
        wrong += ["other bits of pages or rings"] * (not same_pages)
        logs = [self.runner.model.compute_logits(x).float().log_softmax(-1) for x in (replayed, own, ordinary)]
        kl = torch.stack([(x.exp() * (x - logs[0])).sum(-1) for x in logs[1:]]).amax(0)
        what = f"{batch.num_scheduled_tokens.tolist()} behind {batch.num_computed_tokens_np.tolist()} in {desc}"
        self.found.append(Repeat(what, wrong, kl.cpu()))
        return output

    def as_graph(self, metadata: Any) -> Any:
        if not isinstance(metadata, PackedMetadata):
            return metadata
        longest = longest_decode(self.runner.vllm_config)
        return replace(
            metadata, is_mixed_graph=True, decode_query_len=longest, steps=StepCache()
        )  # fmt: skip

    def forward(self, batch: Any, metadata: dict[str, Any], slots: Any, cache_config: Any) -> torch.Tensor:
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        options = {"slot_mapping": build_slot_mappings_by_layer(slots, cache_config), "is_padding": batch.is_padding}
        with set_forward_context(metadata, self.runner.vllm_config, num_tokens=len(batch.input_ids), **options):
            inputs = {"input_ids": batch.input_ids, "positions": batch.positions, "intermediate_tensors": None}
            return self.runner.model(**inputs, inputs_embeds=None)

    def check(self) -> None:
        """Check all, and forget them."""
        found, self.found = self.found, []
        assert found
        kl = torch.cat([one.kl for one in found])
        wrong = [
            f"{one.what}: {', '.join(one.wrong)}; KL up to {one.kl.max():.4f}, in row {int(one.kl.argmax())}"
            for one in found
            if one.wrong or not one.kl.max() < MOST_KL
        ]
        summary = (
            f"{len(wrong)} of {len(found)} replays; KL of {len(kl)} rows: mean {kl.mean():.5f}, max {kl.max():.4f}"
        )
        assert not wrong and kl.mean() < MEAN_KL, "\n".join([summary, *wrong[:20]])


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Tokens and requests of the graphs of mixed steps that are replayed, counted."""
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    found: Counter[tuple[int, int]] = Counter()
    run = ModelCudaGraphManager.run_fullgraph

    def count(self: Any, desc: Any) -> Any:
        if desc.uniform_token_count is None:
            found[desc.num_tokens, desc.num_reqs] += 1
        return run(self, desc)

    monkeypatch.setattr(ModelCudaGraphManager, "run_fullgraph", count)
    return found


def read_tables_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps with prompts that run eagerly take the route of graphs."""
    build = PackedMetadataBuilder.build

    def with_tables(self: PackedMetadataBuilder, *arguments: Any, **options: Any) -> Any:
        metadata = build(self, *arguments, **options)
        if metadata.decodes == len(metadata.context):
            return metadata
        return replace(metadata, is_mixed_graph=True, decode_query_len=self.reorder_batch_threshold or 1)

    monkeypatch.setattr(PackedMetadataBuilder, "build", with_tables)


def serve_again(llm: LLM, replayed: Counter, monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """Return what follows all prompts: the same in `REPLAYS` replays and more, of which the last are held against
    others (`Repeats`)."""
    lines, _ = serve(llm)
    assert len(replayed) > 3, replayed
    while sum(replayed.values()) < REPLAYS:
        assert serve(llm)[0] == lines
    with monkeypatch.context() as patches:
        repeats = Repeats(llm, patches)
        assert serve(llm)[0] == lines
        repeats.check()
    return lines


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_tokens(name: str, demo_model: str, replayed: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the ordinary route, and of the graphs' own without graphs; again and again with the same bits."""
    with engine(demo_model, name, compilation_config=graphs("FULL_AND_PIECEWISE"), **OPTIONS) as llm:
        lines = serve_again(llm, replayed, monkeypatch)
    off = {"additional_config": {"packed_kv": {"mixed_graphs": False}}}
    before = replayed.copy()
    with engine(demo_model, name, compilation_config=graphs("FULL_AND_PIECEWISE"), **OPTIONS | off) as llm:
        ordinary = serve(llm)
    assert replayed == before
    check_alike(lines, *ordinary)
    with (
        monkeypatch.context() as patches,
        engine(demo_model, name, compilation_config=graphs("NONE"), **OPTIONS) as llm,
    ):
        read_tables_always(patches)
        check_alike(lines, *serve(llm))


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_windows_and_sinks(
    name: str, tmp_path: Path, replayed: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """gpt-oss: sinks, and two groups of layers, of which one has a sliding window. Tokens have all experts: where two
    of them are almost alike, a rounding of the other route would choose the other one."""
    config = tiny_models.gpt_oss(max_position_embeddings=2048, num_experts_per_tok=4)
    model = tiny_models.save(config, tmp_path)
    options = OPTIONS | {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    with engine(model, name, compilation_config=graphs("FULL_AND_PIECEWISE"), **options) as llm:
        serve_again(llm, replayed, monkeypatch)


@pytest.mark.parametrize(
    "more",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
        {"kv_cache_memory_bytes": 4 << 20},
    ],
    ids=["drafts", "preemption"],
)
def test_engines(
    more: dict[str, Any], demo_model: str, replayed: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Drafts of unequal lengths, and preempted requests; with two continuations of each request, so cold that only
    tokens almost alike are drawn. The other engine compiles the same graphs piece by piece."""
    found = []
    for has_graphs in (True, False):
        options = OPTIONS | more | {"additional_config": {"packed_kv": {"mixed_graphs": has_graphs}}}
        with engine(demo_model, "tq4", compilation_config=graphs("FULL_AND_PIECEWISE"), **options) as llm:
            preempted = count_preemptions(llm, monkeypatch)
            found.append(serve(llm, n=2, temperature=0.005, seed=0))
            assert bool(preempted) == ("kv_cache_memory_bytes" in more)
            if has_graphs:
                with monkeypatch.context() as patches:
                    repeats = Repeats(llm, patches)
                    serve(llm, n=2, temperature=0.005, seed=0)
                    repeats.check()
                before = replayed.copy()
    assert replayed == before and replayed
    check_alike(found[0][0], *found[1])


@pytest.mark.parametrize(
    "more", [{"enable_lora": True, "max_lora_rank": 8}, {"kv_cache_dtype_skip_layers": ["0", "3"]}]
)
def test_engines_without_graphs(more: dict[str, Any], demo_model: str, replayed: Counter) -> None:
    with engine(demo_model, "tq4", compilation_config=graphs("FULL_AND_PIECEWISE"), **OPTIONS, **more) as llm:
        serve(llm)
    assert not replayed


@pytest.mark.parametrize("name", ["tq4", "turboquant25"])
def test_a_long_prefix(name: str, demo_model: str, replayed: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts behind 40,000 tokens that the prefix cache has."""
    long = 40000
    more = {
        "max_model_len": long + 1024, "hf_overrides": {"max_position_embeddings": long + 1024},
        "kv_cache_memory_bytes": 256 << 20,
    }  # fmt: skip
    options = OPTIONS | more
    with engine(demo_model, name, compilation_config=graphs("FULL_AND_PIECEWISE"), **options) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        prefix = (ids * (long // len(ids) + 1))[:long]
        llm.generate({"prompt_token_ids": prefix}, SamplingParams(max_tokens=1), use_tqdm=False)
        before = sum(replayed.values())
        prompts: Any = [
            {"prompt_token_ids": prefix + ids[37 * i + 50 : 37 * i + 50 + new]} for i, new in enumerate(NEW)
        ]
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        with monkeypatch.context() as patches:
            repeats = Repeats(llm, patches)
            results = llm.generate(prompts, sampling, use_tqdm=False)
            repeats.check()
        assert all(long - 128 < (result.num_cached_tokens or 0) <= long for result in results)
        assert sum(replayed.values()) > before
