"""Frames and events as bytes: what crosses a socket between our processes, and what a durable log keeps.

A frame is a length (4 bytes, big-endian) and that many bytes. An event is MessagePack `[type, {field: value}]`, checked
against the types of protocol/events.py on the way in; nothing that could run is ever built. Pure: no I/O, no clock.

Two releases share a log during a rolling restart, so each reads what the other writes:

- A field that is absent has its default.
- A field that is unknown is skipped. 0.1.0 skips it too, without counting.
- An event that is unknown becomes `Unknown`, which keeps its bytes and its number. 0.1.0 raises FrameError instead, and
  so fails on the whole stream: a release writes a new kind of event only where the stream needs it, and one release
  after the kind is read. This release reads blocks and citations and writes neither.
- A new field is left out at its default (`ADDED_FIELDS`), so the events of a plain answer have 0.1.0's very bytes.
- Unlike an event's field, a request's field must not be dropped: see `needs` in protocol/requests.py.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec

from streamserve.protocol.events import (
    ADDED_FIELDS,
    Approval,
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Custom,
    Done,
    Error,
    Event,
    Meta,
    State,
    Status,
    Token,
    Unknown,
    Usage,
)

# More than the largest request (a body is at most 1 MiB) with 16 k shown tokens, or a second of log-probabilities.
MAX_FRAME_BYTES = 16 * 1024 * 1024
_HEAD = 4
# What msgspec raises for a value without a place in MessagePack (a number beyond 64 bits, half a surrogate), and for
# bytes that it does not understand.
MSGPACK_ERRORS = (ValueError, TypeError, OverflowError, RecursionError)

T = TypeVar("T")


class FrameError(ValueError):
    """Bytes that are no frame, message or event of ours, or a value that cannot become a frame."""


def frame(payload: bytes) -> bytes:
    """Put the length before a payload."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(payload):,} bytes; {MAX_FRAME_BYTES:,} is the limit")
    return len(payload).to_bytes(_HEAD, "big") + payload


@dataclass(slots=True, eq=False)
class FrameCutter:
    """Cuts what a socket gives into payloads; holds no more than one unfinished frame and the last piece fed.

    held:  | len | payload ......... | len | payl
           ^start                    ^end = start + _HEAD + len
    """

    _held: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are whole now. Raises FrameError as soon as a length is over the limit."""
        held, out, start = self._held, [], 0
        held += data
        while len(held) >= start + _HEAD:
            size = int.from_bytes(held[start : start + _HEAD], "big")
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {size:,} bytes is announced; {MAX_FRAME_BYTES:,} is the limit")
            end = start + _HEAD + size
            if end > len(held):
                break
            out.append(bytes(held[start + _HEAD : end]))
            start = end
        del held[:start]
        return out


class UnknownCount:
    """How many events and fields this process has read that it does not know; again at each reading. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_events = 0
        self.num_fields = 0

    def add(self, *, num_events: int = 0, num_fields: int = 0) -> None:
        """Count more of them."""
        with self._lock:
            self.num_events += num_events
            self.num_fields += num_fields


# Of the whole process: events are decoded by logs, followers and engine clients alike, and /metrics shows one number.
UNKNOWN_COUNT = UnknownCount()

_KINDS = (Meta, Status, Citation, State, Custom, BlockStart, Token, BlockStop, Approval, ChoiceDone, Error, Done)
_WITH_ADDED_FIELDS = frozenset({Meta, ChoiceDone, Error, Done})
_KIND = re.compile(r"[a-z_]{1,32}")
_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPE: msgspec.msgpack.Decoder[tuple[str, msgspec.Raw]] = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_ANY_FIELDS: msgspec.msgpack.Decoder[dict[str, msgspec.Raw]] = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_EVENTS: dict[str, msgspec.msgpack.Decoder[Event]] = {kind.type: msgspec.msgpack.Decoder(kind) for kind in _KINDS}
_NAMES = {kind.type: frozenset(one.name for one in fields(kind)) for kind in _KINDS}
# The first byte of an event's map (its length) as this release writes it: nearly every event has it.
_USUAL_HEADS = {kind: 0x80 | len(names - ADDED_FIELDS) for kind, names in _NAMES.items()}


def encode_event(event: Event) -> bytes:
    """Return an event as bytes."""
    try:
        if isinstance(event, Unknown):
            return _ENCODER.encode((event.kind, msgspec.Raw(event.fields)))
        return _ENCODER.encode((event.type, _without_defaults(event) if type(event) in _WITH_ADDED_FIELDS else event))
    except MSGPACK_ERRORS as error:
        raise FrameError(f"not to be encoded: {error}") from error


def _without_defaults(value: Any) -> dict[str, Any]:
    """Return the fields of `value`, without the added fields that have their default."""
    out: dict[str, Any] = {}
    for one in fields(value):
        item = getattr(value, one.name)
        if one.name not in ADDED_FIELDS or item != one.default:
            out[one.name] = _without_defaults(item) if isinstance(item, Usage) else item
    return out


def decode_event(data: bytes | msgspec.Raw) -> Event:
    """Return the event that bytes stand for, `Unknown` for a kind of a later release. Raises FrameError."""
    try:
        kind, raw = _ENVELOPE.decode(data)
        decoder = _EVENTS.get(kind)
        event = None if decoder is None else decoder.decode(raw)
    except MSGPACK_ERRORS as error:
        raise FrameError(f"not understood: {error}") from error
    if event is None:
        if not _KIND.fullmatch(kind):
            raise FrameError(f"no event is called {kind[:40]!r}")
        unpack(_ANY_FIELDS, raw)
        UNKNOWN_COUNT.add(num_events=1)
        return Unknown(kind=kind, fields=bytes(raw))
    if memoryview(raw)[0] != _USUAL_HEADS[kind]:
        num_unknown = len(unpack(_ANY_FIELDS, raw).keys() - _NAMES[kind])
        if num_unknown:
            UNKNOWN_COUNT.add(num_fields=num_unknown)
    return event


def unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes | msgspec.Raw) -> T:
    """Decode into the decoder's type, or raise FrameError."""
    try:
        return decoder.decode(data)
    except MSGPACK_ERRORS as error:
        raise FrameError(f"not understood: {error}") from error
