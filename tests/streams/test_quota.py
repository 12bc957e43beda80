"""Places are counted from the check to the start: two at once cannot both take the last one."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.protocol.errors import Overloaded, QuotaExceeded
from streamserve.protocol.limits import Limits
from streamserve.streams.quota import StreamQuota


class NoStreams:
    """A directory with nothing in it."""

    def all(self) -> list[Any]:
        return []


def quota(**limits: int) -> StreamQuota:
    return StreamQuota(Limits(**limits), NoStreams())  # type: ignore[arg-type]


async def test_a_place_is_held_while_a_stream_starts() -> None:
    """And given back, whatever happens."""
    places = quota(max_streams_per_principal=1)
    async with places.place_for("user:1"):
        with pytest.raises(QuotaExceeded) as caught:
            async with places.place_for("user:1"):
                pass
        assert caught.value.http_status == 429
        async with places.place_for("user:2"):
            pass
    with pytest.raises(ZeroDivisionError):
        async with places.place_for("user:1"):
            raise ZeroDivisionError
    async with places.place_for("user:1"):
        pass


async def test_visitors_together_have_a_limit() -> None:
    """503: it is not their own quota; users are not counted with them."""
    places = quota(max_streams_anonymous=1)
    async with places.place_for("user:1"), places.place_for("anon:a"):
        with pytest.raises(Overloaded) as caught:
            async with places.place_for("anon:b"):
                pass
    assert caught.value.http_status == 503
    assert 1 <= caught.value.retry_after <= 120
