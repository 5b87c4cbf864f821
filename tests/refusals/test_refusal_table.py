"""The table of refusals: each row applies to something, unknown facts refuse nothing, and all who refuse agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from checkout import REPO
from coverage_models import MODELS
from packed_kv.commands import doctor, plan
from packed_kv.model.architectures import IGNORES_KV_CACHE_DTYPE
from packed_kv.model.shape import parse
from packed_kv.refusals.facts import (
    Architecture,
    Attention,
    Cache,
    Drafts,
    Engine,
    Facts,
    Given,
    Latents,
    Layer,
    Pages,
    Parallel,
    Record,
    Vllm,
)
from packed_kv.refusals.rules import CONNECTORS, RULES, WINDOW_RULES
from packed_kv.refusals.table import (
    Refused,
    markdown,
    no_window,
    refusals_of,
    refusals_of_model,
    refuse,
)

SHAPE = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}


class Connector(NamedTuple):
    name: str
    options: dict = {}  # noqa: RUF012 (nobody changes it)


V32 = "DeepseekV32ForCausalLM"
REFUSED = [
    (Facts(Engine(platform="rocm")), "this platform: rocm, and"),
    (Facts(Engine(capability=(7, 5))), "this GPU: compute capability 7.5, and"),
    (
        Facts(Architecture(name="RWForCausalLM")),
        "models that do not pass cache_config to their attention layers: RWForCausalLM, whose",
    ),
    (
        Facts(Latents(has_dense_layers=True), Architecture(name="HYV4ForCausalLM")),
        "dense latent attention (MLA) with attention sinks: HYV4ForCausalLM, some of whose layers read all tokens; ",
    ),
    (Facts(Latents(is_sparse=True)), "sparse attention: the model, whose"),
    (
        Facts(Latents(is_sparse=True, rank=256, rope_size=64), Architecture(name=V32)),
        "sparse attention over latents of this size: 256 channels and 64 of RoPE, and kernels need 512 and 64; use",
    ),
    (
        Facts(Latents(is_sparse=True), Architecture(name=V32), Vllm(version_without_rows="0.32.0")),
        "sparse attention with this vLLM: 0.32.0, whose layers write their cache themselves; ",
    ),
    (
        Facts(Latents(is_sparse=True), Architecture(name=V32), Engine(platform="cuda", capability=(8, 9))),
        "sparse attention on this GPU: compute capability 8.9, and vLLM's FlashMLA needs 9.0 or 10.x; use",
    ),
    (
        Facts(Latents(is_sparse=True), Architecture(name=V32), Parallel(pcp=2)),
        "sparse attention with --prefill-context-parallel-size: 2 ranks, ",
    ),
    (
        Facts(Latents(is_sparse=True), Architecture(name=V32), Cache(has_host_cache=True)),
        "sparse attention with a cache on the host: hisparse_config, whose rows",
    ),
    (
        Facts(Latents(is_sparse=True), Architecture(name=V32), Engine(connector="NixlConnector")),
        "sparse attention with a KV connector: NixlConnector, which was not tried",
    ),
    (
        Facts(Latents(is_sparse=True), Architecture(name=V32), Parallel(dcp=2)),
        "--decode-context-parallel-size with sparse attention: 2 ranks, and picks are of all ranks' tokens; use",
    ),
    (
        Facts(Layer(name="layers.0"), Latents(layer_class="MLA")),
        "latent attention (MLA) in layers of their own kind: layers.0 is a MLA, which writes",
    ),
    (
        Facts(Latents(is_mla=True), Architecture(name="Dots3NoteForCausalLM")),
        "latent attention (MLA) in layers of their own kind: Dots3NoteForCausalLM, whose layers write their cache",
    ),
    (
        Facts(Latents(is_mla=True), Architecture(has_states=True), Vllm(states_fit=False)),
        "latent attention (MLA) with state layers: the model, and vLLM has patches of an older packed-kv",
    ),
    (Facts(Latents(rank=500, rope_size=64)), "latent attention (MLA) of this size: 500 channels and 64 of RoPE, and"),
    (
        Facts(Latents(size=576, built_size=512)),
        "latent attention (MLA) of this size: 576 channels with RoPE's",
    ),
    (
        Facts(Latents(is_mla=True), Vllm(version_without_latents="0.31.0")),
        "latent attention (MLA) with this vLLM: 0.31.0; 0.32.0 and",
    ),
    (
        Facts(Latents(is_mla=True), Attention(sliding_window=64)),
        "latent attention (MLA) with a sliding window: 64 tokens; use",
    ),
    (
        Facts(Latents(is_mla=True), Cache(skip_layers=("0", "2"))),
        "latent attention (MLA) with skipped layers: 0 2, whose",
    ),
    (
        Facts(Latents(is_mla=True), Engine(has_lora=True)),
        "latent attention (MLA) with LoRA: adapters of kv_b_proj would",
    ),
    (
        Facts(Parallel(dcp=2, has_own_queries=True), Latents(is_mla=True)),
        "--decode-context-parallel-size with --dcp-q-replicate: 2 ranks, and its weights",
    ),
    (Facts(Attention(kind="encoder_only")), "encoders: encoder_only attention, and"),
    (Facts(Attention(is_causal=False)), "prompts that are read in both directions: the model, and packed attention"),
    (Facts(Architecture(name="BloomForCausalLM"), Attention(has_alibi=True)), "ALiBi: BloomForCausalLM, whose scores"),
    (
        Facts(Layer(name="layers.0", own_backend="FLASH_ATTN")),
        "models that choose their own attention backend: layers.0 has",
    ),
    (
        Facts(Architecture(name="Step5ForCausalLM")),
        "models that choose their own attention backend: Step5ForCausalLM, whose",
    ),
    (Facts(Attention(has_static_sinks=True)), "static attention sinks: the model, which prepends"),
    (Facts(Pages(kind="RSWASpec")), "this kind of KV cache: a RSWASpec, whose tokens"),
    (
        Facts(Layer(name="draft.0"), Pages(owner="layers.3")),
        "draft layers that read the model's KV cache: draft.0 reads that",
    ),
    (Facts(Layer(head_size=72)), "this head size: 72 channels, and packed pages need a multiple of 16"),
    (Facts(Layer(head_size=0)), "this head size: 0 channels, and"),
    (Facts(Layer(head_size=128, value_size=192)), "this head size of V: V of 192 channels with K of 128; V may"),
    (Facts(Layer(head_size=128, value_size=72)), "this head size of V: V of 72 channels with K of 128; V may"),
    (
        Facts(Layer(name="layers.0", head_size=128, value_size=64, built_value_size=128)),
        "this head size of V: layers.0 has",
    ),
    (
        Facts(Attention(sinks=(3,)), Layer(query_heads=4)),
        "attention sinks of this shape: [3], and packed pages need one number for",
    ),
    (Facts(Layer(options=("fancy", "new"))), "these options of an attention layer: fancy, new, which"),
    (
        Facts(Attention(has_image_prefix=True)),
        "images whose tokens attend to each other in both directions: the model, and",
    ),
    (Facts(Cache(block_size=24)), "this block size: 24 tokens, and packed pages need a multiple of 16"),
    (Facts(Layer(has_output_scale=True)), "fused output quantization: packed attention"),
    (
        Facts(Engine(connectors=(Connector("NixlConnector"), Connector("Odd")))),
        "this KV connector: Odd, whose keys do",
    ),
    (
        Facts(Engine(connectors=(Connector("NixlConnector", {"enforce_handshake_compat": False}),))),
        "this KV connector: Nixl",
    ),
    (Facts(Drafts(method="extract_hidden_states")), "this speculative method: extract_hidden_states, which"),
    (
        Facts(Drafts(is_packed=True, method="dspark")),
        "drafts that write their KV cache themselves: dspark, whose",
    ),
    (Facts(Engine(has_fast_prefill=True)), "--kv-sharing-fast-prefill: the host"),
    (Facts(Engine(has_micro_batches=True)), "--enable-dbo and --ubatch-size: two batches"),
    (
        Facts(Engine(platform="cpu"), Given(decode_kernel="triton")),
        "packed_kv.decode_kernel: triton, a choice between kernels of CUDA in fp16 and bf16, and this is a CPU; leave",
    ),
    (
        Facts(Engine(platform="cpu"), Given(decode_kernel="cuda")),
        "packed_kv.decode_kernel: cuda, a choice between kernels of CUDA in fp16 and bf16, and this is a CPU; leave",
    ),
    (
        Facts(Given(decode_kernel="cuda", not_cuda="the CUDA kernel does not support a soft cap")),
        "packed_kv.decode_kernel: cuda, and the CUDA kernel does not support a soft cap; leave decode_kernel out",
    ),
    (
        Facts(Engine(platform="cuda"), Given(is_fp32=True, decode_kernel="triton")),
        "packed_kv.decode_kernel: triton, a choice between kernels of CUDA in fp16 and bf16, and this is float32; ",
    ),
    (
        Facts(Given(latent_rope_bits=8, has_latents=False)),
        "packed_kv.latent_rope_bits: 8, and the model has no latents (MLA); leave latent_rope_bits out",
    ),
    (
        Facts(Parallel(dcp=2), Engine(platform="cpu")),
        "--decode-context-parallel-size with vLLM's CPU platform: 2 ranks, and it cannot",
    ),
    (
        Facts(Parallel(dcp=2, dcp_backend="a2a")),
        "--decode-context-parallel-size with --dcp-comm-backend a2a: 2 ranks, and ag_rs",
    ),
    (Facts(Parallel(dcp=2), Drafts(method="ngram")), "--decode-context-parallel-size with drafts: 2 ranks, and"),
    (
        Facts(Parallel(dcp=2), Engine(connector="NixlConnector")),
        "--decode-context-parallel-size with a KV connector: 2 ranks; use",
    ),
    (
        Facts(Parallel(dcp=2), Architecture(has_states=True)),
        "--decode-context-parallel-size with state layers: 2 ranks, and each",
    ),
    (
        Facts(Parallel(dcp=2), Architecture(has_chunks=True)),
        "--decode-context-parallel-size with chunked attention: 2 ranks, and its layers",
    ),
    (
        Facts(Parallel(dcp=2), Attention(sliding_window=128)),
        "--decode-context-parallel-size with a sliding window: 2 ranks; use",
    ),
    (
        Facts(Parallel(dcp=2), Attention(sinks=(4,)), Layer(query_heads=4)),
        "--decode-context-parallel-size with attention sinks: 2 ranks; use",
    ),
    (
        Facts(Parallel(dcp=2), Pages(is_shared=True)),
        "--decode-context-parallel-size with another layer's KV cache: 2 ranks; use",
    ),
    (
        Facts(Parallel(dcp=3, has_mean_blocks=True)),
        "--decode-context-parallel-size with means of keys by position: 3 ranks in runs of 1, which",
    ),
    (
        Facts(Parallel(dcp=8, dcp_run=128, has_mean_blocks=True)),
        "--decode-context-parallel-size with means of keys by position: 8 ranks in runs of 128, which",
    ),
    (Facts(Cache(skip_layers=("0", "0,1"))), "this word of --kv-cache-dtype-skip-layers: '0,1', which is neither"),
    (
        Facts(Cache(skip_layers=("sliding_window",), slides=False)),
        "this word of --kv-cache-dtype-skip-layers: 'sliding",
    ),
    (
        Facts(Cache(skip_layers=("7",), layer_numbers=frozenset({0, 4}))),
        "this word of --kv-cache-dtype-skip-layers: '7', and layers with a KV cache have numbers from 0 to 4",
    ),
    (
        Facts(Layer(name="layers.4 (auto)"), Pages(owner="layers.0", owner_dtype="tq4")),
        "skipped layers that share a KV cache: layers.4 (auto) reads the cache of layers.0, which is tq4; name",
    ),
    (Facts(Pages(skipped_dtype="auto")), "skipped layers of chunked attention: a layer with auto pages, which"),
    (
        Facts(Cache(skip_layers=("0", "2")), Pages(size=(4000, 1000))),
        "these skipped layers: --kv-cache-dtype-skip-layers 0 2, ",
    ),
    (Facts(Vllm(backend_reasons=("R-SWA not supported",))), "this configuration: R-SWA not supported; use"),
]


@pytest.mark.parametrize(("facts", "words"), REFUSED, ids=[words.split(":")[0] for _, words in REFUSED])
def test_a_refusal_is_one_line(facts: Facts, words: str) -> None:
    """What was asked for, what was read, and a remedy."""
    (refusal,) = refusals_of(facts)
    line = refusal.sentence("tq4")
    assert line.startswith(f"--kv-cache-dtype tq4 cannot serve {words}")
    assert f"; {refusal.rule.remedy}" in line and "\n" not in line and len(line) < 320
    with pytest.raises(Refused) as error:
        refuse(facts, "tq4")
    assert str(error.value) == line


def test_every_row_refuses_something() -> None:
    assert {refusal.rule for facts, _ in REFUSED for refusal in refusals_of(facts)} == set(RULES)


SERVED = Facts(
    Engine(
        platform="cuda", capability=(8, 0), connector="NixlConnector", connectors=tuple(map(Connector, CONNECTORS)),
        has_lora=True, has_fast_prefill=False, has_micro_batches=False,
    ),
    Given(is_fp32=False, decode_kernel="triton", not_cuda="it is disabled", latent_rope_bits=8, has_latents=True),
    Parallel(dcp=1, dcp_backend="ag_rs", dcp_run=1, has_own_queries=True, has_mean_blocks=True, pipeline=2, pcp=2),
    Cache(
        block_size=16, auto="fp8", skip_layers=("0", "sliding_window"), layer_numbers=frozenset({0, 1}), slides=True,
        has_other_dtypes=True, has_one_manager=True, has_host_cache=True,
    ),
    Drafts(method="ngram", has_cache=True, is_packed=True, is_draft=True),
    Vllm(
        version_without_latents="0.31.0", version_without_rows="0.32.0", groups_stay=True, states_fit=False,
        backend_reasons=(),
    ),
    Architecture(name="LlamaForCausalLM", has_states=True, has_chunks=True, has_several_kinds=True),
    Attention(
        kind="decoder", is_causal=True, has_alibi=False, has_image_prefix=False, has_static_sinks=False, sinks=(32,),
        sliding_window=128,
    ),
    Latents(is_mla=False, is_sparse=False, has_dense_layers=False, rank=512, rope_size=64, size=576, built_size=576),
    Layer(
        name="layers.0", options=(), has_output_scale=False, head_size=192, value_size=128, built_value_size=128,
        query_heads=32,
    ),
    Pages(size=(1500, 1000), skipped_dtype="tq4", is_shared=True),
)  # fmt: skip


def test_what_is_unknown_or_served_is_not_refused() -> None:
    assert not refusals_of(Facts()) and not no_window(Facts())
    assert not refusals_of(SERVED)
    unknown = {
        f"{subject}.{name}"
        for subject, record in vars(SERVED).items()
        if isinstance(record, Record)
        for name, fact in vars(record).items()
        if fact is None
    }
    assert unknown == {"layer.own_backend", "pages.kind", "pages.owner", "pages.owner_dtype", "latents.layer_class"}


def test_the_last_record_that_knows_a_fact_counts() -> None:
    facts = Facts(Parallel(dcp=1, pcp=3), Engine(platform="cpu"), Parallel(dcp=2, pipeline=4, pcp=None))
    assert facts.parallel == Parallel(dcp=2, pipeline=4, pcp=3) and facts.engine == Engine(platform="cpu")
    assert facts.cache == Cache() and Facts(*facts.records).parallel == facts.parallel


NO_WINDOW = [
    (Facts(Latents(is_sparse=True)), "sparse attention (its layers read picked tokens"),
    (Facts(Latents(is_mla=True), Drafts(has_cache=True, method="eagle")), "latent attention (MLA) with other pages"),
    (Facts(Parallel(dcp=2)), "decode context parallelism (it distributes"),
    (Facts(Cache(has_one_manager=True)), "--disable-hybrid-kv-cache-manager (some KV"),
    (
        Facts(Engine(connectors=(Connector("NixlConnector"), Connector("NixlPushConnector")))),
        "this KV connector (NixlPushConnector)",
    ),
    (
        Facts(Engine(connector="OffloadingConnector"), Vllm(groups_stay=False)),
        "a KV connector (OffloadingConnector, and vLLM has patches of an older packed-kv; run",
    ),
    (
        Facts(Parallel(pipeline=2), Drafts(has_cache=True)),
        "pipeline parallelism (its stages would lay out their pages",
    ),
]


def test_what_has_no_recent_window() -> None:
    for facts, words in NO_WINDOW:
        assert no_window(facts).startswith(words)
    assert len(NO_WINDOW) == len(WINDOW_RULES)
    assert not no_window(
        Facts(
            Latents(is_mla=False), Engine(connector="OffloadingConnector", platform="cpu"), Parallel(pipeline=2, dcp=1)
        )
    )
    connectors = (Connector("NixlConnector"), Connector("OffloadingConnector"))
    assert not no_window(
        Facts(Engine(connector="MultiConnector", connectors=connectors, platform="cpu"), Vllm(groups_stay=True))
    )
    assert not no_window(Facts(Parallel(pipeline=2), Architecture(has_chunks=True)))
    assert not no_window(
        Facts(
            Parallel(pipeline=2),
            Cache(has_other_dtypes=True),
            Architecture(has_several_kinds=False),
            Engine(platform="cuda"),
        )
    )
    assert no_window(
        Facts(
            Parallel(pipeline=2),
            Cache(has_other_dtypes=True),
            Architecture(has_several_kinds=True),
            Engine(platform="cuda"),
        )
    )
    assert not no_window(Facts(Latents(is_mla=True), Drafts(has_cache=True, method="mtp")))
    beside = Cache(has_other_dtypes=True), Architecture(has_states=True), Drafts(has_cache=True)
    assert not no_window(Facts(Engine(platform="cuda", connectors=connectors), *beside))
    assert not no_window(Facts(Cache(has_other_dtypes=True), Architecture(has_states=True), Engine(platform="cuda")))


def started() -> dict[str, str]:
    """Architecture -> how an engine with tq4 started, on an H200 (scripts/model_coverage.py)."""
    rows = json.loads((REPO / "benchmarks" / "results" / "models.json").read_text())["rows"]
    by_today = [row for row in rows if "MLA not supported" not in str(row.get("reason"))]  # which is served since
    return {row["architecture"]: row["result"] for row in by_today if row["architecture"] in MODELS}


@pytest.mark.parametrize(("architecture", "result"), list(started().items()))
def test_a_config_is_refused_where_the_engine_refuses(architecture: str, result: str) -> None:
    config = MODELS[architecture]
    has_attention = architecture not in ("MambaForCausalLM", "Mamba2ForCausalLM")
    refused = refusals_of_model(config, parse(config, architecture) if has_attention else None)
    assert any(not refusal.rule.option for refusal in refused) == (result == "refused")


@pytest.mark.parametrize(
    ("config", "subject"),
    [
        ({"architectures": [IGNORES_KV_CACHE_DTYPE[0]]}, "models that do not pass cache_config to their attention "
         "layers"),
        ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "models that choose their own attention backend"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}, "sparse attention"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 0}, "latent attention (MLA) of this size"),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "architectures": ["Dots3NoteForCausalLM"]},
            "latent attention (MLA) in layers of their own kind",
        ),
        ({"architectures": ["HrmTextForCausalLM"]}, "prompts that are read in both directions"),
        ({"model_type": "roberta"}, "encoders"),
        ({"is_encoder_decoder": True}, "encoders"),
        ({"is_causal": False}, "encoders"),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"param_sink_number": 128}, "static attention sinks"),
        ({"model_type": "gemma4_assistant"}, "draft layers that read the model's KV cache"),
        ({"head_dim": 72}, "this head size"),
        ({"head_dim": 64, "v_head_dim": 128}, "this head size of V"),
        ({"model_type": "paligemma", "vision_config": {"a": 1}}, "images whose tokens attend to each other in both "
         "directions"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_config_tells(config: dict, subject: str) -> None:
    config = {**SHAPE, **config}
    (refusal,) = refusals_of_model(config, parse(config, "model"))
    assert refusal.rule.subject == subject and refusal.rule.is_of_model


LATENTS = {**SHAPE, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}


@pytest.mark.parametrize(("version", "is_refused"), [("0.31.0", True), ("0.32.0", False), ("1.0.0+cpu", False)])
def test_plan_and_doctor_refuse_latents_with_an_older_vllm(
    version: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the engine does."""
    (tmp_path / "config.json").write_text(json.dumps(LATENTS))
    for command in (plan, doctor):
        monkeypatch.setattr(command, "installed_vllm", lambda: version)
    words = f"latent attention (MLA) with this vLLM: {version}; 0.32.0 and later can; upgrade vLLM"
    assert plan.main([str(tmp_path), "--kv-cache-memory", "10GiB"]) == (2 if is_refused else 0)
    assert (words in capsys.readouterr().err) == is_refused
    findings = doctor.findings(doctor.parser().parse_args([str(tmp_path)]))
    next(findings)  # of Python
    assert (words in str(next(findings))) == is_refused


def test_the_docs_have_the_table() -> None:
    """`python -m packed_kv.refusals.table` prints it, without vLLM."""
    page = (REPO / "docs" / "models.md").read_text()
    begin, end = "<!-- tables of packed_kv.refusals.table -->\n", "\n<!-- end of the tables -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == markdown()
    command = [sys.executable, "-S", "-m", "packed_kv.refusals.table"]
    run = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(REPO / "overlay")}, check=True)
    assert run.stdout.strip() == markdown()
