"""What `tq-calibrate --engine vllm` adds to each worker of vLLM: sums of the queries, keys and values of its layers.

vLLM adds the methods of such a class to its workers (`worker_extension_cls`). Only the processes of such an engine
import this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from packed_kv.calibration_file import layer_number
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.v1.attention.backend import AttentionType

from .attended import Scores
from .collect import OUTPUT_PROJECTIONS, PROBE_ROWS
from .errors import UserError
from .ropes import ropes_of
from .sums import Sums


class CalibrationWorker:
    """Methods added to a worker. Every forward pass must be one whole sequence, from position 0."""

    vllm_config: Any
    get_model: Callable[[], torch.nn.Module]
    tq_calibrate: Sums

    def tq_calibrate_start(self) -> None:
        """Start to sum what this worker's layers receive. Raises UserError for a layer without a number."""
        self.tq_calibrate = Sums(ropes_of(self.vllm_config.model_config.hf_text_config))
        model = self.get_model()
        names: dict[int, str] = {}
        for name, layer in self.vllm_config.compilation_config.static_forward_context.items():
            if not isinstance(layer, Attention) or layer.attn_type != AttentionType.DECODER:
                continue
            if layer.kv_sharing_target_layer_name is not None:  # it stores nothing: it reads another layer's cache
                continue
            number = layer_number(name)
            if number is None or number in names:
                raise UserError(f"layer {name} has no number of its own, so a calibration file cannot name it")
            names[number] = name
            layer.forward = functools.partial(_record, self.tq_calibrate, number, model, layer, layer.forward)

    def tq_calibrate_sums(self) -> tuple[int, Sums]:
        """This worker's tensor-parallel rank, and the sums of its heads, on the CPU."""
        for layer in self.tq_calibrate.layers.values():
            for name, value in vars(layer).items():
                if isinstance(value, torch.Tensor):
                    setattr(layer, name, value.cpu())
        return get_tensor_model_parallel_rank(), self.tq_calibrate


def _record(
    sums: Sums,
    number: int,
    model: torch.nn.Module,
    layer: Any,
    forward: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    """`forward` of an attention layer: query, key and value are [tokens, heads * head_dim], or have heads apart."""
    tokens = len(query)
    q, k, v = (
        x.view(tokens, heads, -1)
        for x, heads in ((query, layer.num_heads), (key, layer.num_kv_heads), (value, layer.num_kv_heads))
    )
    positions = torch.arange(tokens, device=query.device)
    columns = functools.partial(_output_columns, model, layer, number, query.dtype)
    sums.add(number, q, k, v, positions, _scores(layer.impl, layer.sliding_window), columns)
    return forward(query, key, value, *args, **options)


def _scores(backend: Any, window: int | None) -> Scores:
    """Scale, window, soft cap and sinks of a layer, from its backend, which may lack cap and sinks."""
    soft_cap, sinks = (getattr(backend, name, None) for name in ("logits_soft_cap", "sinks"))
    return Scores(backend.scale, window, soft_cap or None, sinks)


def _output_columns(model: torch.nn.Module, layer: Any, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Squared norms of this rank's columns of a layer's output projection, float64 [heads * value_dim].

    Its weight may be packed (AWQ, GPTQ, FP8, GGUF, or for a CPU's instructions), so columns are found by multiplying
    unit vectors, without the sum over ranks of a forward pass. Raises UserError.
    """
    projection = _output_projection(model, layer, number)
    unit_vectors = torch.eye(layer.num_heads * layer.head_size_v, dtype=dtype).split(PROBE_ROWS)
    device = next(model.parameters()).device
    rows = (projection.quant_method.apply(projection, part.to(device), None) for part in unit_vectors)
    return torch.cat([row.float().square().sum(-1) for row in rows]).double()


def _output_projection(model: torch.nn.Module, layer: Any, number: int) -> Any:
    """The linear layer that reads an attention layer's output."""
    for parent in model.modules():
        # vLLM's models hold their attention layers; those of its Transformers backend are found by the layer's number.
        if layer not in parent.children() and getattr(parent, "layer_idx", None) != number:
            continue
        beside = [(name, child) for name, child in parent.named_children() if isinstance(child, LinearBase)]
        for name, child in beside:
            if isinstance(child, RowParallelLinear) or name in OUTPUT_PROJECTIONS:
                return child
    raise UserError(
        f"layer {layer.layer_name} has no output projection beside it, so this model cannot be calibrated; use "
        "--kv-cache-dtype tq4, which needs no calibration"
    )
