"""Which back end computes a model's linear layers: what this machine has, what is right, and what is fastest.

Every back end is compared with the plain layer, on numbers of its own and for each weight that it packs. Of those that
are right the fastest is taken, by a measurement that is made once for a model, a processor and a version, and kept:
an answer that continues after a restart continues with the same arithmetic. Where nothing can be kept, nothing is
measured, and the first in order is taken; so it is until the next load where other programs disturb the measurement.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear

from streamserve.engine.model.linear.base import PLAIN, BackEnd, DoesNotFit, Linear
from streamserve.engine.model.linear.fbgemm import FBGEMM_FP16
from streamserve.engine.model.linear.kept import Kept
from streamserve.engine.model.linear.onednn import ONEDNN, ONEDNN_FP32
from streamserve.engine.model.linear.packer import Packer
from streamserve.engine.model.linear.packs import Packs
from streamserve.engine.model.load.source import available_memory

# In order of preference; the plain layer serves where none of them does.
BACK_ENDS = (ONEDNN, FBGEMM_FP16, ONEDNN_FP32)
# Of the largest output; half precision rounds inputs and outputs.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EXTRA_SHARE = 0.1  # what one packed weight takes beyond the plain one it frees, as a share of free memory

MEASURED_ROWS = (1, 8, 32)
MEASURED_BYTES = 64 << 20  # of plain weights: more than caches hold, as in a step
LEAST_BYTES = 16 << 20  # a model with less is fast anyhow, and what a measurement would say is noise
ROUNDS = 3
MOST_ROUNDS = 12  # with those that other programs disturb
MARGIN = 0.9  # another back end than the first must take at most this share of its time
# The same where the first makes whole steps, which saves half of a step beside its linears: docs/log.md.
STEP_MARGIN = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMaker:
    """Makes the linear layers of one model: with its back end where that is right, else with the plain one.

    `packer`, where there is one, makes layers of weights that the checkpoint has quantised. `packs`, where there are
    some, hold layers of an earlier load, and take those of this load.
    """

    back_end: BackEnd
    packer: Packer | None = None
    packs: Packs | None = None

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_kept: bool = False) -> Linear:
        """Return a layer of `weight` (out_features, in_features); `is_kept`: the plain weight stays in memory too."""
        extra_bytes = weight.numel() * self.back_end.bytes_per_weight(weight.dtype)
        extra_bytes -= 0 if is_kept else weight.nbytes
        if self.back_end is PLAIN or extra_bytes > EXTRA_SHARE * available_memory():
            return PLAIN.make(weight, bias)
        try:
            packed = self.back_end.make(weight, bias)
        except DoesNotFit:
            return PLAIN.make(weight, bias)
        return packed if agrees(packed, weight, bias, self.back_end.rounding) else PLAIN.make(weight, bias)


def choose(
    dtype: torch.dtype,
    device: torch.device,
    weights: Iterable[torch.Tensor],
    kept: Kept | None = None,
    *,
    preferred: Sequence[BackEnd] = (),
) -> LinearMaker:
    """Return the maker for a model in `dtype` on `device`, of which `weights` are some, in order.

    `preferred` go before all others: the native library's back end, where there is a library.
    """
    found = [back_end for back_end in (*preferred, *BACK_ENDS) if is_right(back_end, dtype, device)]
    smallest = min((back_end.bytes_per_weight(dtype) for back_end in found), default=0.0)
    found = [back_end for back_end in found if back_end.bytes_per_weight(dtype) == smallest]
    first = found[0] if found else PLAIN
    if len(found) < 2 or kept is None:
        return LinearMaker(back_end=first)
    by_name = {back_end.name: back_end for back_end in found}
    name = kept.read()
    if name not in by_name:
        sample = _sample(weights)
        is_measured = sum(weight.nbytes for weight in sample) >= LEAST_BYTES
        name = fastest(found, sample) if is_measured else None
        name = kept.write(name) if name else None
    return LinearMaker(back_end=by_name.get(name or first.name, first))


def is_right(back_end: BackEnd, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a back end serves `dtype` on `device` and computes what the plain layer does."""
    if dtype not in TOLERANCE or not back_end.serves(dtype, device):
        return False
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = weight[:, 0].contiguous()
    try:
        return agrees(back_end.make(weight, bias), weight, bias, back_end.rounding)
    except (AttributeError, RuntimeError):  # a private operator is absent, or refuses this processor
        return False


def agrees(layer: Linear, weight: torch.Tensor, bias: torch.Tensor | None, rounding: float = 0.0) -> bool:
    """Compare a layer with the plain one on one row and on three; its weights are rounded by `rounding`."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, layer.in_features, generator=generator).to(weight.dtype)
    with torch.no_grad():
        wanted = linear(inputs, weight, bias)
        found = torch.cat([layer(inputs[:1]), layer(inputs)[1:]])
        error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    return error <= TOLERANCE[weight.dtype] + rounding  # NaN does not pass


def fastest(back_ends: Sequence[BackEnd], weights: Sequence[torch.Tensor]) -> str | None:
    """Return the name of the back end that takes the least time, the first unless another is clearly better.

    Linears alone are measured, so that a first that makes whole steps has a larger margin.

    Compared is the geometric mean over the numbers of rows, each back end after the other in turns. None: other
    programs had the processors, and one of them was never measured undisturbed.
    """
    with torch.inference_mode():
        makers = [LinearMaker(back_end=back_end) for back_end in back_ends]
        layers = [[maker.make(weight, is_kept=True) for weight in weights] for maker in makers]
        inputs = [
            [torch.randn(num_rows, weight.shape[1]).to(weight.dtype) for weight in weights]
            for num_rows in MEASURED_ROWS
        ]
        seconds = [[math.inf] * len(MEASURED_ROWS) for _ in back_ends]
        for num_rounds in range(MOST_ROUNDS):
            if num_rounds >= ROUNDS and all(math.isfinite(one) for row in seconds for one in row):
                break
            for place, rows in enumerate(inputs):
                for back_end, made in enumerate(layers):
                    taken = _time(partial(_run, made, rows))
                    seconds[back_end][place] = min(seconds[back_end][place], taken)
    if not all(math.isfinite(one) for row in seconds for one in row):
        return None
    shares = [
        math.exp(sum(math.log(own / first) for own, first in zip(row, seconds[0], strict=True)) / len(MEASURED_ROWS))
        for row in seconds
    ]
    best = min(range(len(shares)), key=shares.__getitem__)
    margin = STEP_MARGIN if back_ends[0].makes_steps else MARGIN
    return back_ends[best if shares[best] < margin else 0].name


def _run(layers: Sequence[Linear], inputs: Sequence[torch.Tensor]) -> None:
    for layer, rows in zip(layers, inputs, strict=True):
        layer(rows)


def _time(work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes, infinite if another program had a processor that it wanted."""
    before, started_at = _num_involuntary_switches(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started_at
    return seconds if _num_involuntary_switches() == before else math.inf


def _num_involuntary_switches() -> int:
    """Return how often the system has taken a processor from a running thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _sample(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first weights, as many as are to be measured."""
    found, num_bytes = [], 0
    for weight in weights:
        if num_bytes >= MEASURED_BYTES:
            break
        found.append(weight)
        num_bytes += weight.nbytes
    return found
