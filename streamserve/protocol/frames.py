"""Frames and events as bytes: what crosses a socket between our processes, and what a durable log keeps.

A frame is a length (4 bytes, big-endian) and that many bytes. An event is MessagePack `[type, {field: value}]`: it says
itself what it is, and a field added later has its default in what was written before. Every byte is checked against the
types of protocol/events.py; nothing that could run is ever built. Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from streamserve.protocol.events import ChoiceDone, Done, Error, Event, Meta, Status, Token

# More than the largest request (a body is at most 1 MiB) with 16 k shown tokens, or a second of log-probabilities.
MAX_FRAME_BYTES = 16 * 1024 * 1024
_HEAD = 4

T = TypeVar("T")


class FrameError(ValueError):
    """Bytes that are no frame, message or event of ours, or a value that cannot become one."""


def frame(payload: bytes) -> bytes:
    """Put the length before a payload."""
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(payload):,} bytes; {MAX_FRAME_BYTES:,} is the limit")
    return len(payload).to_bytes(_HEAD, "big") + payload


class FrameCutter:
    """Cuts what a socket gives into payloads; holds no more than one unfinished frame and the last piece fed.

    held:  | len | payload ......... | len | payl
           ^start                    ^end = start + _HEAD + len
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are whole now. Raises FrameError as soon as a length is over the limit."""
        self._held += data
        out, start = [], 0
        while len(self._held) >= start + _HEAD:
            size = int.from_bytes(self._held[start : start + _HEAD], "big")
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {size:,} bytes is announced; {MAX_FRAME_BYTES:,} is the limit")
            end = start + _HEAD + size
            if end > len(self._held):
                break
            out.append(bytes(self._held[start + _HEAD : end]))
            start = end
        del self._held[:start]
        return out


_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPE: msgspec.msgpack.Decoder[tuple[str, msgspec.Raw]] = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_EVENTS: dict[str, msgspec.msgpack.Decoder[Event]] = {
    kind.type: msgspec.msgpack.Decoder(kind) for kind in (Meta, Status, Token, ChoiceDone, Error, Done)
}


def encode_event(event: Event) -> bytes:
    """Return an event as bytes."""
    return pack(_ENCODER, (event.type, event))


def decode_event(data: bytes | msgspec.Raw) -> Event:
    """Return the event that bytes stand for, or raise FrameError."""
    kind, fields = unpack(_ENVELOPE, data)
    if kind not in _EVENTS:
        raise FrameError(f"no event is called {kind[:40]!r}")
    return unpack(_EVENTS[kind], fields)


def pack(encoder: msgspec.msgpack.Encoder, value: Any) -> bytes:
    """Encode, or raise FrameError for what has no place in MessagePack (a number beyond 64 bits, half a surrogate)."""
    try:
        return encoder.encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FrameError(f"not to be encoded: {error}") from error


def unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes | msgspec.Raw) -> T:
    """Decode into the decoder's type, or raise FrameError."""
    try:
        return decoder.decode(data)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FrameError(f"not understood: {error}") from error
