"""For which steps with prompts an engine has whole CUDA graphs, and where it has none and says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_kv.attention import metadata as metadata_module
from packed_kv.attention import mixed
from packed_kv.attention.limits import limits_of
from packed_kv.attention.metadata import PackedMetadata, PackedMetadataBuilder
from packed_kv.attention.mixed import mixed_shapes
from packed_kv.attention.passes import PassLimits, most_passes


def engine(monkeypatch: pytest.MonkeyPatch, layers: list[Any] | None = None, **changes: Any) -> Any:
    """A configuration of an engine with these layers; `changes`: of what the choice looks at."""
    found = [layer()] if layers is None else layers
    monkeypatch.setattr(mixed, "_attention_layers", lambda _config: found)
    given: dict[str, Any] = {
        "tokens": 2048, "requests": 256, "largest": 512, "lora": None, "speculative": None, "stages": 1,
        "options": {}, "is_eager": False,
    } | changes  # fmt: skip
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=given["tokens"], max_num_seqs=given["requests"]),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=given["largest"]),
        cache_config=SimpleNamespace(cache_dtype="tq4"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=given["stages"]),
        lora_config=given["lora"], speculative_config=given["speculative"],
        model_config=SimpleNamespace(attention_chunk_size=None, enforce_eager=given["is_eager"]),
        additional_config={"packed_kv": given["options"]},
    )  # fmt: skip


def layer(dtype: str = "tq4", **changes: Any) -> Any:
    limits = PassLimits(each=12, total=256, tokens=16, rows=4096)
    given = {
        "limits": limits,
        "prefill": object(),
        "shares": None,
        "decode": True,
        "head_dim": 128,
    } | changes
    decode = SimpleNamespace(pass_limits=given["limits"]) if given["decode"] else None
    codec = SimpleNamespace(key=SimpleNamespace(head_dim=given["head_dim"]))
    kernels = SimpleNamespace(decode=decode, prefill=given["prefill"], codec=codec)
    impl = SimpleNamespace(attention=SimpleNamespace(kernels=kernels), kv_sharing_target_layer_name=given["shares"])
    return SimpleNamespace(kv_cache_dtype=dtype, impl=impl)


def drafts(method: str, tokens: int) -> Any:
    return SimpleNamespace(method=method, num_speculative_tokens=tokens, parallel_drafting=False)


def test_layers_of_other_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have graphs, of as many passes and rows as all layers serve."""
    few = PassLimits(each=0, total=40, tokens=16, rows=400)
    shapes, reason = mixed_shapes(engine(monkeypatch, layers=[layer(), layer(limits=few)]))
    assert not reason and max(tokens for tokens, _ in shapes) == 384
    assert max(most_passes(tokens, requests, 1, 16) for tokens, requests in shapes) == 40


def test_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that fits has one, with passes enough, and with few more requests than it has."""
    shapes, reason = mixed_shapes(engine(monkeypatch))
    assert not reason and len(shapes) < 45
    assert {tokens for tokens, _ in shapes} == set(mixed.TOKENS)
    for tokens, requests in shapes:
        assert requests <= tokens and most_passes(tokens, requests, 1, 16) <= 256
    assert {(192, 72), (576, 72), (320, 72), (64, 64), (32, 16), (384, 256)} <= set(shapes)
    assert max(requests for tokens, requests in shapes if tokens == 1024) == 205, (
        "fewer than 256, for which passes lack"
    )


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"tokens": 300}, (256, 256)),
        ({"requests": 8}, (1024, 8)),
        ({"speculative": drafts("ngram", 40)}, (1024, 256)),
    ],
    ids=["tokens", "requests", "drafts"],
)
def test_limits(changes: dict[str, Any], most: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, _ = mixed_shapes(engine(monkeypatch, **changes))
    assert max(tokens for tokens, _ in shapes) == most[0] and max(requests for _, requests in shapes) == most[1]
    if "speculative" in changes:
        assert min(shapes)[0] == 64, "more than a decode with its drafts"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"speculative": drafts("ngram", 3)}, True),
        ({"is_eager": True}, False),
        ({"options": {"mixed_graphs": False}}, False),
        ({"lora": object()}, False),
        ({"speculative": drafts("eagle3", 3)}, False),
        ({"stages": 2}, False),
    ],
    ids=str,
)
def test_layers_prepare_for_graphs(changes: dict[str, Any], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that only graphs launch are compiled, and their memory is taken, only where an engine can have graphs."""
    assert limits_of(engine(monkeypatch, **changes)).mixed_graphs is wanted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"options": {"mixed_graphs": False}}, "packed_kv.mixed_graphs is false"),
        ({"lora": object()}, "an engine with LoRA would have them once for each number of adapters"),
        ({"speculative": drafts("eagle3", 3)}, "layers of drafts (eagle3) run outside of graphs"),
        ({"stages": 2}, "stages of a pipeline would have to agree"),
        ({"layers": [layer(), layer("auto")]}, "attention of some layers is not packed"),
        ({"tokens": 16}, "max_num_batched_tokens is 16"),
        ({"layers": [layer(), layer(limits=None)]}, "no kernel reads the prefixes of all layers in the pages"),
        ({"layers": [layer(decode=False)]}, "no kernel reads the prefixes of all layers in the pages"),
        ({"layers": [layer(), layer(decode=False)]}, "no kernel reads the prefixes of all layers in the pages"),
        ({"layers": [layer(), layer(limits=PassLimits(12, 256, 8, 4096))]}, "layers differ in their query heads"),
        ({"layers": [layer(), layer(shares="0")]}, "layers share caches"),
        ({"layers": [layer(head_dim=256)]}, "over heads of 256 channels long chunks take too many passes"),
        ({"layers": [layer(prefill=None)]}, "no FlashAttention serves the prompts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_engines_without(changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have none, and one line in the log says why."""
    lines: list[str] = []
    monkeypatch.setattr(
        metadata_module.logger, "info_once", lambda line, *values, scope: lines.append(line % values), raising=False
    )
    config = engine(monkeypatch, **changes)
    assert PackedMetadataBuilder.get_mixed_cudagraph_shapes(config, SimpleNamespace()) is None  # type: ignore[arg-type]
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize(("longest", "most", "is_mixed"), [(1, 1, False), (4, 4, False), (1, 192, True), (4, 32, True)])
def test_captures(longest: int, most: int, is_mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in which one request may have all tokens is captured for any batch."""
    one = torch.zeros(1, dtype=torch.int64)
    built = PackedMetadata(1, one, one, one, one, one, [0, 1], [1], 1, 1, 1, one)
    monkeypatch.setattr(PackedMetadataBuilder, "build", lambda *_: built)
    builder = object.__new__(PackedMetadataBuilder)
    builder.reorder_batch_threshold, builder.vllm_config = longest, engine(monkeypatch, [layer()])
    found = builder.build_for_cudagraph_capture(SimpleNamespace(max_query_len=most))  # type: ignore[arg-type]
    assert found.is_mixed_graph == is_mixed
    assert found.decode_query_len == (longest if is_mixed else 1) and found.steps.made == {}
