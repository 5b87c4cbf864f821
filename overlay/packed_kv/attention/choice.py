"""The start-up line of the decode kernel of a layer of pairs or of latents on CUDA."""

from __future__ import annotations

import torch
from vllm.logger import init_logger

from ..kernels.served import ANY, CUDA, Engine, Latents, Pairs, Served, who_serves
from ..refusals.facts import Facts, Given
from ..refusals.table import refuse
from .limits import Limits

logger = init_logger("vllm.packed_kv")


def find_kernel(
    device: torch.device, option: str, limits: Limits, layer: Pairs | Latents, heads: str, otherwise: str = "Triton"
) -> Served:
    """Return what serves a layer on a GPU, and log it, with the reason. Raises Refused where the option is "cuda" and
    the CUDA kernel does not serve the layer.

    Args:
        device: the GPU.
        option: `decode_kernel`.
        limits: of the layer's steps.
        layer: what the kernel has to serve.
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
    refuse(Facts(Given(decode_kernel=option, not_cuda=served.reason)), "" if layer.fmt is None else layer.fmt.name)
    tokens = "1 query token" if limits.longest_decode == 1 else f"{limits.longest_decode} query tokens"
    most = "" if served.longest == ANY else f", at most {served.longest}"
    said = f"CUDA ({heads}, {tokens} per request{most})" if served.kernel == CUDA else f"{otherwise} ({served.reason})"
    logger.info_once("decode kernel: %s", said, scope="local")
    return served
