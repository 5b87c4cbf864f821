#!/usr/bin/env python3
"""Train a small model with sparse attention over latents, DeepSeek V3.2's: dense first, then its indexer, then sparse.

    python scripts/train_sparse_demo.py TEXT OUT [--dense RUN] [--indexer RUN] [--sparse RUN]

A RUN is STEPS:DROPOUT:LEARNING_RATE:SECONDS and ends with its steps or its seconds; the dropout of --dense holds for
--sparse, too, and the indexer has none. TEXT, what is held out and the
planted facts are as of `train_mla_demo.py`. The stages are those of DeepSeek V3.2's report:

    dense      the model without its indexers; every token reads all before it
    indexer    the indexers alone, by KL of the softmax of their scores from attention summed over heads
    sparse     every token reads its picks. The model by its loss, its indexers by that KL over the picks

The best checkpoint of the first and the last stage is kept, as there. OUT gets the model in bf16 and `held_out.txt`,
the text for `quality/sparse_quality.py`. The script ends with a check that transformers' own class picks and answers
as the model that was trained. `--tiny` tries it on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from packed_kv_quality.teacher_forced import token_kl
from sparse_model import ATTENTION, best_picks, causal, install
from train_mla_demo import (
    DEMO,
    JUDGED_ROWS,
    TINY,
    TOKENIZER,
    Best,
    Run,
    Sizes,
    Trainer,
    add_dropout,
    fit,
    read_text,
    split,
)  # fmt: skip
from transformers import AutoTokenizer, DeepseekV32Config, DeepseekV32ForCausalLM, PreTrainedModel

SPARSE_BATCH = 4
"""Rows of a dense stage's batch for one of the others."""
SAME_PICKS, SAME_KL = 0.999, 1e-5
"""Least share of picks that transformers has, too, and most KL from it: sums of fp32 have another order there."""
PICKED = {"num_hidden_layers": 4, "q_lora_rank": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 256}
SPARSE_DEMO = replace(DEMO, model=DEMO.model | PICKED)
SPARSE_TINY = replace(
    TINY, model=TINY.model | PICKED | {"num_hidden_layers": 2, "kv_lora_rank": 512, "q_lora_rank": 64, "index_topk": 32}
)


class SparseTrainer(Trainer):
    """The trainer of a model with sparse attention."""

    def make(self) -> PreTrainedModel:
        """A model with random weights and attention to be installed, every MLP dense."""
        config = DeepseekV32Config(
            vocab_size=len(self.tokenizer), qk_rope_head_dim=64,
            num_key_value_heads=self.sizes.model["num_attention_heads"], first_k_dense_replace=99, n_routed_experts=2,
            num_experts_per_tok=1, moe_intermediate_size=64, n_shared_experts=1, n_group=1, topk_group=1,
            max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id, attn_implementation=ATTENTION, **self.sizes.model,
        )  # fmt: skip
        return DeepseekV32ForCausalLM(config).to(self.device)


def read_all(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _scores: None, scale: float
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


class Reading:
    """Attention over all tokens or over picks, with the indexers' loss of a pass of the model.

    picks: of a query token; None: all. `losses`: KL of each layer, in nats a token, in a pass with gradients. `mass`,
    in one without and over all tokens: each layer's share of attention in the indexer's picks, where a token has more
    than `top_k` to pick of.
    """

    def __init__(self, top_k: int, picks: int | None) -> None:
        self.top_k, self.picks = top_k, picks
        self.losses: list[torch.Tensor] = []
        self.mass: list[torch.Tensor] = []

    def __call__(
        self, _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        seen = causal(query.shape[2], query.device)[None] if self.picks is None else best_picks(scores, self.picks)
        logits = query @ key.transpose(2, 3) * scale
        weights = logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        target = weights.detach().float().mean(1)
        if torch.is_grad_enabled():
            found = scores.float().masked_fill(~seen, float("-inf")).log_softmax(-1)
            self.losses.append((torch.xlogy(target, target) - target * found.masked_fill(~seen, 0.0)).sum(-1).mean())
        elif self.picks is None:
            self.mass.append((target * best_picks(scores, self.top_k))[:, self.top_k :].sum(-1).mean())
        return weights.to(value.dtype) @ value

    def taken(self, found: list[torch.Tensor]) -> torch.Tensor:
        """Values of the layers since the last call."""
        values = torch.stack(found)
        found.clear()
        return values


def train_dense(trainer: Trainer, model: Any, run: Run, compiled: bool) -> None:
    train_only(model, lambda name: "indexer" not in name)
    install(model, read_all, lambda *_: None)
    best = Best(trainer)
    forward = torch.compile(model, dynamic=False) if compiled else model
    model.train()
    fit(trainer, model, run, lambda: trainer.loss(trainer.batch(), forward), best.judge_of(model, "dense "))
    model.load_state_dict(best.weights)


def train_indexer(trainer: Trainer, model: Any, run: Run) -> None:
    train_only(model, lambda name: "indexer" in name)
    reading = Reading(model.config.index_topk, None)
    install(model, reading)
    model.eval()  # without dropout, what attention is without it

    def loss() -> torch.Tensor:
        trainer.logits(trainer.batch(trainer.sizes.batch // SPARSE_BATCH), model)
        return reading.taken(reading.losses).sum()

    @torch.no_grad()
    def judge(step: str) -> None:
        shares = []
        for rows in trainer.held_out.split(JUDGED_ROWS // SPARSE_BATCH):
            trainer.logits(rows, model)
            shares.append(reading.taken(reading.mass))
        by_layer = " ".join(f"{share:.3f}" for share in torch.stack(shares).mean(0).tolist())
        print(f"indexer {step}, attention in picks by layer {by_layer}", flush=True)

    fit(trainer, model, run, loss, judge)


def train_sparse(trainer: Trainer, model: Any, run: Run, best: Best) -> None:
    train_only(model, lambda _name: True)
    reading = Reading(model.config.index_topk, model.config.index_topk)
    install(model, reading)
    model.train()

    def loss() -> torch.Tensor:
        of_model = trainer.loss(trainer.batch(trainer.sizes.batch // SPARSE_BATCH), model)
        return of_model + reading.taken(reading.losses).sum()

    fit(trainer, model, run, loss, best.judge_of(model, "sparse "))


def train_only(model: torch.nn.Module, chosen: Callable[[str], bool]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name))


@torch.inference_mode()
def check(folder: str, row: torch.Tensor) -> tuple[float, float]:
    """Share of picks of a row int64 [1, tokens] that transformers' own class has as well, and KL of its tokens.

    Raises ValueError where it is another model.
    """
    given: list[torch.Tensor] = []
    own = DeepseekV32ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    own = own.eval().to(row.device)
    for layer in own.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda _module, _inputs, picks: given.append(picks))
    true = own(input_ids=row, use_cache=False).logits[0].log_softmax(-1)
    shares: list[torch.Tensor] = []
    top_k = own.config.index_topk

    def read(
        _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: torch.Tensor, scale: float
    ) -> torch.Tensor:
        picks = best_picks(scores, top_k)
        theirs = torch.zeros_like(picks).scatter_(2, given[len(shares)].long(), True)
        shares.append((picks & theirs)[:, top_k:].sum() / picks[:, top_k:].sum())
        logits = query @ key.transpose(2, 3) * scale
        return logits.masked_fill(~picks[:, None], float("-inf")).softmax(-1) @ value

    ours: Any = DeepseekV32ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION)
    install(ours.eval().to(row.device), read)
    kl = token_kl(true, ours(input_ids=row, use_cache=False).logits[0].log_softmax(-1)).mean().item()
    share = torch.stack(shares).mean().item()
    if share < SAME_PICKS or kl > SAME_KL:
        raise ValueError(f"transformers has another model: {share:.2%} of the picks, KL {kl:.1e}")
    return share, kl


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("text", type=Path, metavar="TEXT")
    add("out", metavar="OUT")
    add("--tokenizer", default=str(TOKENIZER), help="folder (default: %(default)s)")
    add("--dense", default="1200:0.1:3e-3:110", metavar="RUN", help="default: %(default)s")
    add("--indexer", default="600:0:2e-3:45", metavar="RUN", help="default: %(default)s")
    add("--sparse", default="1500:0.1:1e-3:90", metavar="RUN", help="default: %(default)s")
    add("--eager", action="store_true", help="do not compile the dense stage")
    add("--tiny", action="store_true", help="two narrow layers and small batches")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    text = read_text(options.text)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes: Sizes = SPARSE_TINY if options.tiny else SPARSE_DEMO
    trainer = SparseTrainer(text, tokenizer, sizes, device)
    torch.manual_seed(0)
    model = trainer.make()
    dense, indexer, sparse = (Run.parse(run) for run in (options.dense, options.indexer, options.sparse))
    add_dropout(model, dense.dropout)
    train_dense(trainer, model, dense, device == "cuda" and not options.eager)
    train_indexer(trainer, model, indexer)
    best = Best(trainer)
    train_sparse(trainer, model, sparse, best)
    best.save(options.out)
    Path(options.out, "held_out.txt").write_text("".join(split(text)[1]))
    print("kept", best.where, flush=True)
    torch.set_float32_matmul_precision("highest")
    share, kl = check(options.out, trainer.held_out[:1, :-1])
    print(f"transformers has {share:.3%} of the picks, KL {kl:.1e} nats")


if __name__ == "__main__":
    main()
