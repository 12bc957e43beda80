"""Laws of frames and of events as bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.events import (
    ChoiceDone,
    Done,
    Error,
    Event,
    Meta,
    PositionLogprobs,
    Status,
    Token,
    TokenLogprob,
    Usage,
)
from streamserve.protocol.frames import (
    MAX_FRAME_BYTES,
    FrameCutter,
    FrameError,
    decode_event,
    encode_event,
    frame,
)

counts = st.integers(0, 2**40)
numbers = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, 2**32), max_size=5).map(tuple)
logprobs = st.builds(TokenLogprob, token_id=counts, token=st.text(), bytes_=st.binary(), logprob=numbers)
positions = st.builds(PositionLogprobs, chosen=logprobs, top=st.lists(logprobs, max_size=3).map(tuple))
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Meta, model=st.text(), stream_id=st.text(), created=counts, prompt_tokens=counts, cached_tokens=counts),
    st.builds(
        Status,
        status=st.text(),
        step=st.none() | counts,
        of=st.none() | counts,
        message=st.none() | st.text(),
    ),
    st.builds(
        Token,
        text=st.text(),
        token_ids=ids,
        index=counts,
        choice=counts,
        logprobs=st.none() | st.lists(positions, max_size=3).map(tuple),
    ),
    st.builds(ChoiceDone, choice=counts, finish_reason=st.text()),
    st.builds(Error, code=st.text(), message=st.text(), retryable=st.booleans()),
    st.builds(
        Done,
        finish_reason=st.text(),
        usage=st.builds(Usage, prompt_tokens=counts, completion_tokens=counts, cached_tokens=counts),
        latency=numbers,
        breakdown=st.dictionaries(st.text(), numbers, max_size=4),
        kept_seq=st.none() | counts,
    ),
)


@given(events)
def test_an_event_comes_back_as_it_went(event: Event) -> None:
    """decode(encode(e)) == e, and of the same class."""
    back = decode_event(encode_event(event))
    assert back == event
    assert type(back) is type(event)


def test_minus_infinity_survives() -> None:
    """A masked token's log-probability, which JSON cannot say."""
    chosen = TokenLogprob(token_id=1, token="a", bytes_=b"\xff", logprob=-math.inf)
    event = Token(text="a", token_ids=(1,), logprobs=(PositionLogprobs(chosen=chosen),))
    assert decode_event(encode_event(event)) == event


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_a_frame_error(data: bytes) -> None:
    """Nothing else is ever raised."""
    try:
        decode_event(data)
    except FrameError:
        return


@given(events, st.data())
def test_a_changed_byte_is_an_event_or_a_frame_error(event: Event, data: st.DataObject) -> None:
    """As above, near what is valid."""
    raw = bytearray(encode_event(event))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_event(bytes(raw))
    except FrameError:
        return


@pytest.mark.parametrize(
    "value",
    [
        ("nonsense", {}),
        ("token", {"text": b"not text", "token_ids": []}),
        ("token", {"text": "a"}),
        ("token", {"text": "a", "token_ids": ["1"]}),
        ("done", {"finish_reason": "stop", "usage": []}),
        ("error", {"code": "x", "message": "m", "retryable": 1}),
        ("token",),
        {"token": {}},
    ],
)
def test_fields_are_checked(value: object) -> None:
    """A wrong name, a missing field and a wrong type are errors."""
    with pytest.raises(FrameError):
        decode_event(msgspec.msgpack.encode(value))


def test_deep_nesting_is_an_error() -> None:
    """It costs no stack."""
    with pytest.raises(FrameError):
        decode_event(b"\x92\xa5token" + b"\x91" * 100_000)


def test_a_field_of_this_version_is_absent_in_older_logs() -> None:
    """Then it has its default, and is not told to anybody; what is told stays as it is."""
    data = msgspec.msgpack.encode(("status", {"status": "loading", "step": None, "of": None, "message": None}))
    event = decode_event(data)
    assert isinstance(event, Status)
    assert (event.resumable, event.payload()) == (None, {"status": "loading"})
    told = Status(status="log_full", resumable=False)
    assert decode_event(encode_event(told)) == told
    assert told.payload() == {"status": "log_full", "resumable": False}


def test_a_field_of_a_later_version_is_skipped() -> None:
    """A log that a newer version wrote can be read."""
    data = msgspec.msgpack.encode(("status", {"status": "loading", "mood": "good"}))
    assert decode_event(data) == Status(status="loading")


def test_what_has_no_place_in_bytes_is_an_error() -> None:
    """Half a surrogate, a number beyond 64 bits."""
    token = Token(text="a", token_ids=(1,))
    for event in (replace(token, text="\ud800"), replace(token, token_ids=(2**70,))):
        with pytest.raises(FrameError):
            encode_event(event)


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_frames_survive_any_cut(payloads: list[bytes], data: st.DataObject) -> None:
    """However a socket tears the bytes apart, the payloads come out whole and in order."""
    raw = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    cutter, out = FrameCutter(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        out += cutter.feed(raw[start:end])
    assert out == payloads


def test_a_length_over_the_limit_is_refused_at_once() -> None:
    """Before a byte of it has come; what is too long is not sent either."""
    with pytest.raises(FrameError):
        FrameCutter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError):
        frame(bytes(MAX_FRAME_BYTES + 1))
