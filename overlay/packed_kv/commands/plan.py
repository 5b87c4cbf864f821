"""Say what a model's KV cache holds and costs under bf16, fp8 and the packed dtypes, from its config.json alone."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from ..formats import ROPE_BITS
from ..json_file import printable
from ..model.config_defaults import Config
from ..model.config_fields import BadInput
from ..model.shape import Model, parse
from ..planning import cards
from ..planning.cache import Serving, check_window
from ..planning.config_file import load, model_name
from ..planning.plan import Demand, as_json, assumptions, cache_memory, estimate, recommend
from ..planning.show import table
from ..planning.weights import BITS, weights
from ..refusals.table import Refusal, refusals_of_model, untried
from .arguments import EXIT_BAD_INPUT, GIB, LONGEST_LINE, Parser, count, installed_vllm, number, size, tokens, whole

UTILIZATION, BATCHED_TOKENS, RESERVE = 0.92, 8192, 3 * GIB
"""vLLM's defaults for a server on a large card; and the memory left for activations, workspace and CUDA graphs."""
DEFAULT_CONTEXT = 32768
WIDTH = 110


def main(arguments: Sequence[str] | None = None, prog: str = "packed-kv plan") -> int:
    """The command. Returns its exit code: 0, or 2 for bad input."""
    options = parser(prog).parse_args(arguments)
    try:
        demand, said = demand_of(options)
        rows = estimate(demand)
        if options.json:
            print(json.dumps(as_json(demand, rows, said), indent=1))
        else:
            print(table(demand, rows))
            print(f"\n{textwrap.fill(recommend(demand, rows), WIDTH)}\n")
            refused = dict.fromkeys(row.refused for row in rows if row.refused)
            names = [(", ".join(row.dtype for row in rows if row.refused == why), why) for why in refused]
            for line in [f"{name} would not start: {why}" for name, why in names] + assumptions(demand, said):
                print(textwrap.fill(f"- {line}", WIDTH, subsequent_indent="  "))
    except BadInput as error:
        print(f"{prog}: {printable(error, LONGEST_LINE)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def parser(prog: str = "packed-kv plan") -> argparse.ArgumentParser:
    """The options of the command."""
    memory = "(--gpu NAME | --gpu-memory SIZE | --kv-cache-memory SIZE)"
    made = Parser(prog, description=__doc__, usage=f"{prog} MODEL {memory} [options]")
    add = made.add_argument
    add("model", metavar="MODEL", help="folder, config.json, or Hugging Face Hub id")
    add("--gpu", metavar="NAME", help=f"one of {', '.join(cards.CARDS)}")
    add(
        "--gpu-memory",
        type=size,
        metavar="SIZE",
        help="memory per card, such as 80GiB; instead of --gpu, or to override its memory",
    )
    add("--bandwidth", type=number, metavar="TB/S", help="memory bandwidth per card, for the step time")
    add("--kv-cache-memory", type=size, metavar="SIZE", help="bytes of KV cache per card, whatever the weights take")
    add("--context", type=tokens, metavar="N",
        help="tokens per request, such as 32k (default: 32k, or the model's limit if less)")  # fmt: skip
    add("--users", type=whole, metavar="N", help="requests at once (default: as many as bf16 holds)")
    add("--tensor-parallel", type=whole, default=1, metavar="N", help="cards that share the model (default 1)")
    add("--weights", type=form, metavar="FORM", help=f"{', '.join(BITS)} or a size (default: by the config)")
    add("--recent-tokens", type=count, metavar="N", help="tokens of the recent window (default 64; 0: none)")
    add("--latent-rope-bits", type=int, choices=ROPE_BITS, metavar="N",
        help="bits per RoPE channel of latents (MLA), like packed_kv.latent_rope_bits (default 16)")  # fmt: skip
    add("--skip-layers", type=count, nargs="+", default=[], metavar="N", help="numbers of layers that stay in bf16")
    add("--gpu-memory-utilization", type=number, default=UTILIZATION, metavar="SHARE",
        help="as in vLLM (default %(default)s)")  # fmt: skip
    add("--max-num-batched-tokens", type=whole, default=BATCHED_TOKENS, metavar="N",
        help="as in vLLM (default %(default)s); sliding-window layers keep blocks for two batches")  # fmt: skip
    add("--mamba-ssm-cache-dtype", choices=("float32", "bfloat16", "float16"), metavar="T",
        help="as in vLLM, for state layers: float32, bfloat16, float16")  # fmt: skip
    add("--drafts", type=count, default=0, metavar="N",
        help="tokens that a step drafts, as in vLLM's num_speculative_tokens (default: none)")  # fmt: skip
    add("--json", action="store_true", help="print the plan as JSON")
    return made


def demand_of(options: argparse.Namespace) -> tuple[Demand, list[str]]:
    """The demand of the plan, including the parts that the command line does not state literally. Raises BadInput."""
    share = options.gpu_memory_utilization
    if not 0 < share <= 1:
        raise BadInput(f"--gpu-memory-utilization {share:g} must be between 0 and 1, such as 0.9")
    config, folder = load(options.model)
    model, said = _servable(config, model_name(options.model), options)
    if options.latent_rope_bits:
        model = model.with_rope_bits(options.latent_rope_bits)
    card = _card(options)
    _check_served(f"{model.name} on {card.name}", refusals_of_model(config, capability=card.capability))
    context = options.context or min(DEFAULT_CONTEXT, model.max_len or DEFAULT_CONTEXT)
    if options.context is None:
        reads = f"{model.max_len:,} tokens" if model.max_len else "the config does not say how many tokens"
        said.append(f"--context {context:,} assumed; the model reads {reads}")
    elif model.max_len and context > model.max_len:
        said.append(f"--context {context:,} is more than the model's {model.max_len:,}")
    heavy = weights(model, options.weights, folder)
    memory = options.kv_cache_memory
    if memory and card.memory and memory > card.memory:
        asked, has = (f"{number / GIB:.1f} GiB" for number in (memory, card.memory))
        raise BadInput(f"--kv-cache-memory {asked} is more than the card's {has}; give what one card has for its cache")
    if memory is None:
        memory = cache_memory(card, heavy, model.ranks, options.gpu_memory_utilization, RESERVE)
        share = f"{options.gpu_memory_utilization:g} of {card.memory / GIB:.1f} GiB"
        said.append(f"the KV cache gets {share}, less the weights and {RESERVE / GIB:g} GiB assumed for all else")
    _check_skipped(options.skip_layers, model)
    in_flight, skipped = 2 * options.max_num_batched_tokens, frozenset(options.skip_layers)
    serving = Serving(context, options.recent_tokens, in_flight, skipped, drafts=options.drafts)
    check_window(model, serving)
    return Demand(model, serving, heavy, card, int(memory), options.users), said


def _servable(config: Config, name: str, options: argparse.Namespace) -> tuple[Model, list[str]]:
    """The model, if packed pages serve it, and the options of vLLM with which they do. Raises BadInput."""
    _check_served(name, refusals_of_model(config, vllm=installed_vllm()))
    model = parse(config, name, options.tensor_parallel, options.mamba_ssm_cache_dtype, options.drafts)
    found = refusals_of_model(config, model)
    _check_served(name, found)
    said = [f"served with {refusal.rule.option} alone: {refusal.rule.subject}" for refusal in found]
    return model, [*said, *filter(None, [untried(config)])]


def _check_served(name: str, found: Sequence[Refusal]) -> None:
    for refusal in found:
        if not refusal.rule.option:
            raise BadInput(f"{name}: {refusal.sentence()}")


def _check_skipped(layers: Sequence[int], model: Model) -> None:
    numbers = {layer.number for layer in model.attention}
    if unknown := sorted(set(layers) - numbers):
        raise BadInput(f"--skip-layers {unknown[0]}: no attention layer of {model.name}, which has {min(numbers)} to "
                       f"{max(numbers)}")  # fmt: skip


def _card(options: argparse.Namespace) -> cards.Card:
    bandwidth = (options.bandwidth or 0) * 1e12
    if options.gpu:
        card = cards.find(options.gpu)
        return replace(card, memory=int(options.gpu_memory or card.memory), bandwidth=bandwidth or card.bandwidth)
    if options.gpu_memory or options.kv_cache_memory:
        memory = options.gpu_memory or 0
        return cards.Card(f"a card of {memory / GIB:g} GiB" if memory else "a card", int(memory), bandwidth)
    sizes = "--gpu-memory SIZE or --kv-cache-memory SIZE"
    raise BadInput(f"no card is named; give --gpu NAME (one of {', '.join(cards.CARDS)}), {sizes}")


def form(text: str) -> str | float:
    """A form of `BITS`, or a size."""
    return text if text in BITS else size(text)
