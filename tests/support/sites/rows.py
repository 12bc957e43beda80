"""Rows that a test waits for. A row has no event: it is asked for again until it is as expected."""

from __future__ import annotations

import asyncio
from typing import Any

from streamserve.models import Stream as StreamRow
from tests.support.engines.runners import DEADLINE_SECONDS


async def in_row(stream_id: str, **fields: Any) -> StreamRow:
    """Return the row of a stream once it has these values, which its end has after the readers have the last event."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await StreamRow.objects.filter(pk=stream_id, **fields).aexists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        row = await StreamRow.objects.filter(pk=stream_id).values().afirst()
        raise AssertionError(f"not within {DEADLINE_SECONDS:.0f} s: {fields}, but {row}") from None
    return await StreamRow.objects.aget(pk=stream_id)
