"""Streams text through a model of transformers and gathers the statistics of its queries, keys and values.

transformers calls one function for the attention of every layer, in every architecture. Its K (after norm and RoPE) and
V are what a KV cache holds. Our function adds them to `Sums` and calls the usual attention.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .attended import Scores
from .errors import UserError, first_line
from .latents import Latents, output_weight_of_latents, rank_of
from .ropes import ropes_of
from .statistics import Statistics
from .sums import Sums

ATTENTION = "packed_kv_calibrate"
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "Wo", "proj")
PROBE_ROWS = 512


class Collector:
    """Statistics of the layers of a model that was loaded with the attention `ATTENTION`.

    Only one may be in use at a time: transformers has one table of attention functions.
    """

    def __init__(self) -> None:
        self.sums = Sums()
        self.latents: Latents | None = None
        AttentionInterface.register(ATTENTION, self.attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)

    def run(
        self, model: PreTrainedModel, batches: Iterable[list[list[int]]], progress: Callable[[int], object]
    ) -> None:
        """Run batches of whole sequences of equal length; `progress` is told the tokens of each. Raises UserError.

        May be called again for the same model.
        """
        if rank_of(model.config.get_text_config()):
            self.latents, self.sums.has_latents = self.latents or Latents(model), True
        else:
            self.sums.ropes = ropes_of(model.config.get_text_config())
        try:
            for batch in batches:
                ids = torch.tensor(batch, device=model.device)
                with torch.inference_mode():
                    model.base_model(input_ids=ids, use_cache=False)
                progress(ids.numel())
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory on {model.device} with {len(batch)} sequences of {len(batch[0])} tokens; "
                "lower --batch-size, or use --device cpu or --weights-only"
            ) from error
        except (RuntimeError, ImportError, ValueError) as error:  # kernels of quantized layers, as a rule
            raise UserError(
                f"the model does not run on {model.device} in {model.dtype} ({first_line(error)}); "
                "try another --device or --dtype"
            ) from error

    def statistics(self) -> Statistics:
        """The means so far. Raises UserError if there are none that a file can hold."""
        if not self.sums.layers:
            raise UserError(
                "no layer of this model called transformers' attention interface, so its K and V cannot be observed; "
                "update transformers, or use --weights-only"
            )
        return self.sums.statistics()

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """transformers' attention function: query [batch, heads, tokens, head_dim], key and value with KV heads."""
        layer = getattr(module, "layer_idx", None)
        # A layer that reads another one's cache stores nothing; encoders of images have no layer_idx.
        if layer is not None and not getattr(module, "is_kv_shared_layer", False):
            batch, heads, tokens, _ = query.shape
            positions = torch.arange(tokens, device=query.device).repeat(batch)
            if self.latents is None:
                q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
                columns = functools.partial(output_weight, module, heads * value.shape[-1])
            else:
                q, k, v = self.latents.as_one_head(module, query, key)
                columns = functools.partial(output_weight_of_latents, module)
            self.sums.add(layer, q, k, v, positions, _scores(query, options), columns)
        if options.get("softcap") is None and options.get("s_aux") is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        eager = sys.modules[type(module).__module__].eager_attention_forward  # PyTorch's sdpa has no caps and no sinks
        return eager(module, query, key, value, _additive(attention_mask, query), **options)


def _scores(query: torch.Tensor, options: dict[str, Any]) -> Scores:
    """Scale, window, soft cap and sinks of the layer, from the arguments of transformers' attention function."""
    scale = options.get("scaling")
    return Scores(
        query.shape[-1] ** -0.5 if scale is None else scale,
        options.get("sliding_window"),
        options.get("softcap"),
        options.get("s_aux"),
    )


def output_weight(module: torch.nn.Module, channels: int) -> torch.Tensor:
    """Squared norms of the columns of a layer's output projection, float64 [channels]. Raises UserError if it has none.

    Columns of packed weights (AWQ, GPTQ, FP8) are found by multiplying unit vectors.
    """
    device = next(module.parameters()).device
    projection = next((child for name, child in module.named_children() if name in OUTPUT_PROJECTIONS), None)
    if projection is None:
        raise UserError(
            f"{type(module).__name__} has no output projection of a known name ({', '.join(OUTPUT_PROJECTIONS)}), so "
            "this model cannot be calibrated; use --kv-cache-dtype tq4, which needs no calibration"
        )
    if isinstance(projection, torch.nn.Linear):
        weight = projection.weight
        if weight.dtype.itemsize > 1 and weight.shape[-1] == channels:
            return weight.float().square().sum(0).double()
    dtypes = [p.dtype for p in module.parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
    zero, *unit_vectors = (
        rows.to(device, dtypes[0] if dtypes else torch.float32)
        for rows in (torch.zeros(1, channels), *torch.eye(channels).split(PROBE_ROWS))
    )
    offset = projection(zero).float()
    return torch.cat([(projection(rows).float() - offset).square().sum(-1) for rows in unit_vectors]).double()


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """sdpa's mask (None: causal; bool: what to attend to) as eager attention wants it, added to the scores."""
    tokens = query.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
