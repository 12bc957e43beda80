"""`Idempotency-Key`: a POST that is sent again gets the answer that the first POST has started.

A key is a caller's: two callers may use the same key. The stream's record has its digest in a unique column, so of two
processes that get the same request at once, one starts the answer and the other shows it. A key is kept as long as the
events of its stream; afterwards it starts a new answer. A request that is refused before its answer begins keeps none.
(Idea: Stripe's API; draft-ietf-httpapi-idempotency-key-header-07.) asyncio; framework-free.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from streamserve.api.call import Call, Caller
from streamserve.protocol.errors import BadRequest, EngineUnavailable, KeyReused, Overloaded, QuotaExceeded
from streamserve.protocol.requests import Admission, GenerateRequest, Once
from streamserve.streams.quota import Places
from streamserve.streams.registry import Streams
from streamserve.streams.store import KeyTaken
from streamserve.streams.stream import Stream

HEADER = "idempotency-key"
KEY = re.compile(r"[\x21-\x7e]{1,255}")
# Another process has inserted the record and not committed the first event yet.
_BEGIN_SECONDS, _POLL_SECONDS = 5.0, 0.05


def once_of(call: Call, endpoint: str, body: Mapping[str, Any]) -> Once | None:
    """Return the call's key and the digest of what it asks, None without the header. Raises BadRequest."""
    key = call.headers.get(HEADER)
    if key is None:
        return None
    return once_for(call.caller, key, endpoint, body)


def once_for(caller: Caller, key: str, endpoint: str, body: Mapping[str, Any]) -> Once:
    """Return a caller's key and the digest of what it asks. Raises BadRequest."""
    if KEY.fullmatch(key) is None:
        message = "An Idempotency-Key has 1 to 255 visible ASCII characters. Send a UUID."
        raise BadRequest(message, code="invalid_idempotency_key", param="Idempotency-Key")
    asked = json.dumps([endpoint, body], sort_keys=True, separators=(",", ":"))
    return Once(key=_digest(f"{caller.owner}\n{key}"), digest=_digest(asked))


def continuation_of(stream_id: str, once: Once | None) -> Once:
    """Return the key of the stream that continues an interrupted stream: there is one, whoever answers.

    Without an Idempotency-Key no second answer is the same as the first.
    """
    said = secrets.token_hex(16) if once is None else f"{once.key}\n{once.digest}"
    return Once(key=_digest(f"continues\n{stream_id}"), digest=_digest(said))


def part_of(once: Once, index: int) -> Once:
    """Return the key of one of several streams that a request starts; the first has the request's own."""
    return once if index == 0 else replace(once, key=_digest(f"{once.key}\n{index}"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class StartOnce:
    """Starts the answer of a key, or returns the answer that the key has started. Each `Streams` has one."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, request: GenerateRequest, admission: Admission, places: Places | None = None) -> Stream:
        """Return the stream of the admission's key, or start it. Raises KeyReused, and as `Streams.start`."""
        once = admission.once
        assert once is not None
        lock = self._locks.get(once.key)
        if lock is None:
            lock = self._locks[once.key] = asyncio.Lock()
        async with lock:
            earlier = await self.find(once)
            if earlier is not None:
                return earlier
            try:
                return await self._streams.start(request, admission, places)
            except (KeyTaken, QuotaExceeded, Overloaded):
                # Another process was faster, and may have the caller's last place.
                earlier = await self.find(once)
                if earlier is None:
                    raise
                return earlier

    async def find(self, once: Once) -> Stream | None:
        """Return the stream that the key has started. A key whose events are gone is forgotten: None."""
        store = self._streams.store
        for _ in range(round(_BEGIN_SECONDS / _POLL_SECONDS)):
            record = await store.find(request_key=once.key)
            if record is None or record.once is None:
                return None
            if record.once.digest != once.digest:
                raise KeyReused("This Idempotency-Key was sent with another body. Send a new key with a new request.")
            stream = await self._streams.reach(record.id, record)
            if stream is not None:
                return stream
            if record.is_finished or record.producer in ("", store.own_id) or not store.is_alive(record.producer):
                await store.forget_key(record.id)
                return None
            await asyncio.sleep(_POLL_SECONDS)
        raise EngineUnavailable("The first request with this Idempotency-Key still begins. Try again.", retry_after=1)
