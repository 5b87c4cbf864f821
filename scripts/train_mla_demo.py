#!/usr/bin/env python3
"""Train a small model of DeepSeek-V3's latent attention (MLA), with planted facts: this made models/mla-demo.

    python scripts/train_mla_demo.py TEXT OUT [--runs STEPS:DROPOUT:LEARNING_RATE:SECONDS ...]

TEXT is plain text, or xz of it. A twentieth of it is held out. Every other row of a batch has a fact planted, and a
question about it. Runs go one after the other, and each ends with its steps or its seconds. The best checkpoint of all
is kept, by held-out loss and a little by recall. The two runs took four minutes on an H200; where seconds end a run, no
two are alike. `--tiny` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import lzma
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packed_kv_quality.recall import FACT, QUESTION
from transformers import AutoTokenizer, DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedModel

TOKENIZER = Path(__file__).parents[1] / "models" / "demo-7m"
NAMES = (
    "Alice", "Robert", "Clara", "Edmund", "Helena", "Victor", "Margaret", "Thomas",
    "Louisa", "Henry", "Agnes", "Philip", "Dorothea", "George", "Emma", "Arthur",
)  # fmt: skip
PIECE, HELD_OUT = 100_000, 20
"""Characters of a piece of text, and which share of pieces is held out."""
RECALL_WEIGHT = 0.3
"""Nats of held-out loss that recall of all digits is worth."""
JUDGED_ROWS = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and of its training data."""

    model: dict[str, int]
    batch: int = 64
    context: int = 2048
    judged_every: int = 50
    held_out_rows: int = 64


DEMO = Sizes(
    {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "num_attention_heads": 4,
        "kv_lora_rank": 512, "qk_nope_head_dim": 64, "v_head_dim": 64,
    }
)  # fmt: skip
TINY = Sizes(
    {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
    4, 256, 2, 2,
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    steps: int
    dropout: float
    rate: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Run:
        steps, dropout, rate, seconds = text.split(":")
        return cls(int(steps), float(dropout), float(rate), float(seconds))


@dataclass(frozen=True)
class Planted:
    """Token ids of a fact, and of its question with the answer; `ask` tokens of it are the question."""

    fact: torch.Tensor
    question: torch.Tensor
    ask: int


def split(text: str) -> tuple[list[str], list[str]]:
    """Pieces of a text to train on, and those that are held out."""
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    held = pieces[HELD_OUT // 2 :: HELD_OUT]
    return [piece for i, piece in enumerate(pieces) if i % HELD_OUT != HELD_OUT // 2], held


def read_text(path: Path) -> str:
    """Plain text, or xz of it."""
    raw = path.read_bytes()
    return (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()


class Trainer:
    """Text, planted facts, and the steps of training on them."""

    def __init__(self, text: str, tokenizer: Any, sizes: Sizes, device: str) -> None:
        self.tokenizer, self.sizes, self.device = tokenizer, sizes, device
        pieces, held = split(text)
        self.train = torch.cat([self.encode(piece) for piece in pieces])
        rows = torch.cat([self.encode(piece) for piece in held])
        rows = rows[: len(rows) // (sizes.context + 1) * (sizes.context + 1)].view(-1, sizes.context + 1)
        self.held_out = rows[: sizes.held_out_rows]
        self.pool, self.asked = self.facts(4096, 1), self.facts(48, 2)
        self.rng = random.Random(3)
        self.span = torch.arange(sizes.context + 1, device=device)

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), device=self.device)

    def facts(self, count: int, seed: int) -> list[Planted]:
        rng, found = random.Random(seed), []
        for _ in range(count):
            name, number = rng.choice(NAMES), "".join(rng.choice("0123456789") for _ in range(5))
            fact = self.encode("\n\n" + FACT.format(name=name, number=number) + "\n\n")
            ask = "\n\n" + QUESTION.format(name=name)
            found.append(Planted(fact, self.encode(f"{ask} {number}.\n"), len(self.encode(ask))))
        return found

    def plant(self, row: torch.Tensor, planted: Planted, at: int | None = None, end: int | None = None) -> int:
        """Put a fact at `at` and its question at `end`, each anywhere if None; returns the latter."""
        context, question = self.sizes.context, len(planted.question)
        if end is None:
            end = self.rng.randint(min(128, context // 2), context + 1 - question)
        if at is None:
            at = self.rng.randint(0, end - len(planted.fact))
        row[at : at + len(planted.fact)] = planted.fact
        row[end : end + question] = planted.question
        return end

    def batch(self, rows_wanted: int | None = None) -> torch.Tensor:
        """Rows of text, int64 [rows_wanted or batch, context + 1], facts in every other one."""
        last, count = len(self.train) - self.sizes.context - 1, rows_wanted or self.sizes.batch
        rows = self.train[torch.randint(0, last, (count, 1), device=self.device) + self.span]
        for row in rows[::2]:
            self.plant(row, self.pool[self.rng.randrange(len(self.pool))])
        return rows

    def logits(self, rows: torch.Tensor, model: Callable) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return model(input_ids=rows[:, :-1]).logits

    def loss(self, rows: torch.Tensor, model: Callable) -> torch.Tensor:
        logits = self.logits(rows, model).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def judge(self, model: torch.nn.Module) -> tuple[float, float]:
        """Held-out loss, and the share of digits of planted numbers that are recalled."""
        model.eval()
        losses = [self.loss(part, model).item() for part in self.held_out.split(JUDGED_ROWS)]
        rows = self.held_out.repeat(-(-len(self.asked) // len(self.held_out)), 1)[: len(self.asked)].clone()
        right = total = 0.0
        for i, (row, asked) in enumerate(zip(rows, self.asked, strict=True)):
            self.plant(row, asked, at=100 + i, end=self.sizes.context - 40 - i)
        said = torch.cat([self.logits(part, model).argmax(-1) for part in rows.split(JUDGED_ROWS)])
        for i, asked in enumerate(self.asked):
            end = self.sizes.context - 40 - i
            digits = slice(end + asked.ask, end + len(asked.question) - 2)  # the rest is ".\n"
            answers = said[i, digits.start - 1 : digits.stop - 1]
            right += (answers == rows[i, digits]).sum().item()
            total += len(answers)
        model.train()
        return sum(losses) / len(losses), right / total

    def make(self) -> PreTrainedModel:
        """A model with random weights, every layer dense."""
        config = DeepseekV2Config(
            vocab_size=len(self.tokenizer), q_lora_rank=None, qk_rope_head_dim=64,
            num_key_value_heads=self.sizes.model["num_attention_heads"], first_k_dense_replace=99, n_routed_experts=2,
            num_experts_per_tok=1, moe_intermediate_size=64, n_shared_experts=1, max_position_embeddings=2048,
            rope_theta=10000.0, rms_norm_eps=1e-6, tie_word_embeddings=True,
            bos_token_id=self.tokenizer.bos_token_id, eos_token_id=self.tokenizer.eos_token_id, **self.sizes.model,
        )  # fmt: skip
        return DeepseekV2ForCausalLM(config).to(self.device)


class Best:
    """The checkpoint with the best score so far."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.score, self.where = trainer, math.inf, ""
        self.weights: dict[str, torch.Tensor] = {}

    def take(self, model: torch.nn.Module, loss: float, recall: float, where: str) -> None:
        score = loss + RECALL_WEIGHT * (1 - recall)
        if score < self.score:
            self.score, self.where = score, where
            self.weights = {name: x.detach().bfloat16().cpu().clone() for name, x in model.state_dict().items()}

    def judge_of(self, model: torch.nn.Module, name: str) -> Callable[[str], None]:
        """A function that judges the model, prints and takes it, with `name` before the step in words."""

        def judge(step: str) -> None:
            held_out, recall = self.trainer.judge(model)
            where = f"{name}{step}, held out {held_out:.3f}, recall {recall:.2f}"
            print(where, flush=True)
            self.take(model, held_out, recall, where)

        return judge

    def save(self, folder: str) -> None:
        kept = self.trainer.make().to(torch.bfloat16)
        kept.load_state_dict(self.weights)
        kept.lm_head.weight = torch.nn.Parameter(kept.lm_head.weight.detach().clone())
        kept.config.tie_word_embeddings = False  # vLLM ties none of this architecture
        kept.save_pretrained(folder)
        self.trainer.tokenizer.save_pretrained(folder)


def add_dropout(model: Any, share: float) -> None:
    def drop(module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, share, module.training)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(drop)
        layer.self_attn.o_proj.register_forward_hook(drop)
    model.model.embed_tokens.register_forward_hook(drop)


def optimizer_of(model: torch.nn.Module, rate: float, device: str) -> torch.optim.AdamW:
    trained = [x for x in model.parameters() if x.requires_grad]
    matrices = [x for x in trained if x.dim() >= 2]
    rest = [x for x in trained if x.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")


def fit(
    trainer: Trainer,
    model: torch.nn.Module,
    run: Run,
    loss_of: Callable[[], torch.Tensor],
    judge: Callable[[str], None],
) -> None:
    """Train the parameters that take gradients by `loss_of` a batch. `judge` gets the step and its loss in words."""
    optimizer = optimizer_of(model, run.rate, trainer.device)
    start, step, done = 0.0, 0, 0.0
    while done < 1:
        loss = loss_of()
        start = start or time.monotonic()  # behind compilation
        done = max(step / run.steps, (time.monotonic() - start) / run.seconds)
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = run.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % trainer.sizes.judged_every == 0 or done >= 1:
            judge(f"step {step}: loss {loss.item():.3f}")


def train(trainer: Trainer, run: Run, number: int, best: Best) -> None:
    torch.manual_seed(number)
    model = trainer.make()
    add_dropout(model, run.dropout)
    forward = torch.compile(model, dynamic=False) if trainer.device == "cuda" else model
    model.train()
    fit(trainer, model, run, lambda: trainer.loss(trainer.batch(), forward), best.judge_of(model, f"run {number} "))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--tokenizer", default=str(TOKENIZER), help="folder (default: %(default)s)")
    runs = ["700:0.1:3e-3:80", "1500:0.15:3e-3:170"]
    parser.add_argument("--runs", nargs="+", default=runs, metavar="RUN", help=f"default: {' '.join(runs)}")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers and small batches")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    text = read_text(options.text)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = Trainer(text, tokenizer, TINY if options.tiny else DEMO, device)
    best = Best(trainer)
    for number, run in enumerate(map(Run.parse, options.runs)):
        train(trainer, run, number, best)
    best.save(options.out)
    print("kept", best.where)


if __name__ == "__main__":
    main()
