"""Engines that cannot be served are refused at start-up, by one line that says what, why and what to use instead."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch
import transformers
from harness import engine
from packed_kv.attention.impl import PackedAttentionImpl
from packed_kv.engine import metrics, registration
from packed_kv.engine.backend import backend_of
from packed_kv.formats import FORMATS
from packed_kv.kernels.served import Served
from packed_kv.model import architectures
from packed_kv.refusals import rules
from packed_kv.refusals.facts import Facts, Given
from packed_kv.refusals.table import Refused, refusals_of
from packed_kv.settings import facts
from tiny_models import SMALL
from transformers import PretrainedConfig
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import llama, registry
from vllm.platforms import Platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.selector import AttentionSelectorConfig


def small(config: type[PretrainedConfig], architecture: str, **options: object) -> PretrainedConfig:
    return config(architectures=[architecture], **{**SMALL, "num_hidden_layers": 2, **options})


def bert(architecture: str) -> PretrainedConfig:
    return small(transformers.BertConfig, architecture, hidden_size=128, num_attention_heads=2)


def deepseek_v2() -> PretrainedConfig:
    """Latents that are no whole groups, and no experts but in name."""
    options = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 520,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "first_k_dense_replace": 2,
    }
    return small(transformers.DeepseekV2Config, "DeepseekV2ForCausalLM", **options)


def whisper() -> PretrainedConfig:
    special = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "decoder_start")}
    sizes = {"d_model": 128, "max_target_positions": 448}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
    architecture = "WhisperForConditionalGeneration"
    return transformers.WhisperConfig(architectures=[architecture], vocab_size=512, **sizes, **special)


def save_whisper_processor(folder: Path) -> None:
    tokenizer = transformers.WhisperTokenizer(vocab={"<|endoftext|>": 0, "a": 1}, merges=[])
    transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)


MODELS = {
    "latent_attention": (deepseek_v2, "cannot serve latent attention (MLA) of this size: 520 "),
    "encoder_decoder": (whisper, "cannot serve encoders: encoder_decoder attention"),
    "encoder_only": (lambda: bert("BertModel"), "cannot serve encoders: encoder_only attention"),
    "alibi": (lambda: small(transformers.BloomConfig, "BloomForCausalLM", hidden_size=128), "cannot serve ALiBi: "),
    "told_no_dtype": (
        lambda: transformers.FalconConfig(
            architectures=["FalconForCausalLM"],
            vocab_size=512,
            hidden_size=128,
            num_attention_heads=2,
            num_hidden_layers=2,
        ),
        "cannot serve models that do not pass cache_config to their attention layers: FalconForCausalLM",
    ),
    "head_dim": (
        lambda: small(transformers.LlamaConfig, "LlamaForCausalLM", head_dim=72),
        "cannot serve this head size: 72 channels, and packed pages need a multiple of 16",
    ),
}
"""Case -> (configuration, words of the refusal)."""


def start(model: str, kv_cache_dtype: str = "isoquant4", **options: object) -> None:
    with engine(model, kv_cache_dtype, max_model_len=256, load_format="dummy", **options):
        pass


def refusal(*args: object, **options: object) -> str:
    """The line with which vLLM refuses to start."""
    with pytest.raises(ValueError, match="--kv-cache-dtype isoquant4") as error:
        start(*args, **options)
    line = str(error.value)
    assert "\n" not in line and len(line) < 320
    return line


@pytest.mark.parametrize("what", MODELS)
def test_model(what: str, demo_model: str, tmp_path: Path) -> None:
    make_config, words = MODELS[what]
    make_config().save_pretrained(tmp_path)
    if what == "encoder_decoder":
        save_whisper_processor(tmp_path)
        line = refusal(str(tmp_path))
    else:
        line = refusal(str(tmp_path), tokenizer=demo_model)
    assert words in line
    assert "use --kv-cache-dtype auto" in line


def test_models_that_tell_their_layers_no_dtype_are_known() -> None:
    """Decoder attention that is made without a `cache_config` keeps dense pages, whatever --kv-cache-dtype says."""
    found = set()
    for file in Path(llama.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Attention":
                given = {keyword.arg for keyword in node.keywords}  # None: **options
                if not given & {"cache_config", None}:
                    found.add(file.stem)
    assert found - {"pixtral"} == {"falcon"}  # Pixtral's are an encoder's
    classes = {name for name, (module, _) in registry._TEXT_GENERATION_MODELS.items() if module == "falcon"}
    assert classes <= set(architectures.IGNORES_KV_CACHE_DTYPE)


def test_sinks_of_another_number_of_heads() -> None:
    with pytest.raises(ValueError, match=r"cannot serve attention sinks of this shape: \[3\], and .* of 4 query heads"):
        PackedAttentionImpl(4, 64, 0.125, num_kv_heads=2, kv_cache_dtype="tq4", sinks=torch.zeros(3))


def test_images_attended_to_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's, say, whose model imports torchvision, which the CPU environment lacks."""
    monkeypatch.setattr(registration, "get_current_vllm_config", lambda: settings(None))
    registration.register_formats()
    layer = AttentionSelectorConfig(64, torch.bfloat16, "tq4", 16, use_mm_prefix=True)
    with pytest.raises(ValueError, match="--kv-cache-dtype tq4 cannot serve") as error:
        registration.cache_config.get_kv_cache_dtype_handler("tq4").attn_backend(layer)
    line = str(error.value)
    assert "cannot serve images whose tokens attend to each other in both directions" in line
    assert line.endswith("; use --language-model-only, or --kv-cache-dtype auto")


def test_block_size(demo_model: str, no_workers: None) -> None:
    assert "cannot serve this block size: 24 tokens, and" in refusal(demo_model, block_size=24)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CPU")
@pytest.mark.parametrize(
    ("option", "value"), [("decode_kernel", "triton"), ("decode_kernel", "cuda"), ("latent_rope_bits", 8)]
)
def test_options_without_an_effect(option: str, value: object, demo_model: str, no_workers: None) -> None:
    line = refusal(demo_model, additional_config={"packed_kv": {option: value}})
    assert f"cannot serve packed_kv.{option}: {value}, " in line and line.endswith(f"; leave {option} out")


def test_a_decode_kernel_that_does_not_serve_is_refused_before_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, of which nothing is asked: what is planned stands for it."""
    handler, lacks = registration.PackedDTypeHandler(), "the CUDA kernel does not support head size 256"
    handler.name = "tq4"
    monkeypatch.setattr(registration, "engine_facts", lambda _: Facts())
    monkeypatch.setattr(registration, "given_facts", lambda _: Given(decode_kernel="cuda"))
    monkeypatch.setattr(metrics, "planned_kernel", lambda _: Served("Triton", 1, lacks))
    with pytest.raises(Refused, match=f"decode_kernel: cuda, and {lacks}; leave decode_kernel out$"):
        handler.before_engine(SimpleNamespace())


@pytest.mark.parametrize("has_latents", [False, True])
def test_an_option_that_a_draft_has_a_use_for(has_latents: bool) -> None:
    config = settings(None)
    config.model_config.dtype, config.additional_config = torch.bfloat16, {"packed_kv": {"latent_rope_bits": 8}}
    config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(use_mla=has_latents))
    found = refusals_of(Facts(facts.given_facts(config)))
    assert [refusal.rule.subject for refusal in found] == ["packed_kv.latent_rope_bits"][has_latents:]


@pytest.mark.parametrize("layers", [["0"], ["2"], ["sliding_window"]], ids=str)
def test_skipped_layers_that_pad_the_packed_pages(
    layers: list[str], demo_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU; CUDA's platform aligns pages where the first layer is not skipped, and sliding layers only are."""
    model = tiny_models.save(tiny_models.gemma3(), tmp_path)
    monkeypatch.setattr(DefaultModelLoader, "load_weights", lambda *_args: pytest.fail("the weights are loaded before"))
    line = refusal(model, tokenizer=demo_model, kv_cache_dtype_skip_layers=layers)
    assert f"cannot serve these skipped layers: --kv-cache-dtype-skip-layers {layers[0]}, with which" in line
    assert "leave out --kv-cache-dtype-skip-layers" in line


def test_skipped_layers_of_chunked_attention(demo_model: str, tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.llama4(), tmp_path)
    match = "cannot serve skipped layers of chunked attention: a layer with auto pages"
    options = {"tokenizer": demo_model, "kv_cache_dtype_skip_layers": ["0"]}
    with pytest.raises(ValueError, match=match), engine(model, "tq4", **options):
        pass


@pytest.mark.parametrize("layers", [("0", "1"), ("1",)], ids=["all_layers", "a_layer"])
def test_layers_with_a_backend_of_their_own(
    layers: tuple[str, ...], demo_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such layers (Step5's, say) never ask which backend to use, and nothing is asked where all are such."""

    def make_layer(*args: object, prefix: str, **options: object) -> Attention:
        own = prefix.split(".")[2] in layers
        return Attention(*args, prefix=prefix, **options, attn_backend=CPUAttentionBackend if own else None)

    small(transformers.LlamaConfig, "LlamaForCausalLM").save_pretrained(tmp_path)
    monkeypatch.setattr(llama, "Attention", make_layer)
    line = refusal(str(tmp_path), tokenizer=demo_model)
    own = f"model.layers.{layers[0]}.self_attn.attn (Attention) has {CPUAttentionBackend.get_name()}, which cannot read"
    assert f"cannot serve models that choose their own attention backend: {own}" in line
    assert "use --kv-cache-dtype auto" in line


UNSAFE = {
    "LMCacheConnectorV1": {"kv_connector": "LMCacheConnectorV1"},
    "LMCacheMPConnector": {"kv_connector": "LMCacheMPConnector"},
    "NixlConnector with enforce_handshake_compat false": {
        "kv_connector": "NixlConnector",
        "kv_connector_extra_config": {"enforce_handshake_compat": False},
    },
    "ExampleConnector": {"kv_connector": "ExampleConnector"},
    "MooncakeConnector": {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": name, "kv_role": "kv_both"} for name in ("NixlConnector", "MooncakeConnector")
            ]
        },
    },
    "some.module.NixlConnector": {"kv_connector": "NixlConnector", "kv_connector_module_path": "some.module"},
}
"""Refused case -> its configuration."""


@pytest.mark.parametrize("what", UNSAFE)
def test_kv_connectors_that_do_not_name_the_page_format(what: str) -> None:
    (refusal,) = refusals_of(facts.engine_facts(settings(KVTransferConfig(**UNSAFE[what], kv_role="kv_both"))))
    assert refusal.rule.subject == "this KV connector" and refusal.read.startswith(what)


@pytest.mark.parametrize("what", rules.CONNECTORS)
def test_kv_connectors_that_do(what: str) -> None:
    assert what in KVConnectorFactory._registry
    assert not refusals_of(facts.engine_facts(settings(KVTransferConfig(kv_connector=what, kv_role="kv_both"))))
    assert not refusals_of(facts.engine_facts(settings(None)))


def settings(connector: KVTransferConfig | None) -> SimpleNamespace:
    return SimpleNamespace(
        kv_transfer_config=connector,
        speculative_config=None,
        lora_config=None,
        cache_config=SimpleNamespace(
            kv_sharing_fast_prefill=False,
            kv_cache_dtype_skip_layers=[],
            cache_dtype="tq4",
            user_specified_block_size=False,
        ),
        parallel_config=ParallelConfig(),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(
            architecture="LlamaForCausalLM",
            use_mla=False,
            is_hybrid=False,
            attention_chunk_size=None,
            enforce_eager=True,
            runner_type="generate",
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(),
            get_total_num_hidden_layers=lambda: 2,
        ),
    )


def test_micro_batches() -> None:
    config = settings(None)
    config.parallel_config = ParallelConfig(enable_dbo=True)
    (refusal,) = refusals_of(facts.engine_facts(config))
    assert refusal.rule.subject == "--enable-dbo and --ubatch-size"


def test_kv_connector(demo_model: str) -> None:
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    said = "cannot serve this KV connector: ExampleConnector, whose keys do not name"
    assert said in refusal(demo_model, kv_transfer_config=connector)


def test_extract_hidden_states(demo_model: str) -> None:
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
    }
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    line = refusal(demo_model, speculative_config=speculation, kv_transfer_config=connector)
    assert "cannot serve this speculative method: extract_hidden_states, which" in line


def test_kv_sharing_fast_prefill(demo_model: str) -> None:
    assert "cannot serve --kv-sharing-fast-prefill: the host" in refusal(demo_model, kv_sharing_fast_prefill=True)


def test_drafts_that_share_the_models_cache(demo_model: str) -> None:
    """Such layers are told of it after they are made (Gemma 4's drafts): in the profiling run."""
    with engine(demo_model, "tq4") as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        name, layer = next(iter(layers.items()))
        draft = SimpleNamespace(layer_name="draft.layers.0.attn", kv_sharing_target_layer_name=name)
        x = torch.zeros(1, 4, 128)
        with pytest.raises(ValueError, match=f"draft.layers.0.attn reads that of {name}"):
            layer.impl.forward(draft, x, x, x, None, None, x)


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_compute_capability(capability: tuple[int, int], served: bool) -> None:
    assert backend_of("tq4").supports_compute_capability(DeviceCapability(*capability)) == served


def test_platform(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Abacus(Platform):
        device_name = "abacus"

        def is_cpu(self) -> bool:
            return False

        def is_cuda(self) -> bool:
            return False

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> None:
            return None

    monkeypatch.setattr(facts, "current_platform", Abacus())
    assert "cannot serve this platform: abacus, and packed pages need CUDA or a CPU" in refusal(demo_model)


def test_wrong_name_lists_ours(demo_model: str) -> None:
    """vLLM's own error."""
    with pytest.raises(ValueError, match="Invalid kv_cache_dtype: 'isoquant5'") as error:
        start(demo_model, "isoquant5")
    assert all(f"'{name}'" in str(error.value) for name in FORMATS)


class TestUnpatched:
    """A vLLM without the patches: the command to run, and nothing registered."""

    @pytest.fixture(autouse=True)
    def unpatched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(registration.cache_config, "prepare_kv_cache_dtype")
        monkeypatch.setattr(registration, "register_format", lambda _fmt: pytest.fail("registered"))
        monkeypatch.setattr(registration.cache_config, "KV_CACHE_DTYPES", ["auto"])

    def test_log(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lines: list[str] = []
        monkeypatch.setattr(registration.logger, "error", lines.append)
        registration.register_formats()
        (line,) = lines
        assert line.endswith("run: packed-kv-patch apply")
        assert all(name in line for name in FORMATS)

    def test_a_version_without_patches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lines: list[str] = []
        monkeypatch.setattr(registration.logger, "error", lines.append)
        monkeypatch.setattr(registration.vllm, "__version__", "0.30.0+cpu")
        registration.register_formats()
        (line,) = lines
        assert "this vLLM (0.30.0+cpu) is not patched" in line
        assert "install one of: vllm==0.33.0, " in line and line.endswith("(nearest: vllm==0.31.0)")

    def test_patches_that_are_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line, as with them, and no second error."""
        lines: list[str] = []
        monkeypatch.setattr(registration.logger, "error", lines.append)
        monkeypatch.setitem(sys.modules, "packed_kv_patches.pins", None)
        registration.register_formats()
        (line,) = lines
        assert "is not patched" in line and "reinstall packed-kv, whose patches are missing here" in line

    @pytest.mark.parametrize("arguments", [["--kv-cache-dtype", "tq4"], ["--kv-cache-dtype=tq4"]], ids=str)
    def test_command_line(self, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model", *arguments])
        with pytest.raises(SystemExit, match="run: packed-kv-patch apply"):
            registration.register_formats()
