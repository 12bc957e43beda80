"""Makes the `SampleSpec`s of tests: its own fields and those of its `SamplingParams`, by their names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from streamserve.engine.plan import SampleSpec
from streamserve.protocol.requests import SamplingParams

_SAMPLING = frozenset(one.name for one in fields(SamplingParams))


def spec_of(position: int = 0, *, seed: int = 0, **values: Any) -> SampleSpec:
    """Return the spec of a draw at `position`."""
    sampling = {name: values.pop(name) for name in _SAMPLING & values.keys()}
    return SampleSpec(position=position, sampling=SamplingParams(seed=seed, **sampling), **values)
