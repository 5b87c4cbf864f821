"""Names of vLLM's models whose layers packed pages cannot serve, where no field of a config.json tells it.

`tests/model/test_architectures.py` reads vLLM's sources and fails for a model with such layers that is not named here.
Names of architectures are beginnings, so that "Step5" is "Step5ForCausalLM" and "Step5MTP", too. Imports nothing.
"""

from __future__ import annotations

IGNORES_KV_CACHE_DTYPE = ("FalconForCausalLM", "RWForCausalLM")
"""Architectures, whole names, that make their attention layers without a `cache_config` (vLLM's `falcon.py`)."""
OWN_BACKENDS = (
    "DeepSeekV4", "DeepseekV4", "ExtractHiddenStates", "Flint", "Inkling", "MiniMaxM3", "Qwen4Exp", "Step5",
    "VoxtralRealtime",
)  # fmt: skip
"""Architectures whose layers choose an attention backend themselves, or write and read their pages themselves."""
SPARSE = ("Glm5Next",)
"""Architectures whose layers read only some tokens of the cache, whatever their configs say."""
PLAIN_SPARSE_LATENTS = ("HYV4",)
"""Architectures of `SPARSE_LATENTS` whose layers are vLLM's plain ones, also on CUDA. Their models keep a batch's store
and attention together: in one part of a CUDA graph, or outside of it."""
SPARSE_LATENTS = ("DeepseekV32", "GlmMoeDsa", *PLAIN_SPARSE_LATENTS)
"""Architectures, including drafts, whose layers read picked latents and have a class that packed pages serve."""
BOTH_WAYS = ("HrmText",)
"""Architectures whose prompts are read in both directions (prefix LM)."""
LATENT_SINKS = ("HYV4",)
"""Architectures with latent attention, learned sinks, and `layer_types` that say which layers pick tokens."""
OWN_LATENTS = ("Dots3Note",)
"""Architectures whose latent attention has a layer class of its own. Kimi's class is served."""
LAYER_OPTIONS = {"Rnj1": "chunk_lookback"}
"""Architecture -> arguments of its attention layers that packed attention does not know."""
ENCODERS = (
    "Bert", "BgeM3", "ColBERT", "ColModernVBert", "ColUltraVBert", "Gte", "HF_ColBERT", "LlamaBidirectional",
    "LlamaNemotronVLForSequence", "LlamaNemotronVLModel", "ModernBert", "ModernVBert", "NomicBert",
    "OpenAIPrivacyFilter", "Roberta", "VoyageQwen3Bidirectional", "XLMRoberta",
)  # fmt: skip
"""Architectures of encoders."""
ENCODERS_UNLESS_DECODERS = ("JinaEmbeddingsV5",)
"""Architectures of encoders if their configs have `is_decoder` false."""
ENCODER_DECODERS = ("CohereAsr", "NemotronParse", "Whisper")
"""Architectures of encoders with decoders that read them."""
OWN_DRAFTS = (
    "DFlash", "DSpark", "Gemma4DSpark", "K3DSpark", "LiLiCorr", "MuseGlimmerAssistant", "MuseSparkDSpark",
    "Qwen3DSpark", "Qwen3OmniDSpark", "Qwen3XPress",
)  # fmt: skip
"""Architectures of drafts that store the keys and values of their context themselves."""
OWN_DRAFT_METHODS = ("dflash", "dspark")
"""Speculative methods of such drafts."""

ALIBI = ("bloom", "mpt", "step1")
"""Model types with ALiBi, whatever else their configs say."""
ENCODER_TYPES = ("bert", "clip", "gte", "modernbert", "new", "nomic_bert", "roberta", "siglip", "xlm-roberta")
"""Model types of encoders."""
IMAGE_PREFIXES = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma")
"""Model types whose image tokens attend to each other in both directions (vLLM's `is_mm_prefix_lm`)."""
DRAFTS_WITHOUT_A_CACHE = ("gemma4_assistant", "gemma4_mtp", "gemma4_unified_assistant")
"""Model types of drafts whose layers read the KV cache of the model's layers."""

TRIED = (
    "AfmoeForCausalLM", "ApertusForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "DbrxForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM", "ExaoneMoeForCausalLM", "FalconH1ForCausalLM", "FlexOlmoForCausalLM", "GPT2LMHeadModel",
    "GPTJForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM", "Gemma4ForCausalLM", "GemmaForCausalLM",
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM",
    "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "HYV3ForCausalLM", "HunYuanDenseV1ForCausalLM",
    "IQuestLoopCoderForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM", "LagunaForCausalLM", "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Llama4ForCausalLM", "LlamaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiMoV2FlashForCausalLM",
    "MiniCPM3ForCausalLM", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM",
    "MixtralForCausalLM", "NemotronForCausalLM", "NemotronHForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM",
    "Olmo3ForCausalLM", "OlmoHybridForCausalLM", "OlmoeForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM",
    "PhiMoEForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration", "SeedOssForCausalLM", "SmolLM3ForCausalLM", "SolarForCausalLM",
    "StableLmForCausalLM", "Starcoder2ForCausalLM", "Step3p5ForCausalLM", "Zamba2ForCausalLM",
)  # fmt: skip
"""Architectures, whole names, that were served and compared with `auto`: benchmarks/results/models.json, tests."""
