"""KV-cache dtypes for vLLM that store keys and values in 2.5 to 4.25 bits.

`FORMATS` (name -> format) needs no torch; `get_codec` imports it when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .formats import FORMATS, Format

if TYPE_CHECKING:
    from .codecs import get_codec

__all__ = ["FORMATS", "Format", "get_codec"]


def __getattr__(name: str) -> Any:
    if name == "get_codec":
        from .codecs import get_codec

        return get_codec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
