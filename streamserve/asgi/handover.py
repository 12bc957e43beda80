"""The hand-over: how a view passes its streaming response to the outer ASGI layer.

The view puts `HEADER: offer(delivery)` on an ordinary empty response; `StreamMiddleware` takes the delivery when the
framework has finished with the request. Ids are random, work once, and expire. Event loop only; the process dict below
is the one place where the two sides, which do not know each other, meet. (Idea: X-Accel-Redirect, GRIP.)
"""

from __future__ import annotations

import asyncio
import secrets
from contextvars import ContextVar

from streamserve.api.call import Body

HEADER = "streamserve-handover"

# A framework that takes longer from offer to response start has lost the response.
_EXPIRES_SECONDS = 30.0

_offers: dict[str, tuple[Body, asyncio.TimerHandle]] = {}

# Ids offered while one request is being worked on; StreamMiddleware sets it, and withdraws what was not taken.
made_here: ContextVar[list[str] | None] = ContextVar("streamserve_offers", default=None)


def offer(delivery: Body, *, expires_seconds: float = _EXPIRES_SECONDS) -> str:
    """Keep `delivery` until its id is taken, and return the id."""
    offer_id = secrets.token_urlsafe(16)
    timer = asyncio.get_running_loop().call_later(expires_seconds, withdraw, offer_id)
    _offers[offer_id] = (delivery, timer)
    made = made_here.get()
    if made is not None:
        made.append(offer_id)
    return offer_id


def take(offer_id: str) -> Body | None:
    """Return the delivery of that id, once. Whoever takes it must run or close it."""
    delivery, timer = _offers.pop(offer_id, (None, None))
    if timer is not None:
        timer.cancel()
    return delivery


def withdraw(offer_id: str) -> None:
    """Close the delivery of that id, if nobody has taken it: its reader never came."""
    delivery = take(offer_id)
    if delivery is not None:
        delivery.close()
