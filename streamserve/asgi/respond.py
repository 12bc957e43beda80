"""`respond`: answer a request with a delivery, from inside any ASGI app. `hand_over`: from frameworks that own `send`.

await respond(scope, receive, send, delivery)              plain ASGI, with StreamMiddleware around it or without
return Response(headers=hand_over(delivery))               any framework, inside StreamMiddleware only
"""

from __future__ import annotations

from collections.abc import Iterable

from streamserve.api.call import Body
from streamserve.asgi.exchange import Exchange
from streamserve.asgi.handover import HEADER, offer
from streamserve.asgi.types import Message, Receive, Scope, Send


async def respond(
    scope: Scope,
    receive: Receive,
    send: Send,
    delivery: Body,
    *,
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Stream `delivery`, or pass it to the StreamMiddleware outside, which streams when the app has returned.

    Watches `receive` for the client leaving, so that nobody else may. The delivery is closed, whatever happens.
    """
    start: Message = {"type": "http.response.start", "status": status, "headers": list(headers)}
    if not scope.get("streamserve"):
        await Exchange(scope, receive, send).respond(start, delivery)
        return
    start["headers"] += [(name.encode(), value.encode()) for name, value in hand_over(delivery).items()]
    await send(start)
    await send({"type": "http.response.body", "body": b""})


def hand_over(delivery: Body) -> dict[str, str]:
    """Return the header of an empty response that has the StreamMiddleware outside stream `delivery`. Send it once."""
    return {HEADER: offer(delivery)}
