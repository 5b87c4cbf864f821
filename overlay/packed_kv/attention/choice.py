"""The start-up line of the decode kernel of a layer of pairs or of latents on CUDA, and the limits of its steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.logger import init_logger

from ..kernels.served import ANY, CUDA, Engine, Latents, Pairs, Served, who_serves

logger = init_logger("vllm.packed_kv")


class Limits(NamedTuple):
    """The most that a step asks of a decode kernel: query tokens of a request, drafts included; requests; and tokens of
    a batch with prompts, whose prefixes the kernel may read (0: it does not)."""

    longest_decode: int
    max_requests: int
    max_tokens: int = 0


def find_kernel(
    device: torch.device, option: str, limits: Limits, layer: Pairs | Latents, heads: str, otherwise: str = "Triton"
) -> Served:
    """Return what serves a layer on a GPU, and log it, with the reason.

    Args:
        device: the GPU.
        option: `decode_kernel`.
        limits: of the layer's steps.
        layer: what is asked of the kernel.
        heads: the layer's, in words.
        otherwise: what serves the layer if the CUDA kernel does not, in words.
    """
    asks = Engine(
        "cuda",
        torch.cuda.get_device_capability(device),
        option,
        longest_decode=limits.longest_decode,
        requests=limits.max_requests,
    )
    served = who_serves(asks, layer)
    tokens = "1 query token" if limits.longest_decode == 1 else f"{limits.longest_decode} query tokens"
    most = "" if served.longest == ANY else f", at most {served.longest}"
    said = f"CUDA ({heads}, {tokens} per request{most})" if served.kernel == CUDA else f"{otherwise} ({served.reason})"
    logger.info_once("decode kernel: %s", said, scope="local")
    return served
