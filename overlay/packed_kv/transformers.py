"""A KV cache for Hugging Face transformers that holds packed bytes.

    model.generate(**inputs, past_key_values=PackedCache("tq4"))

Every token lies as in the engine's pages (docs/formats.md), and the newest ones of a sequence once more in 8 bits
(`codecs/ring.py`), as in vLLM. The model's attention wants keys and values whole, so each layer unpacks its own, for as
long as its attention takes: this saves memory, not time. On a CPU the C++ library of the engine stores and reads
(`packed_tokens.py`), where there is a compiler; elsewhere PyTorch does, and a
decode step takes about 4 times as long.

What attention reads: a lone token, all of it as it is stored, its own key and value included, the newest from the 8
bits; several tokens at once, a prompt or a part of one, those before them as they are stored and their own as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .calibration_file import Calibration, LayerCalibration, heads_in_words, load
from .codecs import format_named
from .codecs.pages import PagedCodec
from .layout import RECENT_TOKENS
from .packed_tokens import PackedTokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .formats import Format


@dataclass
class _Settings:
    """What all layers of a cache share. `starts`: int64 [sequences], the column of each one's first token, or None:
    column 0."""

    fmt: Format
    recent_tokens: int
    calibration: Calibration | None
    starts: torch.Tensor | None

    def codec(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> PagedCodec:
        """That of a layer with keys and values [sequences, KV heads, tokens, head_dim]. Raises ValueError."""
        sizes = key.shape[1], key.shape[-1], value.shape[-1]
        known = LayerCalibration() if self.calibration is None else self._known(self.calibration, layer, sizes)
        return PagedCodec(self.fmt, key.shape[-1], known.key, known.value, key.device, value.shape[-1])

    def _known(self, file: Calibration, layer: int, sizes: tuple[int, int, int]) -> LayerCalibration:
        """`sizes`: KV heads, and their channels in keys and values."""
        if layer not in file.layers:
            file.refuse(f"has no entry for layer {layer}")
        if (file.layers[layer].kv_heads, file.head_size, file.value_head_size) != sizes:
            ours = heads_in_words([sizes[0]], *sizes[1:])
            file.refuse(f"made for another model: {file.heads}, layer {layer} has {ours}")
        return file.layers[layer].taken_by(self.fmt)


class PackedCache(Cache):
    """A cache for `generate`, `forward` and their like; one object for one batch of sequences.

    Args:
        dtype: a KV-cache dtype (`packed_kv.FORMATS`).
        recent_tokens: newest tokens of a sequence that are read at 8 bits; 0: none.
        calibration: a turboquant_kv.json of this model (`tq-calibrate`); None: none.
        config: the model's. With it, layers with a sliding window hold that many tokens; without, all of them.
        attention_mask: of the prompts, [sequences, tokens], 0 for padding. Needed where prompts are padded on the left
            and the calibration has means of keys, as these are by position. Beams share their sequence's.

    Raises:
        ValueError: an unknown dtype, a recent_tokens below 0, a mask of another shape, a calibration that does not fit
            (`CalibrationError`); at the first token of a layer, a head_dim that is no multiple of 16.
        NotImplementedError: layers that are no attention (Mamba, convolutions), or attend otherwise.
    """

    def __init__(
        self,
        dtype: str,
        *,
        recent_tokens: int = RECENT_TOKENS,
        calibration: str | os.PathLike[str] | None = None,
        config: PreTrainedConfig | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> None:
        if recent_tokens < 0:
            raise ValueError(f"recent_tokens must be 0 or more, got {recent_tokens}")
        file = None if calibration is None else load(calibration)
        self.settings = _Settings(format_named(dtype), recent_tokens, file, _starts(attention_mask))
        if config is None:
            super().__init__(layer_class_to_replicate=self._next_layer)  # made as they come
            return
        layers = [self._layer(number, plain) for number, plain in enumerate(DynamicCache(config=config).layers)]
        if file is not None and max(file.layers) >= (count := config.get_text_config(decoder=True).num_hidden_layers):
            file.refuse(f"made for another model: lists layer {max(file.layers)}, this model has 0 to {count - 1}")
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all packed tokens and of the recent ones. Memory ends with a micro-block of 16 tokens, and has room
        for up to an eighth more."""
        return sum(layer.nbytes for layer in self.layers)

    def reset(self, attention_mask: torch.Tensor | None = None) -> None:
        """Drop all tokens. `attention_mask`: of the prompts that come next, as for the class."""
        self.settings.starts = _starts(attention_mask)
        super().reset()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("PackedCache holds keys and values only: this model has convolution states")

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("PackedCache holds keys and values only: this model has recurrent states")

    def update_indexer(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("PackedCache holds keys and values only: this model has an indexer's keys")

    def _next_layer(self) -> PackedLayer:
        return PackedLayer(self.settings, len(self.layers))

    def _layer(self, number: int, plain: Any) -> PackedLayer:
        """In the place of the layer that transformers would make."""
        if type(plain) is DynamicLayer:
            return PackedLayer(self.settings, number)
        if type(plain) is DynamicSlidingWindowLayer:
            return PackedSlidingLayer(self.settings, number, plain.sliding_window)
        raise NotImplementedError(f"PackedCache holds keys and values only: layer {number} is a {type(plain).__name__}")


def _starts(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must be [sequences, tokens], got {tuple(attention_mask.shape)}")
    return (attention_mask != 0).int().argmax(-1)


class PackedLayer(DynamicLayer):
    """One layer's keys and values. `keys` and `values` of its base stay None: nothing is held but packed bytes."""

    def __init__(self, settings: _Settings, number: int, **window: int) -> None:
        super().__init__(**window)
        self.settings, self.number = settings, number
        self.tokens: PackedTokens | None = None
        self.cumulative_length = 0
        """Tokens that came in; a sliding window holds the last of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tokens and of the recent ones."""
        return 0 if self.tokens is None else self.tokens.nbytes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        codec = self.settings.codec(self.number, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        starts = self._starts(len(key_states))
        self.tokens = PackedTokens(codec, key_states.shape[1], starts, self.settings.recent_tokens)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens [sequences, KV heads, tokens, head_dim]; returns all, in the dtype of the first ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens, states = self.tokens, (key_states, value_states)
        assert tokens is not None
        is_decode = key_states.shape[2] == 1
        before = () if is_decode or not tokens.held else tokens.read(self.dtype)
        tokens.append(*states)
        self.cumulative_length = tokens.end
        if is_decode:
            return tokens.read(self.dtype)
        if not before:
            return states
        key, value = (torch.cat(pair, dim=2) for pair in zip(before, states, strict=True))
        return key, value

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        self.tokens, self.cumulative_length, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens: as many as the number is below 0, or, above 0, all but that many."""
        length = self.cumulative_length
        remove = -tokens_to_remove if tokens_to_remove <= 0 else max(0, length - tokens_to_remove)
        if self.tokens is not None:
            self.tokens.remove_last(remove)
            self.cumulative_length = self.tokens.end

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda x: x[indices.to(x.device)])

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace what sequences have by `change` of it."""
        if self.tokens is not None:
            self.tokens.change(change)

    def _starts(self, sequences: int) -> torch.Tensor:
        """int64 [sequences], for beams each prompt's as often as it has beams."""
        given = self.settings.starts
        if given is None:
            return torch.zeros(sequences, dtype=torch.int64, device=self.device)
        if sequences % len(given):
            raise ValueError(f"attention_mask has {len(given)} sequences, the batch {sequences}")
        return given.to(self.device).repeat_interleave(sequences // len(given))


class PackedSlidingLayer(PackedLayer, DynamicSlidingWindowLayer):
    """One layer with a sliding window, of which it holds the last tokens that a next one could see."""

    def __init__(self, settings: _Settings, number: int, sliding_window: int) -> None:
        super().__init__(settings, number, sliding_window=sliding_window)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().update(key_states, value_states)
        if self.tokens is not None:
            self.tokens.keep_last(self.sliding_window - 1)
        return found

    def activate_past_recording(self) -> NoReturn:
        raise NotImplementedError("PackedCache: drafts over a sliding window, whose tokens cannot come back")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.cumulative_length >= self.sliding_window:
            raise NotImplementedError("PackedCache: a full sliding window cannot be cropped, older tokens are gone")
        super().crop(tokens_to_remove)
