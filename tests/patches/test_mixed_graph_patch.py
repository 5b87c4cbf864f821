"""The patch for whole graphs of mixed steps, on the installed vLLM: what is captured, and which graph a batch takes."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packed_kv_patches import pins, tree

backend = pytest.importorskip("vllm.v1.attention.backend")
if tree.locate(None, pins.load()).pin.version == "0.31.0":
    pytest.skip("vLLM 0.31.0 has no such patch", allow_module_level=True)

from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder  # noqa: E402
from vllm.v1.worker.gpu import attn_utils, cudagraph_utils, model_runner  # noqa: E402

SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
SHAPES = [(tokens, reqs) for tokens in (1024, 576, 192, 64, 16) for reqs in (72, 256, 16)]  # in no order
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE

Shape = tuple[int, int]
Manager = Any  # of the patched module, or of the original one


def make(
    shapes: Iterable[Shape] | None,
    mode: CUDAGraphMode = BOTH,
    query_len: int = 1,
    loras: list[int] | None = None,
    sizes: list[int] = SIZES,
    module: ModuleType = cudagraph_utils,
    max_tokens: int = 2048,
) -> Manager:
    """A manager of 256 requests whose graphs count as captured; no ``shapes`` leaves the argument out."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=max_tokens),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    given = {} if shapes is None else {"mixed_shapes": shapes}
    manager = module.ModelCudaGraphManager(config, "cpu", mode, query_len, lora_capture_cases=loras, **given)
    manager._graphs_captured = True
    return manager


def is_mixed(desc: Any) -> bool:
    return desc.cg_mode is CUDAGraphMode.FULL and desc.uniform_token_count is None


def graphs(manager: Manager) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Candidates and captured descriptors as plain tuples, in their order."""
    return tuple(
        {key: [dataclasses.astuple(desc) for desc in descs] for key, descs in table.items()}
        for table in (manager._candidates, manager._capture_descs)
    )  # type: ignore[return-value]


def without_devices(module: ModuleType, patch: pytest.MonkeyPatch) -> ModuleType:
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    patch.setattr(module, "get_pp_group", lambda: rank)
    patch.setattr(module.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    return module


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    without_devices(cudagraph_utils, monkeypatch)


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's module as it was before patching."""
    path = tmp_path / "original_cudagraph_utils.py"
    status = tree.inspect(tree.locate(None, pins.load()))
    path.write_bytes(status.originals["vllm/v1/worker/gpu/cudagraph_utils.py"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return without_devices(module, monkeypatch)


class TestManager:
    def test_candidates_are_uniform_decodes_then_mixed_then_piecewise(self) -> None:
        plain, manager = make(None), make(SHAPES)
        mixed = [desc for desc in manager._capture_descs[CUDAGraphMode.FULL] if is_mixed(desc)]
        assert len(mixed) == 12  # three of 192 tokens and more, two of 64, one of 16
        assert manager._candidates.keys() == {(tokens, 0) for tokens in range(1025)}
        for (tokens, _), descs in manager._candidates.items():
            before = plain._candidates.get((tokens, 0), [])
            fitting = sorted((d for d in mixed if d.num_tokens >= tokens), key=lambda d: (d.num_tokens, d.num_reqs))
            full = [desc for desc in before if desc.cg_mode is CUDAGraphMode.FULL]
            assert descs == full + fitting + before[len(full) :]

    @pytest.mark.parametrize(
        ("reqs", "tokens", "uniform", "expected"),
        [
            pytest.param(64, 64, 1, ("FULL", 64, 64, 1), id="64 decodes"),
            pytest.param(3, 3, 1, ("FULL", 4, 4, 1), id="3 decodes"),
            pytest.param(65, 192, None, ("FULL", 192, 72, None), id="64 decodes + 128"),
            pytest.param(65, 576, None, ("FULL", 576, 72, None), id="64 decodes + 512, more than vLLM's sizes"),
            pytest.param(9, 48, None, ("FULL", 64, 16, None), id="8 decodes + 40"),
            pytest.param(1, 64, 64, ("FULL", 64, 16, None), id="a prompt"),
            pytest.param(64, 64, None, ("FULL", 64, 64, None), id="64 prompts of one token"),
            pytest.param(200, 256, None, ("FULL", 576, 256, None), id="201 requests"),
            pytest.param(65, 1025, None, ("NONE", 1025, 65, None), id="more tokens than any graph"),
        ],
    )
    def test_batch_takes_the_smallest_graph(
        self, reqs: int, tokens: int, uniform: int | None, expected: tuple[Any, ...]
    ) -> None:
        desc = make(SHAPES).dispatch(reqs, tokens, uniform, 0, uniform)
        assert (desc.cg_mode.name, desc.num_tokens, desc.num_reqs, desc.uniform_token_count) == expected

    def test_every_small_batch(self) -> None:
        """Against the rule itself, with a graph of fewer tokens that has fewer requests, and sizes below and above."""
        shapes, sizes = [(12, 5), (12, 9), (20, 7), (24, 3), (24, 11)], [4, 8, 16, 32]
        manager = make(shapes, sizes=sizes)
        for tokens in range(1, 34):
            for reqs in range(1, tokens + 1):
                fitting = [shape for shape in shapes if shape >= (tokens, 0) and shape[1] >= reqs]
                pieces = [size for size in sizes if size >= tokens]
                desc = manager.dispatch(reqs, tokens, None, 0)
                if fitting:
                    assert is_mixed(desc) and (desc.num_tokens, desc.num_reqs) == min(fitting)
                elif pieces:
                    assert (desc.cg_mode, desc.num_tokens) == (CUDAGraphMode.PIECEWISE, pieces[0])
                else:
                    assert desc.cg_mode is CUDAGraphMode.NONE

    def test_drafts_of_one_length_take_their_own_graph(self) -> None:
        manager = make(SHAPES, query_len=4)
        desc = manager.dispatch(16, 64, 4, 0, 4)
        assert (desc.cg_mode, desc.num_tokens, desc.uniform_token_count) == (CUDAGraphMode.FULL, 64, 4)
        assert is_mixed(manager.dispatch(16, 60, None, 0, 4))

    def test_largest_graph_is_captured_first(self) -> None:
        """The first one sizes the buffer of hidden states."""
        descs = make(SHAPES)._capture_descs[CUDAGraphMode.FULL]
        tokens = [desc.num_tokens for desc in descs]
        assert tokens[0] == 1024 and tokens == sorted(tokens, reverse=True)
        assert len(set(descs)) == len(descs) == 35 + 12

    def test_shapes_are_cut_to_what_a_step_can_have(self) -> None:
        descs = make([(300, 1000), (300, 256), (8, 16), (576, 16)], max_tokens=512)._capture_descs[CUDAGraphMode.FULL]
        assert [(d.num_tokens, d.num_reqs) for d in descs if is_mixed(d)] == [(300, 256), (8, 8)]

    @pytest.mark.parametrize("mode", list(CUDAGraphMode), ids=lambda mode: mode.name)
    @pytest.mark.parametrize(("query_len", "loras"), [(1, None), (4, None), (1, [0, 1, 4])])
    def test_without_shapes_nothing_changes(
        self, original: ModuleType, mode: CUDAGraphMode, query_len: int, loras: list[int] | None
    ) -> None:
        expected = graphs(make(None, mode, query_len, loras, module=original))
        assert graphs(make(None, mode, query_len, loras)) == graphs(make([], mode, query_len, loras)) == expected

    @pytest.mark.parametrize("loras", [[0, 2], [2]])
    def test_none_with_lora(self, loras: list[int]) -> None:
        assert graphs(make(SHAPES, loras=loras)) == graphs(make(None, loras=loras))


class Always(AttentionMetadataBuilder[Any]):
    _cudagraph_support = AttentionCGSupport.ALWAYS


class Decodes(AttentionMetadataBuilder[Any]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class Named(Decodes):
    shapes: tuple[Shape, ...] = ((576, 72), (64, 16), (192, 72))

    @classmethod
    def get_mixed_cudagraph_shapes(cls, vllm_config: Any, kv_cache_spec: Any) -> list[Shape] | None:
        assert (vllm_config, kv_cache_spec) == ("config", "spec")
        return list(cls.shapes)


class Fewer(Named):
    shapes = ((192, 72), (64, 16), (1024, 72))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[Named]], [(64, 16), (192, 72), (576, 72)]),
        ([[Always, Named], [Always]], [(64, 16), (192, 72), (576, 72)]),
        ([[Named], [], [Fewer]], [(64, 16), (192, 72)]),
        ([[Named], [Decodes]], []),
        ([[Named, Decodes]], []),
        ([[Always], [Always]], []),
        ([], []),
    ],
)
def test_shapes_are_those_of_all_groups(groups: list[list[Any]], expected: list[Shape]) -> None:
    stubs: Any = [
        [SimpleNamespace(get_metadata_builder=lambda _, b=builder: b, kv_cache_spec="spec") for builder in group]
        for group in groups
    ]
    assert attn_utils.get_mixed_cudagraph_shapes(stubs, "config") == expected  # type: ignore[arg-type]


RUNNER: dict[str, Any] = {
    "dp_size": 1,
    "ubatch_runner": None,
    "pcp_manager": None,
    "adaptive_verification": None,
    "cache_config.kv_sharing_fast_prefill": False,
    "supports_mm_inputs": False,
    "cudagraph_mode": BOTH,
    "support": AttentionCGSupport.ALWAYS,
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"dp_size": 2}, False),
        ({"ubatch_runner": object()}, False),
        ({"pcp_manager": object()}, False),
        ({"adaptive_verification": object()}, False),
        ({"cache_config.kv_sharing_fast_prefill": True}, False),
        ({"supports_mm_inputs": True}, False),
        ({"support": AttentionCGSupport.UNIFORM_BATCH}, False),
        *(({"cudagraph_mode": mode}, False) for mode in CUDAGraphMode if mode is not BOTH),
    ],
)
def test_runner_asks_only_where_whole_graphs_replay(changed: dict[str, Any], expected: bool) -> None:
    """The runner's condition, taken from its source: a whole runner needs a GPU."""
    [asks] = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(model_runner)))
        if isinstance(node, ast.If) and "get_mixed_cudagraph_shapes" in ast.unparse(node.body[0])
    ]
    values = RUNNER | changed
    cache_config = SimpleNamespace(kv_sharing_fast_prefill=values.pop("cache_config.kv_sharing_fast_prefill"))
    names = {
        "self": SimpleNamespace(cache_config=cache_config, **values),
        "cudagraph_mode": values["cudagraph_mode"],
        "additional_attn_cg_support": (values["support"], None),
    }
    assert eval(ast.unparse(asks.test), vars(model_runner), names) is expected


def test_only_the_target_model_is_given_shapes() -> None:
    folder = Path(inspect.getfile(model_runner)).parent
    files = [path.name for path in sorted(folder.rglob("*.py")) if "mixed_shapes" in path.read_text()]
    assert files == ["cudagraph_utils.py", "model_runner.py"]
    [call] = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(model_runner)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ModelCudaGraphManager"
    ]
    assert "mixed_shapes=mixed_shapes" in [ast.unparse(keyword) for keyword in call.keywords]
