"""`PackedCache` in transformers' encoder-decoders, and the transformers that tests run with."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import transformers
from packed_kv import transformers as packed
from packed_kv.transformers import CACHE_ARGUMENT, PackedCache
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

NARROW = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "pad_token_id": 0,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256,
          "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "init_std": 0.3}  # fmt: skip
SOUND = {"num_mel_bins": 80, "max_source_positions": 100, "max_target_positions": 64}
T5 = {"vocab_size": 256, "d_model": 128, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
      "decoder_start_token_id": 0, "initializer_factor": 3.0}  # fmt: skip
ENCODER_DECODERS = {
    "T5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "BART": lambda: BartForConditionalGeneration(
        BartConfig(**NARROW, max_position_embeddings=128, forced_eos_token_id=None)
    ),
    "Whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**NARROW, **SOUND)),
}


class Exact(packed.PackedVectors):
    """Vectors that are held as they come."""

    def append(self, x: torch.Tensor, positions: torch.Tensor, recent: int) -> None:
        if self.tokens:
            self.packed.append(x)
        else:
            self.packed = packed.Tokens(x.clone())

    def read(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.packed.held.clone()


@pytest.fixture(params=ENCODER_DECODERS)
def encoder_decoder(request):
    """A model with random weights, and its input."""
    torch.manual_seed(0)
    model = ENCODER_DECODERS[request.param]().eval()
    return model, torch.randn(1, 80, 200) if request.param == "Whisper" else torch.arange(3, 63)[None]


def decode(model, inputs: torch.Tensor, cache, **options) -> list[int]:
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": 1, "eos_token_id": None, **options}
    return model.generate(inputs, **{CACHE_ARGUMENT: cache}, **options)[0].tolist()


@pytest.mark.parametrize("beams", [1, 2])
def test_they_generate_as_without_packing(encoder_decoder, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vectors that lose nothing, in both caches or in the first."""
    monkeypatch.setattr(packed, "PackedVectors", Exact)
    model, inputs = encoder_decoder
    exact = decode(model, inputs, EncoderDecoderCache(DynamicCache(), DynamicCache()), num_beams=beams)
    for second in (DynamicCache, lambda: PackedCache("tq4")):
        both = EncoderDecoderCache(PackedCache("tq4"), second())
        assert decode(model, inputs, both, num_beams=beams) == exact


def test_cross_attention_reads_what_is_stored(encoder_decoder) -> None:
    model, inputs = encoder_decoder
    both = EncoderDecoderCache(PackedCache("tq4"), PackedCache("tq4", recent_tokens=0))
    decode(model, inputs, both)
    for layer in both.cross_attention_cache.layers:
        new = torch.zeros_like(layer.keys[:, :, :1])
        expected = copy.deepcopy(layer).update(new, new)  # a lone token reads all as it is stored
        assert layer.updates == 1 and layer.get_seq_length() == expected[0].shape[2] - 1 > 32
        for found, one in zip((layer.keys, layer.values), expected, strict=True):
            assert torch.equal(found, one[:, :, :-1])


def test_a_lone_cache_is_refused_in_one_line(encoder_decoder) -> None:
    model, inputs = encoder_decoder
    for config in (None, model.config):
        with pytest.raises(ValueError, match=r"give an encoder-decoder EncoderDecoderCache\(PackedCache\(dtype\), P"):
            decode(model, inputs, PackedCache("tq4", config=config))


def test_keys_come_in_by_update_alone() -> None:
    cache = PackedCache("tq4")
    cache.update(torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 64), layer_idx=0)
    with pytest.raises(NotImplementedError, match="keys and values come in by update alone"):
        cache.layers[0].keys = torch.randn(1, 2, 3, 64)


def test_the_transformers_that_is_meant() -> None:
    assert os.environ.get("EXPECTED_TRANSFORMERS", transformers.__version__) == transformers.__version__
    is_new = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    assert ("cache" if is_new else "past_key_values") == CACHE_ARGUMENT
