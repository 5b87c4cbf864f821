"""Sparse attention over latents in PyTorch: each query token reads the tokens that were picked for it.

A pick is a position in the query's request, or negative: none. A prompt's picks are of two kinds: tokens before the
chunk, read from latent rows, and tokens of the chunk, read as the model has them. V's gain in `W_UV` is meant for codes
alone, so each kind has its own attention, and `merge` combines both by their lse. Where heads have sinks,
`share_with_sinks` follows.
"""

from __future__ import annotations

import torch

from ..codecs.latent_rows import LatentRowCodec


def gather_tokens(
    codec: LatentRowCodec,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Latents as stored and RoPE channels of tokens, fp32 [tokens, rank + rope_dim]; 0 where a position is negative.

    Args:
        cache: uint8 [blocks, block_size, slot_bytes].
        block_table: int [requests, blocks].
        requests, positions: int [tokens], row of the block table and position in the request.
    """
    there, block_size = positions >= 0, cache.shape[1]
    known = positions[there].long()
    slots = block_table[requests[there].long(), known // block_size].long() * block_size + known % block_size
    rows = torch.zeros(len(positions), codec.rank + codec.rope_dim, device=cache.device)
    rows[there] = torch.cat(codec.read_slots(cache, slots), dim=-1)
    return rows


def count_picks(requests: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, picks: int) -> torch.Tensor:
    """Return for each query token an index from which on it has no picks, int32 [tokens]: as many as there are tokens
    up to itself, at most `picks`; 0 for padding.

    Args:
        requests: int [tokens], request of each query token; of padding any.
        query_start: int [requests + 1], first query token of each request, and their number.
        seq_lens: int [requests], tokens of requests, the batch's included.
    """
    tokens, of_token = torch.arange(len(requests), device=requests.device), requests.long()
    end = query_start[of_token + 1]
    seen = seq_lens[of_token] - end + tokens + 1
    return torch.where(tokens < end, seen.clamp(0, picks), 0).to(torch.int32)


def attend_picks(
    rows: torch.Tensor, picks: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query tokens over picked rows.

    Args:
        rows: float [rows, rank + rope_dim].
        picks: int [tokens, picks], numbers of rows; negative: none.
        q_latent, q_rope: float [tokens, heads, rank] and [tokens, heads, rope_dim].
        scale: of scores.

    Returns:
        fp32 [tokens, heads, rank], 0 where a token has no picks, and the natural lse of its scores, fp32 [tokens,
        heads], -inf there.
    """
    query = torch.cat((q_latent.float(), q_rope.float()), dim=-1)
    output = torch.zeros(q_latent.shape, dtype=torch.float32, device=rows.device)
    lse = torch.full(q_latent.shape[:2], float("-inf"), device=rows.device)
    for token, picked in enumerate(picks):
        found = rows[picked[picked >= 0].long()].float()
        if len(found):
            scores = query[token] @ found.T * scale
            lse[token] = scores.logsumexp(-1)
            output[token] = scores.softmax(-1) @ found[:, : q_latent.shape[2]]
    return output, lse


def split_picks(
    picks: torch.Tensor, first_own: torch.Tensor, stored_offset: torch.Tensor, own_offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks of prompts' tokens, as rows of the tokens before the chunk and as rows of the chunk, int32 [tokens, picks]
    each, in their order, and -1 behind them.

    Args:
        picks: int32 [tokens, picks], positions in requests; negative: none.
        first_own: int32 [tokens], first position of the request's chunk.
        stored_offset, own_offset: int32 [tokens], added to a position to get a row.
    """
    own = picks >= first_own[:, None]
    found = []
    for kept, offset in (((picks >= 0) & ~own, stored_offset), (own, own_offset)):
        order = (~kept).to(torch.int8).argsort(dim=1, stable=True)
        rows = torch.where(kept, picks + offset[:, None], -1)
        found.append(rows.gather(1, order).to(torch.int32))
    return found[0], found[1]


def merge(
    stored: tuple[torch.Tensor, torch.Tensor] | None,
    own: tuple[torch.Tensor, torch.Tensor],
    gain: torch.Tensor,
    constant: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over both kinds of picks, fp32 [tokens, heads, rank].

    Args:
        stored, own: float [tokens, heads, rank] and fp32 lse [tokens, heads] of each; `stored` None: there is none.
        gain: V's, fp32 [rank]; sums over the chunk's latents are divided by it.
        constant: fp32 [rank], added, or None.
    """
    (output, lse), whole = own, None
    output = output.float() / gain
    if stored is not None:
        whole = torch.logaddexp(stored[1], lse)
        # Of a token without picks both are -inf.
        shares = [torch.where(x > float("-inf"), (x - whole).exp(), 0.0)[..., None] for x in (stored[1], lse)]
        output = stored[0].float() * shares[0] + output * shares[1]
    return output if constant is None else output + constant


def share_with_sinks(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, lacking: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention whose weights are shared with one more key of each head, its sink, which has no value: output times
    e^lse / (e^lse + e^sink), fp32 [tokens, heads, rank].

    Args:
        output: float [tokens, heads, rank], the result with weights of sum 1, the constant included.
        lse: fp32 [tokens, heads], natural, of the scores of stored latents.
        sinks: float [heads], scores of the sinks, neither scaled nor centred.
        lacking: fp32 [tokens, heads], true scores minus scores of stored latents, from which the mean is subtracted;
            None: 0.
    """
    whole = lse if lacking is None else lse + lacking
    return output.float() * torch.sigmoid(whole.clamp_min(-1e30) - sinks.float())[..., None]
