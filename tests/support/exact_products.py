"""Products in float64, rounded once, so that a row does not depend on how many rows it is multiplied with.

For an engine in this process: `dispatch` and `Float64Codec` in the place of vLLM's and ours (`install`). For a server:
a plugin of vLLM (`write_plugin`), which does it in each of its processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Replace vLLM's `dispatch_cpu_unquantized_gemm`."""
    weight = layer.weight.detach().double()
    layer.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(
        x.double(), weight, None if bias is None else bias.double()
    ).to(x.dtype)


def install(monkeypatch: pytest.MonkeyPatch, **transforms: object) -> None:
    """Install them for engines that this process starts from now on; their codecs have these means, scales and RoPE
    (`page_codec`), in place of the calibrated ones."""
    from fake_codecs import Float64Codec
    from packed_kv.attention import impl
    from page_codecs import page_codec
    from vllm.model_executor.layers import utils

    def transformed(fmt, head_dim, _key, _value, device, value_dim, positions):
        sizes = {"device": device, "value_dim": value_dim, "positions": positions}
        return page_codec(fmt, head_dim, kind=Float64Codec, **sizes, **transforms)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", dispatch)
    monkeypatch.setattr(impl, "PagedCodec", transformed if transforms else Float64Codec)


def register() -> None:
    """Install them for good: entry point of the plugin."""
    install(pytest.MonkeyPatch())


def write_plugin(folder: Path) -> str:
    """Make `folder` a place where vLLM finds the plugin; returns the PYTHONPATH that leads there."""
    metadata = folder / "exact_products-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: exact-products\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nexact_products = exact_products:register\n")
    return f"{folder}:{Path(__file__).parent}"
