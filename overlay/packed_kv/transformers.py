"""A KV cache for Hugging Face transformers that holds packed bytes.

    model.generate(**inputs, past_key_values=PackedCache("tq4"))    # cache=, from transformers 5.24 on

Every token lies as the reference codec packs it (docs/formats.md), and the newest ones of a sequence once more in 8
bits (`codecs/ring.py`), as in vLLM. The model's attention wants keys and values whole, so each layer unpacks its own,
for as long as its attention takes (`packed_vectors.py`): this saves memory, not time.

A single token reads all keys and values as stored, its own included, the newest ones at 8 bits. Several tokens at once
(a prompt or a part of it) read earlier tokens as stored, and their own unquantized.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from .calibration_file import Calibration, heads_in_words, load
from .channel_calibration import LayerCalibration
from .codecs import format_named
from .codecs.pages import PagedCodec
from .json_file import printable
from .kernels.cpu.compiler import BuildError
from .kernels.cpu.layer import ELEMENT_TYPES
from .kernels.cpu.vectors import CpuVectors
from .kernels.served import Pairs, cpp_lacks
from .layout import RECENT_TOKENS
from .packed_vectors import PackedVectors, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .formats import Format

logger = logging.get_logger(__name__)

_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = "cache" if "cache" in _PARAMETERS else "past_key_values"
"""Name by which `generate` and `forward` take a cache: "cache" from transformers 5.24 on, the other one before."""


SLOWER = "3 to 5 times"
"""Ratio of a generate step's time in PyTorch to its time with the kernels, as benchmarks/cpu_cache.py measures it."""


@dataclass
class _Settings:
    """Settings that all layers of a cache share. `mask`: bool [sequences, tokens] of the prompts, False for padding, or
    None."""

    fmt: Format
    recent_tokens: int
    calibration: Calibration | None
    mask: torch.Tensor | None

    def codec(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> PagedCodec:
        """Make a layer's codec, for keys and values [sequences, KV heads, tokens, head_dim]. Raises ValueError."""
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
        return file.taken_by(self.fmt, file.layers[layer])


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
        ValueError: an unknown dtype, a recent_tokens that is no count, a mask of another shape or of other numbers than
            0 and 1, a calibration that does not fit (`CalibrationError`); at the first token of a layer, a head_dim
            that is no multiple of 16, and a mask that is not the prompts'.
            Two updates of a layer before the next one's first, by an encoder-decoder without EncoderDecoderCache.
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
        if type(recent_tokens) is not int or recent_tokens < 0:
            shown = printable(repr(recent_tokens), 60)
            raise ValueError(f"recent_tokens must be a whole number, 0 for none, got {shown}")
        file = None if calibration is None else load(calibration)
        self.settings = _Settings(format_named(dtype), recent_tokens, file, _checked(attention_mask))
        if config is None:
            super().__init__(layer_class_to_replicate=self._next_layer)  # made as they come
            return
        layers = [self._layer(number, plain) for number, plain in enumerate(DynamicCache(config=config).layers)]
        if file is not None and max(file.layers) >= (count := config.get_text_config(decoder=True).num_hidden_layers):
            file.refuse(f"made for another model: lists layer {max(file.layers)}, this model has 0 to {count - 1}")
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all packed tokens and of the recent ones. Memory has room for up to an eighth more."""
        packed = (layer for layer in self.layers if isinstance(layer, PackedLayer))
        return sum(tokens.held.nbytes for layer in packed for tokens in layer.all())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens of a layer, and return all; see `PackedLayer.update`."""
        is_new = layer_idx >= len(self.layers) or not self.layers[layer_idx].is_initialized
        if is_new and any(layer.updates > 1 for layer in self.layers[:layer_idx] if isinstance(layer, PackedLayer)):
            raise ValueError(
                f"PackedCache: a layer before layer {layer_idx} was updated twice, by attention to itself and to an "
                "encoder; give an encoder-decoder EncoderDecoderCache(PackedCache(dtype), PackedCache(dtype))"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self, attention_mask: torch.Tensor | None = None) -> None:
        """Drop all tokens. `attention_mask`: [sequences, tokens], of the prompts that come next, as for the class."""
        self.settings.mask = _checked(attention_mask)
        super().reset()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("PackedCache holds keys and values only: this model has convolution states")

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("PackedCache holds keys and values only: this model has recurrent states")

    def update_indexer(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("PackedCache holds keys and values only: this model has an indexer's keys")

    def _next_layer(self) -> PackedLayer:
        return PackedLayer(self.settings, len(self.layers))

    def _layer(self, number: int, plain: Any) -> Any:
        """Return the packed layer in place of the one that transformers would make; one that holds nothing stays."""
        if type(plain).__name__ == "DummyLayer":  # from transformers 5.24 on
            return plain
        if type(plain) is DynamicLayer:
            return PackedLayer(self.settings, number)
        if type(plain) is DynamicSlidingWindowLayer:
            return PackedSlidingLayer(self.settings, number, plain.sliding_window)
        raise NotImplementedError(f"PackedCache holds keys and values only: layer {number} is a {type(plain).__name__}")


def _checked(mask: torch.Tensor | None) -> torch.Tensor | None:
    """An attention mask, as bool. Raises ValueError."""
    if mask is None:
        return None
    found = tuple(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not mask.numel():
        raise ValueError(f"attention_mask must be a tensor [sequences, tokens], as a tokenizer makes it, got {found}")
    if (others := mask[(mask != 0) & (mask != 1)]).numel():
        raise ValueError(f"attention_mask must have 1 for tokens and 0 for padding, got {others[0].item()}")
    return mask != 0


def _kernel_of(codec: PagedCodec, dtype: torch.dtype) -> CpuVectors | None:
    """The kernels of a layer on a CPU, or None; without a compiler a warning, once, says why."""
    key = codec.key
    is_served = dtype in ELEMENT_TYPES and not cpp_lacks(Pairs(key.fmt, key.head_dim, group=1))
    if key.device.type != "cpu" or not is_served:
        return None
    try:
        return CpuVectors(codec)
    except BuildError as error:
        logger.warning_once(f"PackedCache packs and unpacks in PyTorch, a step takes {SLOWER} as long: {error}")
        return None


class PackedLayer(DynamicLayer):
    """One layer's keys and values. Nothing is held but packed bytes; `keys` and `values` unpack them when read."""

    def __init__(self, settings: _Settings, number: int, **window: int) -> None:
        self.vectors: tuple[PackedVectors, ...] = ()
        super().__init__(**window)
        self.settings, self.number = settings, number
        self.cumulative_length, self.updates = 0, 0
        """Tokens received so far (a sliding window holds the last of them), and the number of updates."""

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys as stored, [sequences, KV heads, tokens, head_dim], for cross-attention; None: no tokens yet."""
        return self.vectors[0].read(self._positions_held(), self.dtype) if self.vectors else None

    @keys.setter
    def keys(self, value: None) -> None:
        self._refuse(value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, as `keys`."""
        return self.vectors[1].read(self._positions_held(), self.dtype) if self.vectors else None

    @values.setter
    def values(self, value: None) -> None:
        self._refuse(value)

    def _refuse(self, value: object) -> None:
        if value is not None:
            raise NotImplementedError("PackedCache holds packed bytes: keys and values come in by update alone")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        codec = self.settings.codec(self.number, key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        sequences, heads = key_states.shape[:2]
        kernel = _kernel_of(codec, key_states.dtype)
        self.vectors = tuple(PackedVectors(one, sequences, heads, kernel) for one in codec.codecs)
        self.starts = self._starts(sequences, key_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens [sequences, KV heads, tokens, head_dim]; returns all, in the dtype of the first ones. Raises
        ValueError for other sequences, heads or channels than it holds."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        states, new = (key_states, value_states), key_states.shape[2]
        raw = [] if new == 1 else [self._whole(held, x) for held, x in zip(self.vectors, states, strict=True)]
        positions = self._positions(self.cumulative_length, new)
        for held, x in zip(self.vectors, states, strict=True):
            held.append(x, positions, self.settings.recent_tokens)
        self.cumulative_length, self.updates = self.cumulative_length + new, self.updates + 1
        key, value = raw or [held.read(self._positions_held(), self.dtype) for held in self.vectors]
        return key, value

    def _check(self, *states: torch.Tensor) -> None:
        for what, held, x in zip(("keys", "values"), self.vectors, states, strict=True):
            sequences, heads = held.packed.memory.shape[:2]
            found, channels = (x.shape[0], x.shape[1], x.shape[3]), held.codec.head_dim
            if found != (sequences, heads, channels):
                raise ValueError(
                    f"layer {self.number} holds {what} of {sequences} sequences, {heads} heads, {channels} channels, "
                    f"and got some of {', '.join(map(str, found))}; make a new PackedCache"
                )

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        self.vectors, self.cumulative_length, self.updates, self.is_initialized = (), 0, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens: -n of them if the number n is negative, else all but the first n."""
        length = self.cumulative_length
        remove = -tokens_to_remove if tokens_to_remove <= 0 else max(0, length - tokens_to_remove)
        for tokens in self.all():
            tokens.remove_last(remove)
        self.cumulative_length = max(0, length - remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda x: x[indices.to(x.device)])

    def all(self) -> list[Tokens]:
        """The tensors that grow with the tokens."""
        return [tokens for held in self.vectors for tokens in held.all()]

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor over sequences by `change(tensor)`."""
        for held in self.vectors:
            held.change(change)
        if self.is_initialized:
            self.starts = change(self.starts)

    def _whole(self, vectors: PackedVectors, x: torch.Tensor) -> torch.Tensor:
        """Return the vectors that the layer holds, with `x` after them."""
        held = self.vectors[0].tokens
        return torch.cat((vectors.read(self._positions_held(), self.dtype), x), dim=2) if held else x

    def _positions_held(self) -> torch.Tensor:
        held = self.vectors[0].tokens
        return self._positions(self.cumulative_length - held, held)

    def _positions(self, column: int, count: int) -> torch.Tensor:
        """int64 [sequences, count, 1], of the tokens from `column` on in their sequences; below 0: padding."""
        columns = torch.arange(column, column + count, device=self.device)
        return (columns - self.starts[:, None]).unsqueeze(-1)

    def _starts(self, sequences: int, tokens: int) -> torch.Tensor:
        """int64 [sequences], the column of each sequence's first token; with beams, each prompt's is repeated.
        `tokens`: number of the first tokens."""
        mask = self.settings.mask
        if mask is None:
            return torch.zeros(sequences, dtype=torch.int64, device=self.device)
        if sequences % len(mask):
            raise ValueError(f"attention_mask has {len(mask)} sequences, the batch {sequences}; give the prompts' mask")
        if tokens > mask.shape[1]:
            raise ValueError(f"attention_mask has {mask.shape[1]} tokens, the prompts {tokens}; give the prompts' mask")
        return mask.to(self.device).int().argmax(-1).repeat_interleave(sequences // len(mask))


class PackedSlidingLayer(PackedLayer, DynamicSlidingWindowLayer):
    """One layer with a sliding window; it holds the last tokens, which a next token could see."""

    def __init__(self, settings: _Settings, number: int, sliding_window: int) -> None:
        super().__init__(settings, number, sliding_window=sliding_window)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().update(key_states, value_states)
        for tokens in self.all():
            tokens.keep_last(self.sliding_window - 1)
        return found

    def activate_past_recording(self) -> NoReturn:
        raise NotImplementedError("PackedCache: drafts over a sliding window, whose tokens cannot come back")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.cumulative_length >= self.sliding_window:
            raise NotImplementedError("PackedCache: a full sliding window cannot be cropped, older tokens are gone")
        super().crop(tokens_to_remove)
