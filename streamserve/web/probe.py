"""The probe: a stream at a known pace, by which the way between this site and its readers is measured.

`streamserve_doctor` and the admin's delivery page ask for it at `/streams/doctor`. Each event has the time at which it
was sent; the first event also has the request as Django got it. So what goes in can be compared with what comes out.

It is sent to who has a token that this site has signed in the last `TOKEN_SECONDS`. The token holds the plan, so that
a caller chooses neither length nor pace. Runs on the event loop; touches no database, engine or log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from django.core import signing
from django.http import HttpRequest, HttpResponseBase, JsonResponse

from streamserve.api.call import Reply
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, KEEPALIVE, frame, one_line_json
from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Closing, stream_headers
from streamserve.web.views import non_atomic, to_django

TOKEN_SECONDS = 600
PROBE_ID = "doctor"  # in X-Stream-Id, which pages need
_SALT = "streamserve.probe"
_ABSENT_SECRETS = ("authorization", "cookie", "x-api-key")  # shown as present, never with their value


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a probe sends: events at a pace, then keepalives at that pace, then nothing for a time, then its end."""

    num_events: int = 12
    every_seconds: float = 0.25
    num_keepalives: int = 3
    quiet_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Source:
    """The id of a probe in log lines."""

    id: str = PROBE_ID


def token_for(plan: Plan) -> str:
    """Return the token with which a probe of this plan may be asked for."""
    return signing.dumps(asdict(plan), salt=_SALT)


async def _probe(request: HttpRequest) -> HttpResponseBase:
    """GET /streams/doctor?token=…: the probe. The site's middleware has seen the request, as it sees any other."""
    if request.method != "GET":
        return _refusal(405, "method_not_allowed", "This address takes GET.")
    if not hasattr(request, "scope"):
        return _refusal(503, "asgi_required", "This site runs under WSGI, which cannot stream.")
    try:
        plan = Plan(**signing.loads(request.GET.get("token", ""), salt=_SALT, max_age=TOKEN_SECONDS))
    except (signing.BadSignature, TypeError):
        return _refusal(
            403,
            "probe_token_refused",
            "The token is not from this site, its SECRET_KEY has changed, or it is older than ten minutes. "
            "Run manage.py streamserve_doctor in this site's project, or reload the page in its admin.",
        )
    return to_django(request, Reply(body=ProbeDelivery(plan, _as_seen(request))))


def _refusal(status: int, code: str, message: str) -> HttpResponseBase:
    return JsonResponse({"error": {"code": code, "message": message}}, status=status)


def _as_seen(request: HttpRequest) -> dict[str, Any]:
    """Return the request as Django got it; of keys and cookies only that they are there."""
    scope = request.scope  # type: ignore[attr-defined]
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    return {
        "http_version": scope.get("http_version", ""),
        "scheme": request.scheme,
        "host": request.get_host(),
        "client": request.META.get("REMOTE_ADDR") or "",
        "headers": [(name, "present" if name in _ABSENT_SECRETS else value) for name, value in headers],
    }


class ProbeDelivery(Closing):
    """Sends one plan. A `Body`, like a stream's Delivery, with the same headers."""

    stream = _Source()

    def __init__(self, plan: Plan, seen: dict[str, Any]) -> None:
        self._plan, self._seen = plan, seen

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's headers, in ASGI form."""
        return stream_headers(CONTENT_TYPE, PROBE_ID)

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
        """Send everything, waiting for `send` each time."""
        async for data in self:
            await send(data)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        plan = self._plan
        yield FIRST_BYTES
        yield _event("request", **self._seen)
        for number in range(plan.num_events):
            yield _event("beat", number=number)
            await asyncio.sleep(plan.every_seconds)
        kept_at = []
        for _ in range(plan.num_keepalives):
            kept_at.append(time.time())
            yield KEEPALIVE
            await asyncio.sleep(plan.every_seconds)
        yield _event("quiet", seconds=plan.quiet_seconds, keepalives=kept_at)
        await asyncio.sleep(plan.quiet_seconds)
        yield _event("end")

    def cut_off(self) -> None:
        """Close: a server that shuts down waits for no probe."""
        self.close()


def _event(name: str, **fields: Any) -> bytes:
    return frame(one_line_json({"kind": name, "sent": time.time(), **fields}), event=name)


probe = non_atomic(_probe)
probe.login_required = False  # type: ignore[attr-defined]  # the token decides, also where a middleware wants a login
