"""Choice between the decode kernel of CUDA and Triton's, for a layer of pairs or of latents."""

from __future__ import annotations

from typing import NamedTuple

from vllm.logger import init_logger

logger = init_logger("vllm.packed_kv")


class Limits(NamedTuple):
    """The most that a step asks of a decode kernel: query tokens of a request, drafts included; requests; and tokens of
    a batch with prompts, whose prefixes the kernel may read (0: it does not)."""

    longest_decode: int
    max_requests: int
    max_tokens: int = 0


def takes_cuda(
    option: str, refused: str | None, heads: str, longest_decode: int, longest: int | None = None, *,
    otherwise: str = "Triton",
) -> bool:  # fmt: skip
    """Return whether the CUDA kernel serves a layer, else `otherwise` does; and log it, with the reason.

    Args:
        option: "triton", or "auto": the CUDA kernel where it serves.
        refused: what of the layer the CUDA kernel does not serve, or None.
        heads: the layer's, in words.
        longest_decode: query tokens of a request, drafts included.
        longest: the most that the CUDA kernel serves of such heads; None: any number.
        otherwise: what serves the layer if the CUDA kernel does not, in words.
    """
    reason = f"does not support {refused}" if refused else None
    if option == "triton":
        reason = "is disabled by decode_kernel=triton"
    tokens = "1 query token" if longest_decode == 1 else f"{longest_decode} query tokens"
    most = "" if longest is None else f", at most {longest}"
    served = f"CUDA ({heads}, {tokens} per request{most})"
    logger.info_once(
        "decode kernel: %s", served if reason is None else f"{otherwise} (the CUDA kernel {reason})", scope="local"
    )
    return reason is None
