"""Extension of each worker of vLLM under `tq-calibrate --engine vllm`: sums of the queries, keys and values of its
layers.

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
from .latents import as_one_head
from .ropes import ropes_of
from .sums import Sums


class CalibrationWorker:
    """Methods added to a worker. Every forward pass must be one whole sequence, from position 0."""

    vllm_config: Any
    get_model: Callable[[], torch.nn.Module]
    tq_calibrate: Sums

    def tq_calibrate_start(self) -> None:
        """Start to sum what this worker's layers receive. Raises UserError for a layer without a number."""
        model_config = self.vllm_config.model_config
        has_latents = model_config.use_mla
        self.tq_calibrate = Sums(() if has_latents else ropes_of(model_config.hf_text_config))
        self.tq_calibrate.has_latents = has_latents
        model = self.get_model()
        kept, record = (_keeps_latents, _record_latents) if has_latents else (_keeps_keys, _record)
        names: dict[int, str] = {}
        for name, layer in self.vllm_config.compilation_config.static_forward_context.items():
            if not kept(layer):
                continue
            number = layer_number(name)
            if number is None or number in names:
                raise UserError(f"layer {name} has no number of its own, so a calibration file cannot name it")
            names[number] = name
            layer.forward = functools.partial(record, self.tq_calibrate, number, model, layer, layer.forward)

    def tq_calibrate_sums(self) -> tuple[int, Sums]:
        """This worker's tensor-parallel rank, and the sums of its heads since the last call, on the CPU."""
        sums = self.tq_calibrate.begin_anew()
        for layer in sums.layers.values():
            for name, value in vars(layer).items():
                if isinstance(value, torch.Tensor):
                    setattr(layer, name, value.cpu())
        return get_tensor_model_parallel_rank(), sums


def _keeps_keys(layer: object) -> bool:
    """True if a layer stores K and V."""
    if not isinstance(layer, Attention) or layer.attn_type != AttentionType.DECODER:
        return False
    return layer.kv_sharing_target_layer_name is None  # without one, it reads another layer's cache


def _keeps_latents(layer: object) -> bool:
    """True if a layer stores latent vectors."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention  # of models that have such layers

    return isinstance(layer, MLAAttention)


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


def _record_latents(
    sums: Sums,
    number: int,
    model: torch.nn.Module,
    layer: Any,
    forward: Callable[..., torch.Tensor],
    query: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    """`forward` of a layer of latent attention: query [tokens, heads, nope_dim + rope_dim], latent [tokens, rank] after
    its norm and rope_key [tokens, 1, rope_dim]."""
    up = _up_projections(layer, query.dtype)
    positions = torch.arange(len(query), device=query.device)
    one_head = as_one_head(
        query, latent.unsqueeze(1), rope_key.view(len(query), 1, -1), up[:, : layer.qk_nope_head_dim]
    )
    columns = functools.partial(_output_columns_of_latents, model, layer, number, up[:, layer.qk_nope_head_dim :])
    sums.add(number, *one_head, positions, _scores(layer.impl, getattr(layer, "sliding_window", None)), columns)
    return forward(query, latent, rope_key, *args, **options)


def _up_projections(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """W_UK and W_UV of this rank's heads, [heads, nope_dim + value_dim, rank]; found as `_output_columns` finds the
    output projection's columns."""
    rows = _products(layer.kv_b_proj, torch.eye(layer.kv_lora_rank, dtype=dtype), layer.kv_b_proj)
    return rows.unflatten(1, (layer.num_heads, -1)).permute(1, 2, 0)


def _output_columns_of_latents(model: torch.nn.Module, layer: Any, number: int, value_up: torch.Tensor) -> torch.Tensor:
    """Squared norms of the columns of this rank's W_O W_UV, summed over heads, float64 [rank]. Raises UserError.

    value_up: W_UV, [heads, value_dim, rank].
    """
    projection = _output_projection(model, layer, number)
    heads, value_dim, rank = value_up.shape
    total = torch.zeros(rank, dtype=torch.float64, device=value_up.device)
    for own, up in zip(torch.eye(heads * value_dim, dtype=value_up.dtype).split(value_dim), value_up, strict=True):
        output = _products(projection, own, model)
        total += (up.float().T @ output.float()).square().sum(-1).double()
    return total


def _products(projection: Any, rows: torch.Tensor, beside: torch.nn.Module) -> torch.Tensor:
    """Rows times a linear layer's weight, which may be packed, without the sum over ranks of a forward pass; on the
    device of the module `beside`."""
    return projection.quant_method.apply(projection, rows.to(next(beside.parameters()).device), None)


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
    rows = (_products(projection, part, model) for part in unit_vectors)
    return torch.cat([row.float().square().sum(-1) for row in rows]).double()


def _output_projection(model: torch.nn.Module, layer: Any, number: int) -> Any:
    """The linear layer that reads an attention layer's output."""
    for parent in model.modules():
        # vLLM's models hold their attention layers; its Transformers backend finds them by the layer's number.
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
