"""Transformers models with sparse attention over latents (DeepSeek V3.2), with access to the indexer's scores.

`install` puts a caller's reader into every layer: it gets queries, keys, values and the scores of the layer's indexer,
which take gradients, and returns the attention's output. `scripts/train_sparse_demo.py` trains with it, and
`quality/sparse_quality.py` measures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

ATTENTION = "reader"
"""The `attn_implementation` of models that `install` takes."""
Reader = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, Any, float], torch.Tensor]
"""Layer, query and key [batch, heads, tokens, channels], value, what the scorer returned, scale -> output [batch,
heads, tokens, channels]."""
Rounding = Callable[[torch.Tensor], torch.Tensor]


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


def index_scores(
    indexer: Any, hidden: torch.Tensor, query_latent: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor],
    rounding: Rounding = exact,
) -> torch.Tensor:  # fmt: skip
    """Scores of all pairs of tokens, [batch, tokens, tokens], later tokens included.

    Args:
        indexer: `DeepseekV32Indexer` of transformers.
        hidden, query_latent: [batch, tokens, channels] of the layer; no gradient passes to them.
        positions: cosine and sine of RoPE.
        rounding: of index queries and keys, over their last dimension.
    """
    batch, tokens, _ = hidden.shape
    hidden, heads, channels = hidden.detach(), indexer.n_heads, indexer.head_dim
    query = indexer.wq_b(query_latent.detach()).view(batch, tokens, heads, channels)
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    parts = [x.split([indexer.qk_rope_head_dim, channels - indexer.qk_rope_head_dim], dim=-1) for x in (query, key)]
    turned = apply_rotary_pos_emb(parts[0][0], parts[1][0], *positions, unsqueeze_dim=2)
    query, key = (rounding(torch.cat((rope, rest), dim=-1)) for rope, (_, rest) in zip(turned, parts, strict=True))
    products = query.view(batch, tokens * heads, channels) @ key.view(batch, tokens, channels).transpose(1, 2)
    weights = indexer.weights_proj(hidden) * (heads * channels) ** -0.5
    return (weights.unsqueeze(2) @ products.relu().view(batch, tokens, heads, tokens)).squeeze(2)


def causal(tokens: int, device: torch.device | str) -> torch.Tensor:
    """True where a token may read another, bool [tokens, tokens]."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


def best_picks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """True at the `count` best of a token's own and earlier tokens, or at all if there are fewer.

    scores: [batch, tokens, tokens] -> bool of the same shape.
    """
    seen = causal(scores.shape[1], scores.device)
    best = scores.detach().masked_fill(~seen, float("-inf")).topk(min(count, scores.shape[2]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True) & seen


def install(model: Any, reader: Reader, scorer: Callable[..., Any] = index_scores) -> None:
    """Have all layers of a model, made with `attn_implementation=ATTENTION`, read by `reader`.

    scorer: takes the indexer, hidden states, query latents and RoPE's cosine and sine.
    """

    def forward(indexer: Any, hidden: torch.Tensor, latent: torch.Tensor, positions: Any, *_: Any, **__: Any) -> Any:
        return scorer(indexer, hidden, latent, positions)

    for layer in model.model.layers:
        layer.self_attn.reader = reader
        layer.self_attn.indexer.forward = functools.partial(forward, layer.self_attn.indexer)


def _read(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: object, scaling: float,
    indices: Any = None, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    return module.reader(module, query, key, value, indices, scaling).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _read)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *_args, **_options: torch.empty(1, 1, 0, 0))
