"""`Asked`: what every API takes beside its question, under the same names.

    latency_class                    how long the caller waits for an answer at most
    on_disconnect                    what becomes of an answer whose reader has left
    interval_ms … keepalive          when bytes leave: see pace.py

A dialect's own request is an `Asked` with fields of its own. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.fields import Table, conflict, one_of
from streamserve.dialects.pace import PACE, SITES_OWN, Pace, pace_of

ON_DISCONNECT = ("park", "abort")
on_disconnect = one_of(*ON_DISCONNECT)
# The readers of these fields, but for `latency_class`, which stands with the fields of requests (generate.py).
ASKED: Table = {"on_disconnect": on_disconnect, **PACE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A part of a checked body. `latency_class` None leaves it to the defaults of key, route and model.

    `on_disconnect` is "" where the caller left it open.
    """

    latency_class: str | None = None
    on_disconnect: str = ""
    pace: Pace = SITES_OWN


def asked_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an `Asked` that checked values have."""
    given = {name: values[name] for name in ("latency_class", "on_disconnect") if name in values}
    return {**given, "pace": pace_of(values)}


def take_tier(values: dict[str, Any], tiers: Mapping[str, str | None]) -> None:
    """Replace an API's `service_tier` by the latency class that `tiers` has for it; None leaves the class open."""
    named = tiers[values.pop("service_tier", "auto")]
    if named is not None and values.setdefault("latency_class", named) != named:
        raise conflict("service_tier and latency_class differ; send one of them.", "service_tier")
