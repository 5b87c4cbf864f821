"""The tables of measured.py: `SPECS` lists them by page, `GENERATED` lists tables that are not of rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import cards
import tables
from quality_rows import (
    BEHIND,
    CALIBRATED,
    FOLDER,
    H200,
    TEXT,
    UNCALIBRATED,
    behind,
    beside_others,
    forced,
    gains,
    paired_tasks,
    tasks,
)
from release import OURS, SHOWN
from table_rows import (
    CASE,
    CODINGS,
    FULL,
    KEYS_ALONE,
    MEANS,
    OWN_WIDTHS,
    SPARSE,
    STEP,
    Spec,
    averaged,
    by_kernel,
    codings,
    drafted,
    in_default_mode,
    in_modes,
    in_rounds,
    kernels,
    last_options,
    sparse_codings,
    spread,
    with_columns,
    with_cpu_time,
    with_means,
    with_pages,
    with_widths,
)
from tables import (
    Row,
    Show,
    kl,
    kl_and_tail,
    ratio,
    text,
)

RELEASE = "release"
"""Folder of results/ with what benchmarks/release.py measured at one commit."""
TOKENS_S, MICROSECONDS = ratio("tokens_s"), text("attention_p50_us")
STEPS = {"dtype": "ms, requests x context:"}


def with_kernels(row: Row, base: Row | None) -> str:
    """Show a step, and for how long the GPU is busy in it, if the row says that."""
    return STEP(row, base) + (f", GPU {ratio('kernels_ms')(row, base)}" if row.get("kernels_ms") else "")


LONG = {"requests": ("32", "128", "8"), "context": ("8192", "2048", "32768")}
OTHERS = ("int4_per_token_head",)
ROPE_BITS = {"dtype": "ms, requests x context:", "rope_bits": "bits of RoPE"}
FP8_CACHE = {"dtype": "fp8", "rope_bits": "16"}
DRAFTS = {"drafts": "drafts", "dtype": "ms"}
SERVED = {"output tokens/s": ratio("output_tokens_s", tables.rounded), "TTFT, ms": ratio("p50_ttft_ms", tables.rounded),
          "TPOT, ms": ratio("p50_tpot_ms", lambda cell: f"{float(cell):.1f}")}  # fmt: skip
HITS = {"hit rate": text("hit_rate"), "TTFT p50, s": text("p50_ttft_ms", ".2f", 1e-3),
        "TPOT p50, ms": text("p50_tpot_ms", ".2f"), "output tokens/s": text("output_tokens_s", ".0f")}  # fmt: skip
WAVE = {"requests that fit": ratio("fit"), "output tokens/s while all decode": ratio("decode_tokens_s"),
        "prompts included": ratio("output_tokens_s"), "TTFT p50, s": text("p50_ttft_ms", ".1f", 1e-3),
        "TTFT p99, s": text("p99_ttft_ms", ".1f", 1e-3)}  # fmt: skip
OPTIONS = {"dtype": "dtype", "options": "options"}
ON_THREADS = {"what": "what", "threads": "threads", "dtype": "dtype"}
CPU_TIMES = {"ms": text("ms"), "prompt tokens/s": text("tokens_a_second"), "ratio": text("ratio", ".2f"),
             "CPU ms": text("cpu_ms"), "ratio of CPU time": text("cpu_ratio", ".2f")}  # fmt: skip
MIXED = {"requests": "requests", "context": "context", "dtype": "ms, tokens of the prompt:"}
STARTED = {"s to the first token": "first_token_s", "profiling run": "profile_s", "warm-up": "warm_up_s",
           "kernels compiled": "kernels_compiled", "their s, summed": "compile_s"}  # fmt: skip
PEERS = {
    "bytes per prompt": text("bytes", ",.0f"),
    "ms to read": text("transfer_ms", ".1f"),
    "GB/s": text("GB_s", ".1f"),
}
KERNEL = {"dtype": "µs", "kernel": "kernel"}
COLUMNS = {"group": "query heads", "query_tokens": "new tokens", "dtype": "µs"}
LATENT = {"heads": "heads", "queries": "query tokens", "spread": "spread of lengths", "rope_bits": "bits of RoPE",
          "recent": "recent window", "cache": "µs"}  # fmt: skip
SOAKED = {"clients": "clients", "seconds": "seconds", "requests": "requests", "tokens": "tokens", "errors": "errors",
          "preemptions": "preemptions", "samples": "samples", "of these, other tokens": "samples_parted",
          "answers from disk": "answers_from_disk", "wrong ones": "answers_from_disk_wrong",
          "growth of host memory, MiB": "host_growth_mib", "files": "files"}  # fmt: skip
CODED = {"bytes": text("bytes"), "KL (of fp8's)": ratio("kl", lambda cell: f"{float(cell):.5f}"),
         "±": text("kl_error", ".5f"), "perplexity": text("perplexity")}  # fmt: skip
PICKED = {
    "bytes": text("bytes"), "KL (of fp8_ds_mla's)": ratio("kl", lambda cell: f"{float(cell):.5f}"),
    "±": text("kl_error", ".5f"), "KL, bf16's picks": text("kl_same_picks", ".5f"), "top-1": text("top1", ".2%"),
    "perplexity": text("perplexity", ".2f"), "picks that differ": text("picks_differ", ".2%"),
    "by layer, %": text("picks_by_layer"), "attention in picks": text("mass", ".1%"),
}  # fmt: skip
PICKS = {title: PICKED[title] for title in ("KL (of fp8_ds_mla's)", "KL, bf16's picks", "picks that differ",
         "by layer, %")}  # fmt: skip
KL = {"dtype": "dtype", "bytes": "KV bytes/token", "setting": "setting"}
AFTER = {"dtype": "mean KL, nats, prompt tokens:", "bytes": "KV bytes/token"}
BOTH = {"dtype": "mean KL; 99.9th percentile, nats, prompt tokens:", "bytes": "KV bytes/token"}
TAIL = {"dtype": "99.9th percentile, nats, prompt tokens:", "bytes": "KV bytes/token"}
TAILS = ratio("kl_tail", tables.thousandths)
AGENTS = {"output tokens/s": text("output_tokens_s", ",.0f"), "hit rate": text("hit_rate", ".2f"),
          "TTFT p50, s": text("p50_ttft_ms", ".2f", 1e-3), "TTFT p99, s": text("p99_ttft_ms", ".2f", 1e-3),
          "between outputs p50, ms": text("p50_itl_ms", ".1f"), "p99, ms": text("p99_itl_ms", ".0f"),
          "steps in whole graphs": text("whole", ".1%"), "longer than graphs": text("eager", ".1%")}  # fmt: skip
WIDTHS = {"dtype": "µs, bits of K's groups:", "kernel": "kernel", "requests": "requests", "context": "context",
          "query_tokens": "new tokens", "recent": "window"}  # fmt: skip
OF_FP8 = {"dtype": "fp8", "bytes": "11,520"}
CODES = {"dtype": "K and V", "bytes": "KV bytes/token", "window": "window"}
TASKS = {"task": "task", "prompt": "prompt", "kept": "bf16 solves", "setting": "setting"}


ROWS = {"coding": "coding", "calibrated": "file"}
FP8_ROWS = {"coding": SPARSE["fp8_ds_mla"], "calibrated": ""}
LATENTS = {"coding": "coding", "window": "window", "calibrated": "file"}
FP8 = {"coding": CODINGS["fp8"], "window": "", "calibrated": "yes"}


def fine_kl(row: Row, _: Row | None) -> str:
    """Show mean KL with five digits, its standard error if there is one, and in brackets the ratio to fp8's."""
    error = f" ± {float(row['kl_error']):.5f}" if row["kl_error"] else ""
    return f"{float(row['kl_mean']):.5f}{error}" + (f" ({float(row['kl_share']):.2f})" if row["kl_share"] else "")


def shows(names: Iterable[str] | Mapping[str, str]) -> dict[str, Show]:
    """Columns as they are: their titles (by default their names) -> what to show."""
    titled = names if isinstance(names, Mapping) else {name.replace("_", " "): name for name in names}
    return {title: text(name) for title, name in titled.items()}


SERVER = "release/serve.csv"
SPECS: Mapping[str, Sequence[Spec]] = {
    "README.md": (
        Spec("throughput-summary", "release/throughput.csv", {"dtype": "20 GB of KV cache"}, WAVE, where={"dtype":
             SHOWN}),
        Spec("speed", "release/decode.csv", STEPS, STEP, CASE, LONG | {"dtype": SHOWN}),
        Spec("quality", {f"{FOLDER}/calibrated.json": CALIBRATED}, BOTH, kl_and_tail, ("prompt",),
             prepare=behind("prompt", dtypes=(*OURS, "fp8"))),
    ),
    "docs/speed.md": (
        Spec("steps", "release/decode.csv", STEPS, STEP, CASE, {"dtype": ("auto", "fp8", "tq4",
             "turboquant35", "tq3", "turboquant25")}),
        Spec("steps-h100", "release/h100/decode.csv", STEPS, STEP, CASE),
        Spec("prefill", "release/prefill.csv", {"dtype": "tokens/s, tokens:"}, TOKENS_S, ("tokens",)),
        Spec("verify", "release/verify.csv", DRAFTS, STEP, CASE, {"model": ("8b",)}),
        Spec("tensor-parallel", {"release/h100/decode.csv": "", "release/h100/tensor_parallel.csv": ""}, {"ranks":
             "GPUs", "dtype": "ms"}, STEP, CASE, LONG | {"requests": ("32", "128", "8", "1"), "dtype": ("auto", "fp8",
             "tq4")}),
        Spec("gpt-oss", "release/h100/gpt_oss.csv", STEPS, STEP, CASE),
        Spec("qwen-steps", "qwen3.8-27b.csv", STEPS, STEP, CASE),
        Spec("latent-steps", "release/glm_flash.csv", STEPS, STEP, CASE),
        Spec("sparse-steps", "release/sparse.csv", ROPE_BITS, with_kernels, CASE, base=FP8_CACHE),
        Spec("kimi-steps", "release/kimi_linear.csv", STEPS, STEP, CASE),
    ),
    "docs/lab/speed.md": (
        Spec("steps-others", "release/decode.csv", STEPS, STEP, CASE, {"dtype": ("auto", *OTHERS)}),
        Spec("steps-older", "decode.csv", STEPS, STEP, CASE, LONG | {"dtype": ("auto", "turboquant_4bit_nc")}),
        Spec("prefill-h100", "release/h100/prefill.csv", {"dtype": "tokens/s, tokens:"}, TOKENS_S, ("tokens",)),
        Spec("recent-window", "release/h100/recent_window.csv", {"dtype": "ms", "recent_tokens": "window"}, STEP, CASE,
             base={"recent_tokens": "0"}),
        Spec("means", "release/h100/means.csv", MEANS, ratio("p50_ms", digits=3), CASE, prepare=averaged,
             base={"means": "none"}),
        Spec("mixed", "release/mixed.csv", MIXED, STEP, ("prompt",), prepare=in_default_mode),
        Spec("mixed-h100", "release/h100/mixed.csv", MIXED, STEP, ("prompt",), prepare=in_default_mode),
        Spec("mixed-graphs", "mixed_graphs.csv", MIXED, spread, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("mixed-graphs-long", "mixed_graphs_32x8192.csv", MIXED, spread, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("mixed-graphs-fp8", "mixed_graphs_fp8.csv", MIXED, spread, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("mixed-gpt-oss", "mixed_gpt_oss.csv", MIXED, spread, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("mixed-kernels", "mixed_graphs.csv", MIXED, kernels, ("prompt",), prepare=in_rounds, base=FULL),
        Spec("verify-shapes", "release/h100/verify_shapes.csv", {"model": "shape"} |
             DRAFTS, STEP, CASE),
        Spec("latent-steps-h100", "release/h100/glm_flash.csv", STEPS, STEP, CASE),
        Spec("latent-prefill", "release/glm_flash_prefill.csv", {"dtype": "tokens/s, tokens:"},
             TOKENS_S, ("tokens",)),
        Spec("sparse-prefill", "release/sparse_prefill.csv", ROPE_BITS | {"dtype": "tokens/s, tokens:"}, TOKENS_S,
             ("tokens",), base=FP8_CACHE),
        Spec("kimi-steps-h100", "release/h100/kimi_linear.csv", STEPS, STEP, CASE),
        Spec("cpu", "cpu_engine.csv", {"what": "what", "dtype": "dtype"}, {"ms": text("ms"),
             "prompt tokens/s": text("tokens_a_second"), "ratio": text("ratio", ".2f")}, where={"cpu": ("AMD EPYC",),
             "cpu_ms": ("",), "reference_ms": ("",)}),
        Spec("cpu-amd", "cpu_engine.csv", ON_THREADS, CPU_TIMES, where={"cpu": ("AMD EPYC",)}, prepare=with_cpu_time),
        Spec("cpu-file", "cpu_engine_file.csv", ON_THREADS, CPU_TIMES, prepare=with_cpu_time),
        Spec("cpu-intel", "cpu_engine.csv", ON_THREADS, CPU_TIMES, where={"cpu": ("Intel(R) Xeon(R) Processor",)},
             prepare=with_cpu_time),
    ),
    "docs/server.md": (
        Spec("agents", "agents.csv", {"dtype": "24 agents, 12 GB of KV cache"}, AGENTS, prepare=in_modes),
        Spec("agents-48", "agents_48.csv", {"dtype": "48 agents, 12 GB of KV cache"}, AGENTS, prepare=in_modes),
        Spec("agents-load", "agents_load.csv", {"dtype": "1.5 turns/s, 12 GB of KV cache"}, AGENTS, prepare=in_modes),
        Spec("throughput", "release/throughput.csv", {"dtype": "20 GB of KV cache"}, WAVE),
        Spec("server-summary", "release/serve_96.csv", {"dtype": "96 requests at once"}, SERVED),
        Spec("prefixes", "prefixes.csv", OPTIONS, HITS, prepare=last_options),
    ),
    "docs/lab/server.md": (
        Spec("throughput-h100", "release/h100/throughput.csv", {"dtype": "20 GB of KV cache"}, WAVE),
        Spec("server", SERVER, {"concurrency": "requests at once", "dtype": "dtype"}, SERVED),
        Spec("server-settings", {"release/async.csv": "", "release/serve_96.csv": "", SERVER: ""}, OPTIONS,
             {"output tokens/s": text("output_tokens_s", ",.0f"), "TTFT, ms": text("p50_ttft_ms", ",.0f"),
              "TPOT, ms": text("p50_tpot_ms", ".1f")}, where={"concurrency": ("96",)}, prepare=last_options),
        Spec("contexts", "offload_contexts.csv", {"dtype": "ms", "block": "tokens of a block"}, text("p50_ms",
             ".0f"), ("source",)),
        Spec("peers", "peers.csv", {"dtype": "dtype", "prefill_ranks": "ranks", "decode_ranks": "to"}, PEERS),
        Spec("startup", "release/startup.csv", {"caches": "caches", "torch_compile": "torch.compile",
             "dtype": "dtype"}, shows(STARTED)),
        Spec("startup-256", "startup_256.csv", {"dtype": "dtype"}, shows(STARTED)),
        Spec("captures", "captures.csv", {"dtype": "dtype"}, shows({"s to the first token": "first_token_s",
             "of these for CUDA graphs": "graphs_s", "GiB of CUDA graphs": "graphs_gib"}), prepare=list),
    ),
    "docs/kernels.md": (
        Spec("kernels-summary", "kernels.csv", KERNEL, MICROSECONDS, CASE, LONG | {"dtype": OURS, "kernel": ("cuda",)}),
    ),
    "docs/lab/internals.md": (
        Spec("kernels", "kernels.csv", KERNEL, MICROSECONDS, CASE, {"spread": ("0",)}),
        Spec("kernels-h100", "h100/kernels.csv", KERNEL, MICROSECONDS, CASE),
        Spec("columns", {"columns.csv": ""}, COLUMNS, MICROSECONDS, CASE, {"means": ("none",), "recent": ("0",),
             "requests": ("32",), "context": ("8192",), "group": ("4", "8", "16"), "query_tokens": ("1", "4")},
             by_kernel),
        Spec("latent-kernels", "latent_kernels.csv", {"heads": "heads", "cache": "µs"}, ratio("p50_us"), CASE,
             {"queries": ("1",), "spread": ("0",), "rope_bits": ("16",), "recent": ("0",)}, list, {"cache": "fa3"}),
        Spec("kimi-attention", "kimi_attention.csv", {"heads": "heads", "cache": "µs"}, ratio("p50_us"), CASE,
             prepare=list, base={"cache": "fa3"}),
        Spec("latent-kernels-h100", "h100/latent_kernels.csv", LATENT, ratio("p50_us"), CASE, prepare=list),
        Spec("environment", "environment.csv", {"dtype": "ms", "torch": "PyTorch"}, STEP, CASE,
             base={"torch": "2.11.0+cu130"}),
        Spec("store", "store.csv", {"dtype": "µs, tokens:", "part": "part"}, text("p50_us"), ("tokens",)),
        Spec("key-widths", "widths.csv", WIDTHS, ratio("p50_us"), ("widths",), prepare=with_widths,
             base={"widths": OWN_WIDTHS}),
        Spec("key-widths-store", "widths_store.csv", {"dtype": "µs, tokens:", "part": "part", "widths": "K's groups"},
             text("p50_us"), ("tokens",), prepare=with_widths),
        Spec("key-widths-5", "widths_of_5.csv", {"dtype": "µs, new tokens:", "head_dim": "heads of", "widths":
             "K's groups"}, ratio("p50_us"), ("query_tokens",), {"kernel": ("cuda",)}, with_widths,
             {"widths": OWN_WIDTHS}),
        Spec("heads-of-256", "heads_of_256.csv", {"dtype": "µs, requests x context:", "kernel": "kernel"},
             ratio("p50_us"), CASE, prepare=list, base={"kernel": "bf16"}),
        Spec("heads-of-256-drafts", "heads_of_256_drafts.csv", {"dtype": "µs, new tokens:", "kernel": "kernel"},
             ratio("p50_us"), ("query_tokens",), prepare=list, base={"kernel": "bf16"}),
        Spec("columns-24-48", "columns_24_48.csv", {"head_dim": "channels", "dtype": "µs, columns:", "kernel":
             "kernel"}, ratio("p50_us"), ("columns",), prepare=with_columns, base={"kernel": "bf16"}),
        Spec("gpu-tests", "gpu_tests.csv", {"command": "command", "result": "result"}, shows( {"card": "gpu",
             "vLLM": "vllm", "PyTorch": "torch", "commit": "commit"}), prepare=list),
    ),
    "docs/lab/calibration.md": (
        Spec("generate-widths", {f"{FOLDER}/own-widths.json": "the dtype's widths", f"{FOLDER}/widths.json":
             "the file's"}, KL, kl, ("text", "prompt"), prepare=behind("text", "prompt")),
        Spec("generate-widths-planted", {f"{FOLDER}/own-widths.json": "the dtype's widths", f"{FOLDER}/widths.json":
             "the file's"}, TASKS, text("shown"), ("dtype",), prepare=tasks),
        Spec("generate-file", {f"{FOLDER}/four-bits.json": "to 4 bits, V whole", f"{FOLDER}/five-bits-and-means.json":
             "to 5 bits, V less its mean"}, KL, kl, ("text", "prompt"), prepare=behind("text", "prompt")),
        Spec("planted-files", {f"{FOLDER}/planted-own.json": "the dtype's widths, V whole",
             f"{FOLDER}/planted-file.json": "the file's, V less its mean"}, {"dtype": "dtype", "setting": "setting"},
             shows({"solved": "solved", "nats regained an answer": "regained"}), prepare=paired_tasks),
        Spec("cpu-files", "cpu_files.csv", {"target": "instructions", "pages": "ms, requests x tokens, channels:"},
             ratio("packed_ms"), ("requests", "tokens", "head_dim"), prepare=with_pages, base={"pages": "tq4"}),
        Spec("value-means", "value_means.csv", {"dtype": "µs, query heads x new tokens:", "means": "means of"},
             ratio("p50_us"), ("group", "query_tokens"), prepare=with_means, base={"means": KEYS_ALONE}),
    ),
    "docs/lab/reliability.md": (
        Spec("soak-restarts", {"soak_restarts_h200.json": "H200", "soak_restarts_cpu.json": "CPU"},
             {"model": "model", "setting": "on", "dtype": "dtype"}, shows(SOAKED), prepare=list),
    ),
    "docs/quality.md": (
        Spec("quality-summary", {f"{FOLDER}/calibrated.json": CALIBRATED}, AFTER, kl, ("prompt",),
             prepare=behind("prompt", dtypes=(*OURS, "fp8"))),
        Spec("quality-tail", {f"{FOLDER}/calibrated.json": CALIBRATED}, TAIL, TAILS, ("prompt",),
             prepare=behind("prompt", dtypes=(*OURS, "fp8")), base=OF_FP8),
    ),
    "docs/lab/quality.md": (
        Spec("generate", BEHIND, KL, kl, ("text", "prompt"), prepare=behind("text", "prompt")),
        Spec("generate-tail", BEHIND, KL, TAILS, ("text", "prompt"),
             prepare=behind("text", "prompt"), base=OF_FP8 | {"setting": ""}),
        Spec("generate-gain", BEHIND, {"dtype": "with a file / without, prompt tokens:"}, text("gain"), ("prompt",),
             prepare=gains),
        Spec("generate-repeated", {f"{FOLDER}/repeated.json": CALIBRATED}, KL, kl, ("text", "prompt"),
             prepare=behind("text", "prompt")),
        Spec("generate-no-window", {f"{FOLDER}/no-window-calibrated.json": CALIBRATED,
             f"{FOLDER}/no-window-uncalibrated.json": UNCALIBRATED}, KL, kl, ("text", "prompt"),
             prepare=behind("text", "prompt")),
        Spec("json-answers", "json_answers.csv", {"dtype": "dtype"}, shows({"valid": "valid", "equal to bf16's":
             "equal", "mean share before the first other token": "tokens_before_the_first_that_differs"})),
        Spec("behind-hits", "behind_hits.csv", {"dtype": "dtype", "prefix": "tokens in the cache"}, shows({
             "KL in graphs": "graphs", "KL by the ordinary route": "ordinary", "ratio": "ratio", "±": "ratio_error"}),
             prepare=list),
        Spec("generate-yarn", {f"{FOLDER}/yarn-calibrated.json": CALIBRATED,
             f"{FOLDER}/yarn-uncalibrated.json": UNCALIBRATED}, KL, kl, ("text", "prompt"), prepare=behind("text",
             "prompt")),
        Spec("generate-planted", BEHIND, TASKS, text("shown"), ("dtype",), prepare=tasks),
        Spec("generate-tasks", {f"{FOLDER}/tasks.json": CALIBRATED}, TASKS, text("shown"), ("dtype",), prepare=tasks),
        Spec("generate-drafts", f"{FOLDER}/drafts.json", {"dtype": "dtype"}, shows({"tokens per step": "tokens",
             "of bf16's": "share"}), prepare=drafted),
        Spec("quality", TEXT, AFTER | {"dtype": "mean KL, nats"}, kl, ("setting",), prepare=forced),
        Spec("recall", f"{H200}/calibrated-window-64-f759513.json", {"dtype": "dtype"}, {"recalled": text("recalled",
             ".1%"), "answer's log-probability, nats": text("answer", ".3f")}),
        Spec("biased-keys", {"quality-kbias-cpu/calibrated-window-64.json": "window 64",
             "quality-kbias-cpu/calibrated-no-window.json": "no window"}, AFTER | {"dtype": "mean KL, nats"}, kl,
             ("setting",), prepare=forced),
        Spec("prompts-cpu", "prompts_cpu.csv", {"dtype": "dtype", "calibration": "file", "window": "window"},
             shows({"KL": "kl", "of no file's": "of_no_file", "of fp8's": "of_fp8", "±": "of_fp8_error"})),
        Spec("llama-codes", "llama_codes.csv", CODES, {"mean KL, nats (of fp8's)": fine_kl, "99th percentile":
             text("kl_p99", ".4f"), "99.9th percentile": text("kl_tail", ".4f"), "tokens": text("tokens")},
             prepare=beside_others),
        Spec("demo-model", "quality-cpu/quality.json", {"dtype": "dtype", "bytes": "KV bytes/token"},
             {"perplexity": text("perplexity", ".2f"), "KL mean": text("kl_mean", ".4f"), "top-1": text("top1",
             ".1%"), "recall": text("recalled", ".0%")}),
        Spec("latents", "latent_quality.csv", LATENTS, CODED, prepare=codings, base=FP8),
        Spec("latents-sparse", "sparse_quality.csv", ROWS, PICKED, where={"index_keys": ("fp8",)},
             prepare=sparse_codings, base=FP8_ROWS),
        Spec("latents-sparse-fp32", "sparse_quality.csv", ROWS, PICKS, where={"index_keys": ("fp32",)},
             prepare=sparse_codings, base=FP8_ROWS),
        Spec("latents-window", "latent_window.csv", LATENTS, CODED, prepare=codings, base=FP8),
    ),
}  # fmt: skip
"""Page -> its tables."""
CARDS_PAGE = ("card-generations", "card-reports", "card-fits-8b")
GENERATED: Mapping[str, Mapping[str, Callable[[str], str]]] = {
    "docs/cards.md": {name: make for name, make in cards.TABLES.items() if name in CARDS_PAGE},
    "docs/lab/cards.md": {name: make for name, make in cards.TABLES.items() if name not in CARDS_PAGE},
}
"""Page -> marker -> what makes a table that is not one of rows alone."""


APART = {
    **dict.fromkeys(("cpu", "cpu-amd", "cpu-file", "cpu-intel"), "a CPU"),
    **dict.fromkeys(("mixed-graphs", "mixed-graphs-long", "mixed-graphs-fp8", "mixed-kernels", "agents", "agents-48",
                     "agents-load"), "engines take turns on a card"),
    "qwen-steps": "heads of 256 have had the CUDA kernel since the release",
    "startup-256": "heads of 256 have had the CUDA kernel since the release",
    "captures": "the release timed no capture",
    "mixed-gpt-oss": "sinks and windows could not have whole CUDA graphs at the release",
    "steps-older": "wants FlashAttention 2, which the release's environment lacked",
    "prefixes": "minutes of a server per dtype", "contexts": "needs host memory and a disk", "peers": "several GPUs",
}  # fmt: skip
"""Table of the pages on speed and servers, or of theirs in docs/lab -> why its rows are not the release's."""
SEVERAL = ("steps-older", "contexts", "agents", "agents-load")
"""Tables of these pages that may have rows of several commits or cards until their parts are measured again, or because
each row is an engine of its own setting. All others have one commit, card and environment."""
OLDER = "older"
