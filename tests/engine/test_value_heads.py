"""Values of fewer channels than keys (MiMo-V2: 128 and 192), beside sliding layers with sinks and more KV heads.

vLLM's attention for such layers runs on GPUs alone, so the truth is transformers with the public codec, as in
`test_models.py`; and answers are held to those of other batches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from harness import engine, mean_kl, teacher_forced_logits
from packed_kv.calibration_file import load
from packed_kv.engine import capacity, registration
from packed_kv.engine.backend import backend_of
from packed_kv.engine.metrics import stored_and_dense
from packed_kv.formats import FORMATS
from packed_kv.layout import ring_slot_bytes
from tiny_models import true_logits
from tq_calibrate.choose import choose
from tq_calibrate.collect import ATTENTION, Collector
from tq_calibrate.model import load_model
from tq_calibrate.write import file_content, write_file
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, SinkFullAttentionSpec

HEAD_SIZE, VALUE_SIZE, CHUNK = 192, 128, 37
IDS = torch.randint(tiny_models.VOCAB, (200,), generator=torch.Generator().manual_seed(1)).tolist()
SAMPLING = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save(tiny_models.mimo_v2(), tmp_path_factory.mktemp("mimo"))


def start(model: str, name: str, **options: object) -> AbstractContextManager[LLM]:
    sizes = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_model_len": 512}
    return engine(model, name, skip_tokenizer_init=True, **{**sizes, **options})


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SAMPLING, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("name", ["tq4", "isoquant3", "turboquant25"])
def test_dtype_equals_its_codec(name: str, model: str) -> None:
    """And pages are packed, with slots for two vectors of K's size; and batches change no answer."""
    with start(model, name) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        for layer in layers:
            assert layer.get_attn_backend() is backend_of(name)
            assert (layer.head_size, layer.head_size_v) == (HEAD_SIZE, VALUE_SIZE)
            assert layer.kv_cache.dtype == torch.uint8
            assert layer.kv_cache.shape[1] in (1, 2)
            assert layer.kv_cache.shape[-1] == FORMATS[name].slot_bytes(HEAD_SIZE)
        bytes_of_token = 6 * FORMATS[name].slot_bytes(HEAD_SIZE), 6 * 2 * (HEAD_SIZE + VALUE_SIZE)  # of 6 heads in all
        config = llm.llm_engine.vllm_config
        assert capacity.bytes_per_token(config) == stored_and_dense(config, FORMATS[name]) == bytes_of_token
        prompts = [IDS[:150], IDS[20:57], IDS[90:]]
        together = answers(llm, prompts)
        assert together == [answer for prompt in prompts for answer in answers(llm, [prompt])]
        ours = teacher_forced_logits(llm, IDS, CHUNK)
    plain, expected = true_logits(model, IDS), true_logits(model, IDS, name)
    error, loss = mean_kl(expected, ours), mean_kl(plain, expected)
    print(f"{name}: KL {error:.1e} from the codec in transformers, of {loss:.4f} that the codec costs")
    assert error < loss / 100


def test_recent_window(model: str) -> None:
    """The newest tokens in 8 bits, of V's channels too, cost less than without."""
    plain = true_logits(model, IDS)
    losses = {}
    for window in (0, 32):
        with start(model, "tq3", recent_tokens=window) as llm:
            layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
            rings = [layer for layer_name, layer in layers.items() if layer_name.endswith(".recent")]
            assert len(rings) == (4 if window else 0)
            assert all(ring.kv_cache.shape[-1] == ring_slot_bytes(HEAD_SIZE) for ring in rings)
            losses[window] = mean_kl(plain, teacher_forced_logits(llm, IDS, CHUNK))
    assert losses[32] < 0.8 * losses[0], losses


def test_calibrated_channels(model: str, tmp_path: Path) -> None:
    """A file that the command's parts write, with V's own size and two numbers of KV heads, is what the engine stores
    by."""
    collector, path = Collector(), tmp_path / "calibration.json"
    collector.run(load_model(model, ATTENTION, "float32", torch.device("cpu")), [[IDS[:100]]], lambda _tokens: None)
    statistics = collector.statistics()
    choices = {layer: choose(seen, "turboquant35") for layer, seen in statistics.layers.items()}
    write_file(path, file_content(statistics, choices, "turboquant35", "MiMo"))
    file = load(path)
    assert (file.kv_heads, file.head_size, file.value_head_size) == ((1, 2), HEAD_SIZE, VALUE_SIZE)

    def channels(number: int, role: str) -> dict:
        layer = file.layers[number]
        if role == "value":
            return {"outliers": layer.value.outlier_channels, "scale": layer.value.scale}
        means = {"mean": layer.key.mean, "first_mean": layer.key.first_mean, "rope": layer.key.rope}
        return {"outliers": layer.key.outlier_channels, "scale": layer.key.scale, **means}

    with start(model, "turboquant35", additional_config={"packed_kv": {"calibration": str(path)}}) as llm:
        ours = teacher_forced_logits(llm, IDS, CHUNK)
    expected = true_logits(model, IDS, "turboquant35", channels=channels)
    error, loss = mean_kl(expected, ours), mean_kl(true_logits(model, IDS), expected)
    assert error < loss / 100
    assert loss < mean_kl(true_logits(model, IDS), true_logits(model, IDS, "turboquant35"))


def spec(kind: type[FullAttentionSpec], value_size: int, **options: int) -> FullAttentionSpec:
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": HEAD_SIZE, "head_size_v": value_size}
    return kind(**sizes, dtype=torch.uint8, **options)


def test_sizes_that_no_slot_holds(tmp_path: Path) -> None:
    """And openPangu's layers with static sinks, whose K and V have two sizes, too."""
    larger = tiny_models.save(tiny_models.mimo_v2(v_head_dim=256, swa_v_head_dim=256), tmp_path)
    match = r"tq4 cannot serve this head size of V: V of 256 channels with K of 192; .*; use --kv-cache-dtype auto"
    with pytest.raises(ValueError, match=match), start(larger, "tq4"):
        pass
    backend = backend_of("tq4")
    held = backend.customize_spec(spec(FullAttentionSpec, VALUE_SIZE))
    assert held.page_size_bytes == 16 * 2 * FORMATS["tq4"].slot_bytes(HEAD_SIZE)
    for value_size in (256, 72):
        with pytest.raises(ValueError, match=f"V of {value_size} channels with K of 192"):
            backend.customize_spec(spec(FullAttentionSpec, value_size))
    with pytest.raises(ValueError, match="cannot serve static attention sinks"):
        backend.customize_spec(spec(SinkFullAttentionSpec, VALUE_SIZE, sink_len=128))


def test_a_layer_whose_implementation_is_not_told_is_refused() -> None:
    """As on a vLLM without the patch, if a model left the choice of a backend to vLLM."""
    registration.register_formats()
    handler = registration.cache_config.get_kv_cache_dtype_handler("tq4")
    built: list[str] = []
    layer = SimpleNamespace(
        head_size_v=VALUE_SIZE, impl=SimpleNamespace(head_size_v=VALUE_SIZE, build=lambda name: built.append(name))
    )
    layer.get_attn_backend = lambda: backend_of("tq4")
    handler.check_layer("layers.0.attn", layer)
    assert built == ["layers.0.attn"]
    layer.impl.head_size_v = HEAD_SIZE
    with pytest.raises(ValueError, match=r"layers\.0\.attn .* has V of 128 channels, and its attention was built for"):
        handler.check_layer("layers.0.attn", layer)


def test_layers_of_one_size_with_a_backend_of_their_own_are_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model's choice is passed over for two sizes alone."""
    from vllm.model_executor.models import mimo_v2

    made = mimo_v2.Attention

    def make_layer(*args: object, **options: object) -> object:
        return made(*args, **{**options, "attn_backend": CPUAttentionBackend})

    monkeypatch.setattr(mimo_v2, "Attention", make_layer)
    one_size = tiny_models.mimo_v2(v_head_dim=HEAD_SIZE, swa_v_head_dim=HEAD_SIZE)
    match = r"choose their own attention backend: model.layers.0.self_attn.attn \(Attention\) has CPU_ATTN"
    with pytest.raises(ValueError, match=match), start(tiny_models.save(one_size, tmp_path), "tq4"):
        pass
