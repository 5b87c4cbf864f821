"""Depth is not the number of caches: layers that run again or attend twice; and layers that differ, one by one."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import plan_tokens
import pytest
import vllm
from coverage_models import MODELS, SIZES
from packed_kv.commands.plan import main
from packed_kv.model.config_fields import BadInput
from packed_kv.model.shape import parse
from packed_kv.planning.weights import weights

LOOPS = {**SIZES, "model_type": "llama"}
DORY = {
    **SIZES, "model_type": "dory", "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3,
    "sliding_window": 96,
    "layer_types": ["full_attention", "sliding_attention", "mlp", "sliding_attention"],
}  # fmt: skip
CACHES = {
    "once": (LOOPS, [0, 1, 2, 3]),
    "LoopCoder": ({**LOOPS, "loop_num": 3}, list(range(12))),
    "LoopCoder by its name": ({**LOOPS, "architectures": ["IQuestLoopCoderForCausalLM"]}, list(range(8))),
    "Ouro": ({**LOOPS, "total_ut_steps": 2}, list(range(8))),
    "LongCat": (plan_tokens.MORE["LongcatFlashForCausalLM"], [0, 0, 1, 1]),
    "Dory": (DORY, [0, 1, 3, 5, 9]),
    "Dory, last loop": ({**DORY, "recurrent_kv_cache_mode": "last_loop"}, [0, 1, 3]),
}
"""Model -> numbers of the layers with caches, as vLLM's models have them in their layers' names."""


@pytest.mark.parametrize("name", CACHES)
def test_caches_of_layers_that_run_again(name: str) -> None:
    config, numbers = CACHES[name]
    assert sorted(layer.number for layer in parse(config, name).layers) == numbers


@pytest.mark.parametrize(("cycles", "caches"), [({}, 2 * 2 + 2), ({"H_cycles": 2, "L_cycles": 3}, 2 * 2 * 3 + 2 * 2)])
def test_two_stacks_in_cycles(cycles: dict[str, int], caches: int) -> None:
    """A config counts the layers of a stack, or all runs, and then says how many are a stack's."""
    legacy = {**plan_tokens.MORE["HrmTextForCausalLM"], **cycles}
    new = {**legacy, "num_layers_per_stack": 2, "num_hidden_layers": caches}
    for config in legacy, new:
        assert len(parse(config, "HRM").layers) == caches
    again = weights(parse(legacy, "HRM"), "bf16", None)
    assert again.read(1) > again.total - again.again


def test_hrm_has_the_tokens_of_an_engine() -> None:
    case = plan_tokens.Case("HrmTextForCausalLM")
    ((tokens, in_flight),) = plan_tokens.counted(case, ("auto",))
    assert plan_tokens.planned(case, "auto", in_flight) == pytest.approx(tokens, rel=0.02)


def test_the_second_run_slides() -> None:
    layers = parse({**LOOPS, "loop_num": 2, "loop_window_size": 48}, "LoopCoder").layers
    found = {layer.number: (layer.kind, layer.window) for layer in layers}
    assert (found[3], found[4]) == (("full", 0), ("sliding", 48))


def test_layers_that_run_again_have_their_weights_once_and_read_them_again() -> None:
    once, twice = (weights(parse({**LOOPS, "total_ut_steps": n}, "looped"), "bf16", None) for n in (1, 2))
    assert once.again == 0 and twice.total == once.total
    table = 256 * 256 * 2
    assert twice.read(1) - table == pytest.approx(2 * (once.read(1) - table))


def test_longcat_has_its_published_parameters() -> None:
    """560e9 (meituan-longcat/LongCat-Flash-Chat); projections of latents are counted roughly."""
    config = {
        "model_type": "longcat_flash", "num_layers": 28, "hidden_size": 6144, "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "moe_topk": 12, "num_attention_heads": 64,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    assert weights(parse(config, "LongCat"), "bf16", None).total == pytest.approx(2 * 560e9, rel=0.03)


GEMMA4 = MODELS["Gemma4ForCausalLM"] | {"num_kv_shared_layers": 0}


def test_each_field_of_a_layer_counts() -> None:
    def layer(**fields: Any) -> Any:
        config = {key: value for key, value in GEMMA4.items() if key != "global_head_dim"}
        model = parse(config | {"per_layer_config": {"02": fields}}, "Gemma 4")
        return model, model.layers[2]

    plain, _ = layer()
    for fields, said in (
        ({"head_dim": 64}, lambda model, layer: layer.head_size == 64),
        ({"num_key_value_heads": 1}, lambda model, layer: layer.kv_heads == 1),
        ({"v_head_dim": 64}, lambda model, layer: layer.value_size == 64),
        ({"sliding_window": 32}, lambda model, layer: layer.window == 32),
        ({"num_attention_heads": 8}, lambda model, layer: model.query_heads(layer) == 8),
        ({"rope_theta": 5.0}, lambda model, layer: layer == plain.layers[2]),
    ):
        model, changed = layer(**fields)
        assert said(model, changed), fields
        others = [number for number in range(4) if model.layers[number] != plain.layers[number]]
        assert set(others) <= {2}, fields
    wider, _ = layer(intermediate_size=512)
    more = weights(wider, "bf16", None).total - weights(plain, "bf16", None).total
    assert more == 3 * 256 * 256 * 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"1": {"skip": ["self_attn"]}}, "per_layer_config has skip for layer 1; how its pages change is not known"),
        ({"1": {"sliding_window": None}}, "per_layer_config has sliding_window for layer 1"),
        ({"4": {"head_dim": 64}}, "per_layer_config has 1 entries, not all for one of 4 layers, from 0 on"),
        ({"all": {"head_dim": 64}}, "not all for one of 4 layers"),
        ({"1": 64}, "1 is 64; it must be an object"),
        ([{}], "per_layer_config is a list of 1 entries; it must be an object"),
    ],
)
def test_what_is_not_known_of_a_layer_is_named(fields: Any, said: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4 | {"per_layer_config": fields}))
    assert main([str(tmp_path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_block_configs_are_not_sized() -> None:
    with pytest.raises(BadInput, match="block_configs, by which layers differ, are not read here; start the engine"):
        parse({**LOOPS, "block_configs": [{"attention": {"no_op": True}}] * 4}, "DeciLM")


KNOWN_REPEATS = {"dory", "hrm_text", "iquest_loopcoder", "longcat_flash", "ouro", "zamba2"}
"""Files of vLLM's models whose layers make attention in a loop, and which `model/shape.py` has a rule for."""
NO_CACHE = {"funasr"}
"""The same of encoders of sound."""


def attention_in_loops(source: str) -> list[str]:
    """Classes of a model that make attention in a loop within a layer: outside of what makes the list of layers."""
    found = []
    for kind in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        loops = [node for node in ast.walk(kind) if isinstance(node, ast.For | ast.ListComp | ast.DictComp)]
        calls = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)]
        names = [getattr(call.func, "id", getattr(call.func, "attr", "")) for call in calls]
        if any(name.endswith("Attention") and not name.startswith(("is_", "get_")) for name in names):
            found.append(kind.name)
    return found


def test_every_model_with_attention_in_a_loop_has_a_rule() -> None:
    models = Path(vllm.__file__).parent / "model_executor" / "models"
    found = {path.stem: names for path in models.glob("*.py") if (names := attention_in_loops(path.read_text()))}
    assert set(found) & KNOWN_REPEATS >= {"hrm_text", "iquest_loopcoder", "longcat_flash"}
    assert set(found) <= KNOWN_REPEATS | NO_CACHE, found
