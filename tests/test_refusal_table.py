"""The table of refusals: each row applies to something, unknown facts refuse nothing, and all who refuse agree."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkout import REPO
from coverage_models import MODELS
from packed_kv.architectures import IGNORES_KV_CACHE_DTYPE
from packed_kv.commands import doctor, plan
from packed_kv.facts import Facts
from packed_kv.model_shape import parse
from packed_kv.refusals import (
    CONNECTORS,
    RULES,
    WINDOW_RULES,
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
    (Facts(platform="rocm"), "this platform: rocm, and"),
    (Facts(capability=(7, 5)), "this GPU: compute capability 7.5, and"),
    (
        Facts(architecture="RWForCausalLM"),
        "models that do not pass cache_config to their attention layers: RWForCausalLM, whose",
    ),
    (
        Facts(is_mla=True, architecture="HYV4ForCausalLM"),
        "latent attention (MLA) with attention sinks: HYV4ForCausalLM, whose sinks vLLM would leave out; use",
    ),
    (Facts(has_latent_sinks=True), "latent attention (MLA) with attention sinks: the model, whose"),
    (Facts(is_sparse=True), "sparse attention: the model, whose"),
    (
        Facts(is_sparse=True, architecture=V32, latent_rank=256, rope_size=64),
        "sparse attention over latents of this size: 256 channels and 64 of RoPE, and kernels need 512 and 64; use",
    ),
    (
        Facts(is_sparse=True, architecture=V32, version_without_rows="0.32.0"),
        "sparse attention with this vLLM: 0.32.0, whose layers write their cache themselves; ",
    ),
    (
        Facts(is_sparse=True, architecture=V32, platform="cuda", capability=(8, 9)),
        "sparse attention on this GPU: compute capability 8.9, and vLLM's FlashMLA needs 9.0 or 10.x; use",
    ),
    (
        Facts(is_sparse=True, architecture=V32, pcp=2),
        "sparse attention with --prefill-context-parallel-size: 2 ranks, ",
    ),
    (
        Facts(is_sparse=True, architecture=V32, has_host_cache=True),
        "sparse attention with a cache on the host: hisparse_config, whose rows",
    ),
    (
        Facts(is_sparse=True, architecture=V32, connector="NixlConnector"),
        "sparse attention with a KV connector: NixlConnector, which was not tried",
    ),
    (
        Facts(is_sparse=True, architecture=V32, dcp=2),
        "--decode-context-parallel-size with sparse attention: 2 ranks, and picks are of all ranks' tokens; use",
    ),
    (
        Facts(layer="layers.0", latent_layer="MLA"),
        "latent attention (MLA) in layers of their own kind: layers.0 is a MLA, which writes",
    ),
    (
        Facts(is_mla=True, architecture="Dots3NoteForCausalLM"),
        "latent attention (MLA) in layers of their own kind: Dots3NoteForCausalLM, whose layers write their cache",
    ),
    (
        Facts(is_mla=True, has_states=True, states_fit=False),
        "latent attention (MLA) with state layers: the model, and vLLM has patches of an older packed-kv",
    ),
    (Facts(latent_rank=500, rope_size=64), "latent attention (MLA) of this size: 500 channels and 64 of RoPE, and"),
    (
        Facts(latent_size=576, built_latent_size=512),
        "latent attention (MLA) of this size: 576 channels with RoPE's",
    ),
    (Facts(is_mla=True, version_without_latents="0.31.0"), "latent attention (MLA) with this vLLM: 0.31.0; 0.32.0 and"),
    (Facts(is_mla=True, sliding_window=64), "latent attention (MLA) with a sliding window: 64 tokens; use"),
    (Facts(is_mla=True, skip_layers=("0", "2")), "latent attention (MLA) with skipped layers: 0 2, whose"),
    (Facts(is_mla=True, has_lora=True), "latent attention (MLA) with LoRA: adapters of kv_b_proj would"),
    (
        Facts(dcp=2, is_mla=True, has_own_queries=True),
        "--decode-context-parallel-size with --dcp-q-replicate: 2 ranks, and its weights",
    ),
    (Facts(attention="encoder_only"), "encoders: encoder_only attention, and"),
    (Facts(is_causal=False), "prompts that are read in both directions: the model, and packed attention"),
    (Facts(architecture="BloomForCausalLM", has_alibi=True), "ALiBi: BloomForCausalLM, whose scores"),
    (
        Facts(layer="layers.0", own_backend="FLASH_ATTN"),
        "models that choose their own attention backend: layers.0 has",
    ),
    (Facts(architecture="Step5ForCausalLM"), "models that choose their own attention backend: Step5ForCausalLM, whose"),
    (Facts(has_static_sinks=True), "static attention sinks: the model, which prepends"),
    (Facts(cache_kind="RSWASpec"), "this kind of KV cache: a RSWASpec, whose tokens"),
    (
        Facts(layer="draft.0", cache_of="layers.3"),
        "draft layers that read the model's KV cache: draft.0 reads that",
    ),
    (Facts(head_size=72), "this head size: 72 channels, and packed pages need a multiple of 16"),
    (Facts(head_size=0), "this head size: 0 channels, and"),
    (Facts(head_size=128, value_size=192), "this head size of V: V of 192 channels with K of 128; V may"),
    (Facts(head_size=128, value_size=72), "this head size of V: V of 72 channels with K of 128; V may"),
    (
        Facts(layer="layers.0", head_size=128, value_size=64, built_value_size=128),
        "this head size of V: layers.0 has",
    ),
    (
        Facts(sinks=(3,), query_heads=4),
        "attention sinks of this shape: [3], and packed pages need one number for",
    ),
    (Facts(layer_options=("fancy", "new")), "these options of an attention layer: fancy, new, which"),
    (Facts(has_image_prefix=True), "images whose tokens attend to each other in both directions: the model, and"),
    (Facts(block_size=24), "this block size: 24 tokens, and packed pages need a multiple of 16"),
    (Facts(has_output_scale=True), "fused output quantization: packed attention"),
    (
        Facts(connectors=(Connector("NixlConnector"), Connector("Odd"))),
        "this KV connector: Odd, whose keys do",
    ),
    (
        Facts(connectors=(Connector("NixlConnector", {"enforce_handshake_compat": False}),)),
        "this KV connector: Nixl",
    ),
    (Facts(speculative_method="extract_hidden_states"), "this speculative method: extract_hidden_states, which"),
    (
        Facts(packs_draft=True, speculative_method="dspark"),
        "drafts that write their KV cache themselves: dspark, whose",
    ),
    (Facts(has_fast_prefill=True), "--kv-sharing-fast-prefill: the host"),
    (Facts(has_micro_batches=True), "--enable-dbo and --ubatch-size: two batches"),
    (Facts(dcp=2, platform="cpu"), "--decode-context-parallel-size with vLLM's CPU platform: 2 ranks, and it cannot"),
    (Facts(dcp=2, dcp_backend="a2a"), "--decode-context-parallel-size with --dcp-comm-backend a2a: 2 ranks, and ag_rs"),
    (Facts(dcp=2, speculative_method="ngram"), "--decode-context-parallel-size with drafts: 2 ranks, and"),
    (Facts(dcp=2, connector="NixlConnector"), "--decode-context-parallel-size with a KV connector: 2 ranks; use"),
    (Facts(dcp=2, has_states=True), "--decode-context-parallel-size with state layers: 2 ranks, and each"),
    (Facts(dcp=2, has_chunks=True), "--decode-context-parallel-size with chunked attention: 2 ranks, and its layers"),
    (Facts(dcp=2, sliding_window=128), "--decode-context-parallel-size with a sliding window: 2 ranks; use"),
    (Facts(dcp=2, sinks=(4,), query_heads=4), "--decode-context-parallel-size with attention sinks: 2 ranks; use"),
    (Facts(dcp=2, shares_cache=True), "--decode-context-parallel-size with another layer's KV cache: 2 ranks; use"),
    (
        Facts(dcp=3, has_mean_blocks=True),
        "--decode-context-parallel-size with means of keys by position: 3 ranks in runs of 1, which",
    ),
    (
        Facts(dcp=8, dcp_run=128, has_mean_blocks=True),
        "--decode-context-parallel-size with means of keys by position: 8 ranks in runs of 128, which",
    ),
    (Facts(skip_layers=("0", "0,1")), "this word of --kv-cache-dtype-skip-layers: '0,1', which is neither"),
    (Facts(skip_layers=("sliding_window",), slides=False), "this word of --kv-cache-dtype-skip-layers: 'sliding"),
    (
        Facts(skip_layers=("7",), layer_numbers=frozenset({0, 4})),
        "this word of --kv-cache-dtype-skip-layers: '7', and layers with a KV cache have numbers from 0 to 4",
    ),
    (
        Facts(layer="layers.4 (auto)", cache_of="layers.0", unlike_its_cache="tq4"),
        "skipped layers that share a KV cache: layers.4 (auto) reads the cache of layers.0, which is tq4; name",
    ),
    (Facts(skipped_dtype="auto"), "skipped layers of chunked attention: a layer with auto pages, which"),
    (
        Facts(skip_layers=("0", "2"), page=(4000, 1000)),
        "these skipped layers: --kv-cache-dtype-skip-layers 0 2, ",
    ),
    (Facts(backend_reasons=("R-SWA not supported",)), "this configuration: R-SWA not supported; use"),
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
    platform="cuda", capability=(8, 0), architecture="LlamaForCausalLM", is_mla=False, is_sparse=False,
    has_latent_sinks=False, attention="decoder", has_alibi=False, has_static_sinks=False, has_image_prefix=False,
    layer="layers.0", sinks=(32,), query_heads=32, head_size=192, value_size=128, built_value_size=128,
    layer_options=(), backend_reasons=(), block_size=16, connectors=tuple(map(Connector, CONNECTORS)),
    connector="NixlConnector", speculative_method="ngram", has_fast_prefill=False, has_micro_batches=False,
    has_output_scale=False, skip_layers=("0", "sliding_window"), layer_numbers=frozenset({0, 1}), slides=True,
    skipped_dtype="tq4", page=(1500, 1000), shares_cache=True, dcp=1, dcp_backend="ag_rs", dcp_run=1,
    has_own_queries=True, has_mean_blocks=True, has_several_kinds=True, has_states=True, has_chunks=True,
    sliding_window=128, pipeline=2, has_other_dtypes=True, has_draft_cache=True, has_one_cache_manager=True,
    version_without_rows="0.32.0", pcp=2, has_host_cache=True,
    version_without_latents="0.31.0", has_lora=True, groups_stay=True, is_draft=True, packs_draft=True, is_causal=True,
    auto_cache="fp8", states_fit=False, latent_rank=512, rope_size=64, latent_size=576, built_latent_size=576,
)  # fmt: skip


def test_what_is_unknown_or_served_is_not_refused() -> None:
    assert not refusals_of(Facts()) and not no_window(Facts())
    assert not refusals_of(SERVED)
    assert {field.name for field in fields(Facts) if getattr(SERVED, field.name) is None} == {
        "own_backend",
        "cache_kind",
        "cache_of",
        "unlike_its_cache",
        "latent_layer",
    }


NO_WINDOW = [
    (Facts(is_sparse=True), "sparse attention (its layers read picked tokens"),
    (Facts(is_mla=True, has_draft_cache=True, speculative_method="eagle"), "latent attention (MLA) with other pages"),
    (Facts(dcp=2), "decode context parallelism (it distributes"),
    (Facts(has_one_cache_manager=True), "--disable-hybrid-kv-cache-manager (some KV"),
    (
        Facts(connectors=(Connector("NixlConnector"), Connector("NixlPushConnector"))),
        "this KV connector (NixlPushConnector)",
    ),
    (
        Facts(connector="OffloadingConnector", groups_stay=False),
        "a KV connector (OffloadingConnector, and vLLM has patches of an older packed-kv; run",
    ),
    (
        Facts(pipeline=2, has_draft_cache=True),
        "pipeline parallelism (its stages would lay out their pages",
    ),
]


def test_what_has_no_recent_window() -> None:
    for facts, words in NO_WINDOW:
        assert no_window(facts).startswith(words)
    assert len(NO_WINDOW) == len(WINDOW_RULES)
    assert not no_window(Facts(is_mla=False, connector="OffloadingConnector", pipeline=2, dcp=1, platform="cpu"))
    connectors = (Connector("NixlConnector"), Connector("OffloadingConnector"))
    assert not no_window(Facts(connector="MultiConnector", connectors=connectors, groups_stay=True, platform="cpu"))
    assert not no_window(Facts(pipeline=2, has_chunks=True))
    assert not no_window(Facts(pipeline=2, has_other_dtypes=True, has_several_kinds=False, platform="cuda"))
    assert no_window(Facts(pipeline=2, has_other_dtypes=True, has_several_kinds=True, platform="cuda"))
    assert not no_window(Facts(is_mla=True, has_draft_cache=True, speculative_method="mtp"))
    beside: dict[str, Any] = {"has_other_dtypes": True, "has_states": True, "has_draft_cache": True, "platform": "cuda"}
    assert not no_window(Facts(connectors=connectors, **beside))
    assert not no_window(Facts(has_other_dtypes=True, has_states=True, platform="cuda"))


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
        ({"kv_lora_rank": 512, "model_type": "deepseek_v3"}, "latent attention (MLA) of this size"),
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
    """`python -m packed_kv.refusals` prints it, without vLLM."""
    page = (REPO / "docs" / "models.md").read_text()
    begin, end = "<!-- tables of packed_kv.refusals -->\n", "\n<!-- end of the tables -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == markdown()
    command = [sys.executable, "-S", "-m", "packed_kv.refusals"]
    run = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(REPO / "overlay")}, check=True)
    assert run.stdout.strip() == markdown()
