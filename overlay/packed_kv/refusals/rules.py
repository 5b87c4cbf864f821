"""The ordered rules of what packed pages cannot serve, and the rules by which an engine has no recent window;
`table.py` applies both. Imports no torch and no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..formats import FORMATS, GROUP_SIZE, HEAD_DIM_MULTIPLE, fits_value_dim
from ..gpu_generations import LEAST_CAPABILITY
from ..json_file import printable
from ..layout import MEAN_BLOCK, MICRO_BLOCK
from ..model.architectures import (
    BOTH_WAYS,
    IGNORES_KV_CACHE_DTYPE,
    LAYER_OPTIONS,
    OWN_BACKENDS,
    OWN_DRAFT_METHODS,
    OWN_DRAFTS,
    OWN_LATENTS,
    SPARSE,
    SPARSE_LATENTS,
)
from ..model.shape import MAX_PADDING
from .facts import Connector, Facts

AUTO_OPTION = "--kv-cache-dtype auto"
AUTO = f"use {AUTO_OPTION} for this model"
DRAFT_AUTO = 'add "kv_cache_dtype": "auto" to --speculative-config'
"""Remedy for a draft that packed pages cannot serve: the model keeps its dtype."""
SPARSE_SIZES = (512, 64)
"""Channels of latents and of their RoPE in sparse attention, as FlashMLA's kernel has them."""
SPARSE_CAPABILITIES = (9, 10)
"""Major compute capabilities of FlashMLA's kernel."""

CONNECTORS = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "DecodeBenchConnector",
)
"""KV connectors of vLLM that find pages by vLLM's block hashes, compare its compatibility hash, or share no pages."""
WINDOW_CONNECTORS = ("OffloadingConnector", "NixlConnector", "NixlPullConnector")
"""KV connectors that were seen to leave the recent window's blocks alone."""


class Rule(NamedTuple):
    """One row.

    `subject`: what cannot be served. `read`: returns what was read, in words; anything but words refuses nothing.
    `source`: where it was read. `remedy`: what to do. `is_of_model`: a model's config.json tells it, so `plan` and
    `doctor` apply the rule, too. `option`: the option of vLLM with which such a model is still served, or "".
    """

    subject: str
    source: str
    read: Callable[[Facts], object]
    remedy: str = AUTO
    is_of_model: bool = False
    option: str = ""


def _connectors(facts: Facts) -> tuple[Connector, ...]:
    return facts.engine.connectors or ()


def _connector_without_format(facts: Facts) -> str | None:
    names = [connector.name for connector in _connectors(facts) if connector.name not in CONNECTORS]
    return f"{names[0]}, whose keys do not name the format of a page" if names else None


def _decode_kernel(f: Facts) -> str | None:
    chosen = f.given.decode_kernel
    if chosen in ("triton", "cuda") and (f.engine.platform == "cpu" or f.given.is_fp32):
        device = "a CPU" if f.engine.platform == "cpu" else "float32"
        return f"{chosen}, a choice between kernels of CUDA in fp16 and bf16, and this is {device}"
    return f"cuda, and {f.given.not_cuda}" if chosen == "cuda" and f.given.not_cuda else None


def _connector_without_handshake(facts: Facts) -> str | None:
    unsafe = [c.name for c in _connectors(facts) if not c.options.get("enforce_handshake_compat", True)]
    return f"{unsafe[0]} with enforce_handshake_compat false" if unsafe else None


def _value_size(facts: Facts) -> str | None:
    """Heads of V have at most K's channels, in multiples of `HEAD_DIM_MULTIPLE`."""
    key, value = facts.layer.head_size, facts.layer.value_size
    if key is None or value is None or key % HEAD_DIM_MULTIPLE or fits_value_dim(key, value):
        return None
    most = f"V may have at most as many as K, in multiples of {HEAD_DIM_MULTIPLE}"
    return f"V of {value} channels with K of {key}; {most}"


def _latent_size(facts: Facts) -> str | None:
    """Latents and their RoPE channels come in whole groups, and of one size in a model."""
    rank, rope = facts.latents.rank, facts.latents.rope_size
    if rank is not None and rope is not None and (rank <= 0 or rank % GROUP_SIZE or rope <= 0 or rope % GROUP_SIZE):
        return f"{rank} channels and {rope} of RoPE, and packed pages need multiples of {GROUP_SIZE}"
    if facts.latents.built_size is not None and facts.latents.size != facts.latents.built_size:
        return f"{facts.latents.size} channels with RoPE's in a layer, and the model's have {facts.latents.built_size}"
    return None


SLIDING = "sliding_window"
"""The word of `--kv-cache-dtype-skip-layers` for all layers with a sliding window."""


def _names_no_layer(facts: Facts) -> str | None:
    """vLLM compares the words with a layer's number as text, and ignores words that match no layer."""
    numbers = facts.cache.layer_numbers
    for written in facts.cache.skip_layers or ():
        shown = printable(repr(written), 60)
        if written == SLIDING:
            if facts.cache.slides is False:
                return f"{shown}, and no layer has one"
        elif not (written.isascii() and written.isdecimal() and str(int(written[:18])) == written):
            return f"{shown}, which is neither a layer's number nor {SLIDING}"
        elif numbers is not None and int(written) not in numbers:
            return f"{shown}, and layers with a KV cache have numbers from {min(numbers)} to {max(numbers)}"
    return None


def _padded(facts: Facts) -> str | None:
    skipped, (size, used) = facts.cache.skip_layers, facts.pages.size or (0, 0)
    if not skipped or size <= MAX_PADDING * used:
        return None
    return (
        f"--kv-cache-dtype-skip-layers {' '.join(skipped)}, with which a packed page of {used} bytes would take {size}"
        ", as layers of several kinds share pages of one size"
    )


def _cut_mean_block(facts: Facts) -> str | None:
    """Each rank needs whole tiles of 32 tokens of each block of positions with one mean."""
    ranks, run, has_means = facts.parallel.dcp or 1, facts.parallel.dcp_run or 1, facts.parallel.has_mean_blocks
    if ranks == 1 or not has_means or not (MEAN_BLOCK % (32 * ranks) or MEAN_BLOCK % (run * ranks)):
        return None
    return f"{ranks} ranks in runs of {run}, which do not have whole tiles of 32 of each {MEAN_BLOCK} positions"


def _dcp(
    what: str, applies: Callable[[Facts], object], source: str, why: str = "",
    remedy: str = "use --decode-context-parallel-size 1",
) -> Rule:  # fmt: skip
    """A row of `--decode-context-parallel-size`, which deals a request's tokens out to ranks."""
    return Rule(
        f"--decode-context-parallel-size with {what}",
        source,
        lambda f: (f.parallel.dcp or 1) > 1 and bool(applies(f)) and f"{f.parallel.dcp} ranks{why and ', and '}{why}",
        remedy,
    )


def _is_named(facts: Facts, beginnings: tuple[str, ...]) -> bool:
    return (facts.architecture.name or "").startswith(beginnings)


def _layer_options(facts: Facts) -> str:
    by_name = (option for beginning, option in LAYER_OPTIONS.items() if _is_named(facts, (beginning,)))
    return ", ".join(facts.layer.options or by_name)


def _model(facts: Facts) -> str:
    return facts.architecture.name or "the model"


RULES: tuple[Rule, ...] = (
    Rule("this platform", "vLLM's platform",
         lambda f: f.engine.platform not in (None, "cuda", "cpu")
         and f"{f.engine.platform}, and packed pages need CUDA or a CPU",
         "use --kv-cache-dtype auto here"),
    Rule("this GPU", "its compute capability",
         lambda f: f.engine.capability is not None and f.engine.capability < LEAST_CAPABILITY
         and "compute capability {}.{}, and packed pages need 8.0 or later".format(*f.engine.capability),
         "use another GPU, or --kv-cache-dtype auto"),
    Rule("models that do not pass cache_config to their attention layers", "`architectures`",
         lambda f: f.architecture.name in IGNORES_KV_CACHE_DTYPE
         and f"{f.architecture.name}, whose pages would stay dense",
         is_of_model=True),
    Rule("dense latent attention (MLA) with attention sinks", "`layer_types`, `learnable_sink`, `architectures`",
         lambda f: f.latents.has_dense_layers
         and f"{_model(f)}, some of whose layers read all tokens; packed pages have sinks in those that pick tokens",
         is_of_model=True),
    Rule("sparse attention", "`index_topk`, `architectures`; vLLM's `use_sparse`",
         lambda f: (f.latents.is_sparse or _is_named(f, SPARSE)) and not _is_named(f, SPARSE_LATENTS)
         and f"{_model(f)}, whose layers read only some tokens of the cache",
         is_of_model=True),
    Rule("sparse attention over latents of this size", "`kv_lora_rank`, `qk_rope_head_dim`",
         lambda f: f.latents.is_sparse
         and (f.latents.rank or SPARSE_SIZES[0], f.latents.rope_size or SPARSE_SIZES[1]) != SPARSE_SIZES
         and f"{f.latents.rank} channels and {f.latents.rope_size} of RoPE, and kernels need {SPARSE_SIZES[0]} and "
         f"{SPARSE_SIZES[1]}",
         is_of_model=True),
    Rule("sparse attention with this vLLM", "its version and patches",
         lambda f: f.latents.is_sparse and f.vllm.version_without_rows
         and f"{f.vllm.version_without_rows}, whose layers write their cache themselves; 0.33.0 with this package's "
         "patches can", "upgrade vLLM, run packed-kv-patch revert and apply, or use --kv-cache-dtype auto"),
    Rule("sparse attention on this GPU", "its compute capability",
         lambda f: f.latents.is_sparse and f.engine.platform == "cuda" and f.engine.capability is not None
         and f.engine.capability[0] not in SPARSE_CAPABILITIES
         and "compute capability {}.{}, and vLLM's FlashMLA needs 9.0 or 10.x".format(*f.engine.capability)),
    Rule("sparse attention with --prefill-context-parallel-size", "the option",
         lambda f: f.latents.is_sparse and (f.parallel.pcp or 1) > 1
         and f"{f.parallel.pcp} ranks, whose tokens are gathered as plain rows",
         "use --prefill-context-parallel-size 1"),
    Rule("sparse attention with a cache on the host", "`hisparse_config` of `--attention-config`",
         lambda f: f.latents.is_sparse and f.cache.has_host_cache
         and "hisparse_config, whose rows are those of plain dtypes",
         "leave out hisparse_config"),
    Rule("sparse attention with a KV connector", "`--kv-transfer-config`",
         lambda f: f.latents.is_sparse and f.engine.connector
         and f"{f.engine.connector}, which was not tried with latent rows beside index keys",
         "leave out --kv-transfer-config"),
    Rule("latent attention (MLA) in layers of their own kind", "`architectures`; a layer's class",
         lambda f: (f.latents.layer_class
                    and f"{f.layer.name} is a {f.latents.layer_class}, which writes its cache itself")
         or (_is_named(f, OWN_LATENTS) and f"{f.architecture.name}, whose layers write their cache themselves"),
         is_of_model=True),
    Rule("latent attention (MLA) with state layers", "vLLM's patches",
         lambda f: f.latents.is_mla and f.architecture.has_states and f.vllm.states_fit is False
         and f"{_model(f)}, and vLLM has patches of an older packed-kv, with which it sizes latents as plain ones",
         "run packed-kv-patch revert, then apply"),
    Rule("latent attention (MLA) of this size", "`kv_lora_rank`, `qk_rope_head_dim`", _latent_size, is_of_model=True),
    Rule("latent attention (MLA) with this vLLM", "its version",
         lambda f: f.latents.is_mla and f.vllm.version_without_latents
         and f"{f.vllm.version_without_latents}; 0.32.0 and later can",
         "upgrade vLLM, or use --kv-cache-dtype auto"),
    Rule("latent attention (MLA) with a sliding window", "a layer",
         lambda f: f.latents.is_mla and f.attention.sliding_window is not None
         and f"{f.attention.sliding_window} tokens"),
    Rule("latent attention (MLA) with skipped layers", "`--kv-cache-dtype-skip-layers`",
         lambda f: f.latents.is_mla and f.cache.skip_layers
         and f"{' '.join(f.cache.skip_layers)}, whose pages vLLM cannot pad to one size",
         "leave out --kv-cache-dtype-skip-layers"),
    Rule("latent attention (MLA) with LoRA", "`--enable-lora`",
         lambda f: f.latents.is_mla and f.engine.has_lora
         and "adapters of kv_b_proj would not reach the folded weights",
         "leave out --enable-lora, or use --kv-cache-dtype auto"),
    Rule("encoders", "`is_encoder_decoder`, `model_type`, `architectures`, `is_causal`; a layer's `attn_type`",
         lambda f: f.attention.kind not in (None, "decoder")
         and f"{f.attention.kind} attention, and packed pages hold decoders'",
         is_of_model=True),
    Rule("prompts that are read in both directions", "`architectures`; a layer's KV-cache spec; a batch",
         lambda f: (f.attention.is_causal is False or _is_named(f, BOTH_WAYS))
         and f"{_model(f)}, and packed attention is causal", is_of_model=True),
    Rule("ALiBi", "`model_type`, `alibi`; a layer's `alibi_slopes`",
         lambda f: f.attention.has_alibi and f"{_model(f)}, whose scores depend on the distance by a slope",
         is_of_model=True),
    Rule("models that choose their own attention backend", "`architectures`; a layer's backend",
         lambda f: (f.layer.own_backend and f"{f.layer.name} has {f.layer.own_backend}, which cannot read packed pages")
         or (_is_named(f, OWN_BACKENDS) and f"{f.architecture.name}, whose backend reads other pages"),
         is_of_model=True),
    Rule("static attention sinks", "`param_sink_number`; a layer's KV-cache spec",
         lambda f: f.attention.has_static_sinks
         and f"{_model(f)}, which prepends learned key/value parameters to every request",
         is_of_model=True),
    Rule("this kind of KV cache", "`rswa_window`; a layer's KV-cache spec",
         lambda f: f.pages.kind and f"a {f.pages.kind}, whose tokens packed attention would read as plain ones",
         is_of_model=True),
    Rule("draft layers that read the model's KV cache", "`model_type`; `kv_sharing_target_layer_name`",
         lambda f: f.pages.owner and not f.pages.owner_dtype and f"{f.layer.name} reads that of {f.pages.owner}",
         "use another speculative method, or none", is_of_model=True),
    Rule("this head size", "`head_dim`, `hidden_size`",
         lambda f: f.layer.head_size is not None and (f.layer.head_size <= 0 or f.layer.head_size % HEAD_DIM_MULTIPLE)
         and f"{f.layer.head_size} channels, and packed pages need a multiple of {HEAD_DIM_MULTIPLE}",
         is_of_model=True),
    Rule("this head size of V", "`v_head_dim`; a layer's `head_size_v`", _value_size, is_of_model=True),
    Rule("this head size of V", "a layer and its implementation",
         lambda f: None not in (f.layer.value_size, f.layer.built_value_size)
         and f.layer.value_size != f.layer.built_value_size
         and f"{f.layer.name} has V of {f.layer.value_size} channels, and its attention was built for "
         f"{f.layer.built_value_size}"),
    Rule("attention sinks of this shape", "a layer's `sinks`",
         lambda f: f.attention.sinks is not None and f.attention.sinks != (f.layer.query_heads,)
         and f"{list(f.attention.sinks)}, and packed pages need one number for each of {f.layer.query_heads} query "
         "heads"),
    Rule("these options of an attention layer", "`architectures`, `dual_chunk_attention_config`; a layer's arguments",
         lambda f: (options := _layer_options(f)) and f"{options}, which the packed backends do not know",
         is_of_model=True),
    Rule("images whose tokens attend to each other in both directions", "`model_type`; vLLM's `use_mm_prefix`",
         lambda f: f.attention.has_image_prefix and f"{_model(f)}, and packed attention is causal",
         "use --language-model-only, or --kv-cache-dtype auto", is_of_model=True, option="--language-model-only"),
    Rule("this block size", "`--block-size`",
         lambda f: f.cache.block_size is not None and f.cache.block_size % MICRO_BLOCK
         and f"{f.cache.block_size} tokens, and packed pages need a multiple of {MICRO_BLOCK}",
         f"use --block-size {MICRO_BLOCK}, or --kv-cache-dtype auto"),
    Rule("fused output quantization", "`output_scale`",
         lambda f: f.layer.has_output_scale and "packed attention returns its output unquantized",
         "leave out vLLM's fusion of attention and quantization, or use --kv-cache-dtype auto"),
    Rule("this speculative method", "`--speculative-config`",
         lambda f: f.drafts.method == "extract_hidden_states"
         and "extract_hidden_states, which stores hidden states as KV", "use another method, or none"),
    Rule("drafts that write their KV cache themselves", "`--speculative-config`; a draft's `architectures`",
         lambda f: ((f.drafts.is_packed and f.drafts.method in OWN_DRAFT_METHODS) or _is_named(f, OWN_DRAFTS))
         and f"{f.drafts.method or f.architecture.name}, whose tokens may attend to later ones, too",
         DRAFT_AUTO, is_of_model=True),
    Rule("this KV connector", "`--kv-transfer-config`", _connector_without_format,
         f"use one of {', '.join(CONNECTORS)}, or none"),
    Rule("this KV connector", "`--kv-transfer-config`", _connector_without_handshake,
         "leave out enforce_handshake_compat, as pages of a peer may differ"),
    Rule("--kv-sharing-fast-prefill", "the option",
         lambda f: f.engine.has_fast_prefill and "the host learns of its batches too late to schedule them",
         "leave the option out"),
    Rule("--enable-dbo and --ubatch-size", "the options",
         lambda f: f.engine.has_micro_batches and "two batches would share one schedule", "leave the options out"),
    Rule("packed_kv.decode_kernel", "`--additional-config`",
         _decode_kernel, "leave decode_kernel out"),
    Rule("packed_kv.latent_rope_bits", "`--additional-config`",
         lambda f: f.given.latent_rope_bits == 8 and f.given.has_latents is False
         and f"8, and {_model(f)} has no latents (MLA)", "leave latent_rope_bits out"),
    _dcp("--dcp-q-replicate", lambda f: f.latents.is_mla and f.parallel.has_own_queries,
         "the option; `VLLM_DCP_Q_REPLICATE`", "its weights are copied before latents' are folded into them",
         "leave out --dcp-q-replicate and VLLM_DCP_Q_REPLICATE"),
    _dcp("vLLM's CPU platform", lambda f: f.engine.platform == "cpu", "vLLM's platform",
         "it cannot place tokens by rank"),
    _dcp("--dcp-comm-backend a2a", lambda f: f.parallel.dcp_backend == "a2a", "the option", "ag_rs is supported"),
    _dcp("drafts", lambda f: f.drafts.method, "`--speculative-config`",
         "drafts need a causal mask over the tokens of several ranks"),
    _dcp("a KV connector", lambda f: f.engine.connector, "`--kv-transfer-config`"),
    _dcp("sparse attention", lambda f: f.latents.is_sparse, "the model", "picks are of all ranks' tokens"),
    _dcp("state layers", lambda f: f.architecture.has_states, "the model", "each rank has a state whole"),
    _dcp("chunked attention", lambda f: f.architecture.has_chunks, "the model",
         "its layers see a request as one of each chunk"),
    _dcp("a sliding window", lambda f: f.attention.sliding_window, "a layer"),
    _dcp("attention sinks", lambda f: f.attention.sinks, "a layer"),
    _dcp("another layer's KV cache", lambda f: f.pages.is_shared, "a layer"),
    Rule("--decode-context-parallel-size with means of keys by position", "a calibration file", _cut_mean_block,
         "use 2, 4, 8 or 16 ranks with --cp-kv-cache-interleave-size 1, or a calibration file without ropes"),
    Rule("this word of --kv-cache-dtype-skip-layers", "the option; the model's layers", _names_no_layer,
         f"write layer numbers separated by spaces, such as 0 35, or {SLIDING}"),
    Rule("skipped layers that share a KV cache", "`--kv-cache-dtype-skip-layers`; `kv_sharing_target_layer_name`",
         lambda f: f.pages.owner_dtype
         and f"{f.layer.name} reads the cache of {f.pages.owner}, which is {f.pages.owner_dtype}",
         "name both or none of them in --kv-cache-dtype-skip-layers"),
    Rule("skipped layers of chunked attention", "`--kv-cache-dtype-skip-layers`",
         lambda f: f.pages.skipped_dtype is not None and f.pages.skipped_dtype not in FORMATS
         and f"a layer with {f.pages.skipped_dtype} pages, which cannot share a block with packed ones",
         "name other layers in --kv-cache-dtype-skip-layers"),
    Rule("these skipped layers", "`--kv-cache-dtype-skip-layers`", _padded, "leave out --kv-cache-dtype-skip-layers"),
    Rule("this configuration", "what vLLM says of the backend",
         lambda f: f.vllm.backend_reasons and ", ".join(f.vllm.backend_reasons)),
)  # fmt: skip

WINDOW_RULES: tuple[Rule, ...] = (
    Rule("sparse attention", "the model",
         lambda f: f.latents.is_sparse and "its layers read picked tokens, which may be recent ones or not"),
    Rule("latent attention (MLA) with other pages", "the draft's dtype and its layers",
         lambda f: f.latents.is_mla and (f.cache.has_other_dtypes or (f.drafts.has_cache and f.drafts.method != "mtp"))
         and "vLLM cannot pad pages of latents to one size"),
    Rule("decode context parallelism", "`--decode-context-parallel-size`",
         lambda f: (f.parallel.dcp or 1) > 1 and "it distributes a request's tokens over ranks"),
    Rule("--disable-hybrid-kv-cache-manager", "the option",
         lambda f: f.cache.has_one_manager and "some KV connectors imply it"),
    Rule("this KV connector", "`--kv-transfer-config`",
         lambda f: ", ".join(c.name for c in _connectors(f) if c.name not in WINDOW_CONNECTORS)),
    Rule("a KV connector", "vLLM's patches",
         lambda f: f.engine.connector is not None and f.vllm.groups_stay is False
         and f"{f.engine.connector}, and vLLM has patches of an older packed-kv; run packed-kv-patch revert, then "
         "apply"),
    Rule("pipeline parallelism", "`--pipeline-parallel-size`",
         lambda f: (f.parallel.pipeline or 1) > 1
         and bool(f.drafts.has_cache
                  or (f.cache.has_other_dtypes and (f.architecture.has_states or f.architecture.has_several_kinds)))
         and "its stages would lay out their pages differently with "
         + ("layers of another KV-cache dtype" if f.cache.has_other_dtypes else "a draft's layers")),
)  # fmt: skip
"""Rules by which an engine has no recent window; it serves without one, and its log says so."""
