"""Laws of the counting in the engine: requests that are counted as one caller have one tenant's share and places."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from streamserve.engine.config import EngineConfig
from streamserve.protocol.errors import Overloaded
from streamserve.protocol.requests import Admission, decode_request, encode_request
from tests.support.engines.clients import asking
from tests.support.engines.overload import Overload
from tests.support.streams.hand_made import Gate, started_echo

NUM_STEPS = 3_000


def served(*, is_counted: bool) -> Counter[str]:
    """Count the answers begun for a flooder, a new tenant with each request, beside eight tenants; all ask without end.

    The flooder keeps 40 requests in the engine, each other two.
    """
    overload, begun = Overload(EngineConfig(max_num_seqs=8)), Counter[str]()
    places = {"flood": 40, **{f"visitor {number}": 2 for number in range(8)}}
    open_ones: dict[str, list[object]] = {name: [] for name in places}
    for step in range(NUM_STEPS):
        for name, number in places.items():
            mine = open_ones[name]
            ended = [one for one in mine if one.ended_at is not None or one.retry_after or one.error]  # type: ignore[attr-defined]
            begun[name] += sum(one.first_at is not None for one in ended)  # type: ignore[attr-defined]
            open_ones[name] = mine = [one for one in mine if one not in ended]
            for index in range(number - len(mine)):
                tenant = f"{step} {index}" if name == "flood" else name
                counted_as = name if name == "flood" and is_counted else ""
                admission = Admission(owner="", tenant=tenant, counted_as=counted_as)
                mine.append(overload.ask("completion", tenant=admission.share_of))
        overload.step()
    return begun


def test_a_flood_of_new_tenants_has_one_share() -> None:
    """Counted as one, the flooder gets two shares of nine at most, as any flood; as so many tenants it would get all.

    A share becomes a rank only `max_debt_seconds` away from it, and what no other asks for is the flooder's.
    """
    counted, apart = served(is_counted=True), served(is_counted=False)
    assert counted["flood"] < counted.total() / 4, counted
    assert apart["flood"] > 0.8 * apart.total(), apart
    others = [number for name, number in counted.items() if name != "flood"]
    assert min(others) > 0.5 * counted.total() / 9


async def test_the_engine_counts_by_it(gate: Gate) -> None:
    """A full queue has no place for another new tenant that is counted as those in it, and one for a stranger."""
    client = await started_echo(gate, max_num_seqs=1, max_waiting=2)
    gate.allow(0)
    try:
        held = [
            await client.generate(*asking(tenant=f"t{number}", counted_as="one", prompt="hi")) for number in range(3)
        ]
        with pytest.raises(Overloaded):
            await client.generate(*asking(tenant="t9", counted_as="one", prompt="hi"))
        held.append(await client.generate(*asking(tenant="t9", prompt="hi")))
        for one in held:
            one.cancel()
    finally:
        gate.open()
        await client.aclose()


def test_a_row_does_not_hold_it() -> None:
    """A release that does not know the field reads the rows of this one; the row has a column for it."""
    request, admission, _ = asking(tenant="t", counted_as="one")
    kept = encode_request(request, admission)
    assert "counted_as" not in json.dumps(kept)
    assert decode_request(kept, replace(admission, counted_as=""))[1].share_of == "t"
