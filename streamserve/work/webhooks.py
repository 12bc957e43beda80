"""`webhook_kind`: messages to the site's webhooks as a kind of work: signed, retried with back-off, durable.

A message is inserted in the transaction that ends its job (`JobQuerySet.end`), so that none is lost and none is sent
for a job that has not ended. It may arrive twice: its id stays, so a receiver can recognise it. Signed as Standard
Webhooks defines (github.com/standard-webhooks/standard-webhooks): HMAC-SHA256 of "id.timestamp.body". Redirects are not
followed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from streamserve.conf import Webhook
from streamserve.models import Job, WebhookDelivery
from streamserve.rows import orm
from streamserve.work.jobs import view_of
from streamserve.work.queue import WEBHOOKS, Claim, Failed, Kind, RetryPolicy

_GONE = 410  # the receiver wants no more of them
_RETRY = RetryPolicy(max_attempts=10, first_seconds=5.0, max_seconds=3600.0)


def webhook_kind(
    targets: Mapping[str, Webhook], *, concurrency: int = 4, retry: RetryPolicy = _RETRY
) -> Kind[WebhookDelivery]:
    """Return messages to webhooks as a kind of work. `targets` are the targets in the settings, by name."""

    async def run(claim: Claim[WebhookDelivery]) -> None:
        target = targets.get(claim.row.webhook)
        if target is None:
            message = f"The settings have no webhook {claim.row.webhook!r} any more."
            raise Failed(message, code="webhook_not_found", is_retryable=False)
        job = await orm.read(Job.objects.get, pk=claim.row.job_id)
        status = await _answer(target, claim.id, message_of(job), job.traceparent)
        if not 200 <= status < 300:
            message = f"The webhook answered {status}."
            raise Failed(message, code="webhook_refused", is_retryable=status != _GONE)
        await claim.finish()

    return Kind(name=WEBHOOKS, model=WebhookDelivery, run=run, concurrency=concurrency, retry=retry)


async def _answer(target: Webhook, message_id: str, body: bytes, traceparent: str) -> int:
    """Post a message and return the status. Raises Failed.

    On a thread of its own: a receiver that hangs must hold up neither the shared pool nor a worker that stops.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[int] = loop.create_future()
    connection = connection_to(target)

    def settle(status: int, failure: Failed | None) -> None:
        if not answered.done():
            answered.set_result(status) if failure is None else answered.set_exception(failure)

    def work() -> None:
        status, failure = 0, None
        try:
            status = post(connection, target, message_id, body, round(time.time()), traceparent)
        except Failed as error:
            failure = error
        except Exception as error:  # the edge of a thread
            failure = _unreachable(error)
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(settle, status, failure)

    threading.Thread(target=work, name=f"webhook {target.name}", daemon=True).start()
    try:
        async with asyncio.timeout(target.timeout_seconds):
            return await answered
    except TimeoutError as error:
        raise _unreachable(error) from None
    finally:
        _hang_up(connection)


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """End what the thread waits for: a receiver that sends a byte now and then would hold it for ever."""
    sock = connection.sock
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _unreachable(error: Exception) -> Failed:
    return Failed(f"The webhook could not be reached: {type(error).__name__}.", code="webhook_unreachable")


def message_of(job: Job) -> bytes:
    """Return what is posted of a job that has ended."""
    assert job.finished_at is not None
    message: dict[str, Any] = {
        "type": f"job.{job.state}",
        "timestamp": job.finished_at.isoformat(),
        "data": view_of(job).as_json(),
    }
    return json.dumps(message, separators=(",", ":")).encode()


def signature_of(secret: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the header `webhook-signature`."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


def connection_to(target: Webhook) -> http.client.HTTPConnection:
    """Return a connection to the target, not open yet."""
    parts = urlsplit(target.url)
    cls = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return cls(parts.hostname or "", parts.port, timeout=target.timeout_seconds)


def post(
    connection: http.client.HTTPConnection,
    target: Webhook,
    message_id: str,
    body: bytes,
    timestamp: int,
    traceparent: str = "",
) -> int:
    """Post a message and return the status; blocks. Raises Failed where there is no answer."""
    parts = urlsplit(target.url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "streamserve",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature_of(target.secret, message_id, timestamp, body),
        **({"traceparent": traceparent} if traceparent else {}),
    }
    try:
        connection.request("POST", path, body, headers)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(error) from error
    finally:
        connection.close()
