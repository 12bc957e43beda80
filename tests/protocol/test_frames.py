"""Laws of frames and of events as bytes."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.events import (
    ADDED_FIELDS,
    BLOCK_KINDS,
    Approval,
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Done,
    Error,
    Event,
    Meta,
    PositionLogprobs,
    Status,
    Token,
    TokenLogprob,
    Unknown,
    Usage,
)
from streamserve.protocol.frames import (
    MAX_FRAME_BYTES,
    UNKNOWN_COUNT,
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
    st.builds(
        BlockStart,
        choice=counts,
        index=counts,
        kind=st.sampled_from(BLOCK_KINDS) | st.text(),
        id=st.none() | st.text(),
        name=st.none() | st.text(),
    ),
    st.builds(BlockStop, choice=counts, index=counts, signature=st.none() | st.text()),
    st.builds(
        Citation,
        source=st.text(),
        id=st.text(),
        title=st.none() | st.text(),
        url=st.none() | st.text(),
        choice=st.none() | counts,
        index=st.none() | counts,
        start=st.none() | counts,
        end=st.none() | counts,
    ),
    st.builds(Approval, id=st.text(), name=st.text(), arguments=st.text(), message=st.none() | st.text()),
    st.builds(ChoiceDone, choice=counts, finish_reason=st.text(), stop_string=st.none() | st.text()),
    st.builds(Error, code=st.text(), message=st.text(), retryable=st.booleans()),
    st.builds(
        Done,
        finish_reason=st.text(),
        usage=st.builds(
            Usage, prompt_tokens=counts, completion_tokens=counts, cached_tokens=counts, reasoning_tokens=counts
        ),
        latency=numbers,
        breakdown=st.dictionaries(st.text(), numbers, max_size=4),
        kept_seq=st.none() | counts,
        stop_string=st.none() | st.text(),
    ),
)

KINDS = {
    kind.type for kind in (Meta, Status, Citation, BlockStart, Token, BlockStop, Approval, ChoiceDone, Error, Done)
}


@given(events)
def test_an_event_comes_back_as_it_went(event: Event) -> None:
    """decode(encode(e)) == e, of the same class."""
    back = decode_event(encode_event(event))
    assert back == event
    assert type(back) is type(event)


def test_minus_infinity_survives() -> None:
    """A masked token's log-probability, which JSON does not have, comes back."""
    chosen = TokenLogprob(token_id=1, token="a", bytes_=b"\xff", logprob=-math.inf)
    event = Token(text="a", token_ids=(1,), logprobs=(PositionLogprobs(chosen=chosen),))
    assert decode_event(encode_event(event)) == event


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_a_frame_error(data: bytes) -> None:
    """No other exception is raised."""
    try:
        decode_event(data)
    except FrameError:
        return


@given(events, st.data())
def test_a_changed_byte_is_an_event_or_a_frame_error(event: Event, data: st.DataObject) -> None:
    """The same, for bytes that are nearly valid."""
    raw = bytearray(encode_event(event))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_event(bytes(raw))
    except FrameError:
        return


@pytest.mark.parametrize(
    "value",
    [
        ("NONSENSE", {}),
        ("", {}),
        ("nonsense", []),
        ("nonsense", {1: 2}),
        ("n" * 33, {}),
        ("block_start", {"choice": 0, "index": "0", "kind": "text"}),
        ("block_stop", {"choice": 0}),
        ("citation", {"source": "docs"}),
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
    """A name that no event can have, a missing field and a wrong type are errors."""
    with pytest.raises(FrameError):
        decode_event(msgspec.msgpack.encode(value))


def test_deep_nesting_is_an_error() -> None:
    """A hundred thousand levels are refused without using up the stack."""
    with pytest.raises(FrameError):
        decode_event(b"\x92\xa5token" + b"\x91" * 100_000)


_LOGPROB = TokenLogprob(token_id=7, token="a", bytes_=b"\xf0\x9f", logprob=-0.5)
# Written by 0.1.0, before it knew blocks, citations, stop strings and reasoning tokens.
GOLDEN: list[tuple[Event, bytes]] = [
    (
        Meta(model="m", stream_id="s", created=1, prompt_tokens=2, cached_tokens=3),
        b"\x92\xa4meta\x85\xa5model\xa1m\xa9stream_id\xa1s\xa7created\x01\xadprompt_tokens\x02\xadcached_tokens\x03",
    ),
    (
        Status(status="queued", step=1, of=2, message="x"),
        b"\x92\xa6status\x85\xa6status\xa6queued\xa4step\x01\xa2of\x02\xa7message\xa1x\xa9resumable\xc0",
    ),
    (
        Status(status="log_full", resumable=False),
        b"\x92\xa6status\x85\xa6status\xa8log_full\xa4step\xc0\xa2of\xc0\xa7message\xc0\xa9resumable\xc2",
    ),
    (
        Token(text="Hé", token_ids=(5, 300)),
        b"\x92\xa5token\x85\xa4text\xa3H\xc3\xa9\xa9token_ids\x92\x05\xcd\x01,\xa5index\x00\xa6choice\x00\xa8logprobs\xc0",
    ),
    (
        Token(text="", token_ids=(70000,), index=1, choice=2),
        b"\x92\xa5token\x85\xa4text\xa0\xa9token_ids\x91\xce\x00\x01\x11p\xa5index\x01\xa6choice\x02\xa8logprobs\xc0",
    ),
    (
        Token(text="a", token_ids=(7,), logprobs=(PositionLogprobs(chosen=_LOGPROB, top=(_LOGPROB,)),)),
        b"\x92\xa5token\x85\xa4text\xa1a\xa9token_ids\x91\x07\xa5index\x00\xa6choice\x00\xa8logprobs\x91\x82\xa6chosen"
        b"\x84\xa8token_id\x07\xa5token\xa1a\xa6bytes_\xc4\x02\xf0\x9f\xa7logprob\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00"
        b"\xa3top\x91\x84\xa8token_id\x07\xa5token\xa1a\xa6bytes_\xc4\x02\xf0\x9f\xa7logprob\xcb\xbf\xe0\x00\x00\x00\x00"
        b"\x00\x00",
    ),
    (ChoiceDone(choice=1, finish_reason="length"), b"\x92\xabchoice_done\x82\xa6choice\x01\xadfinish_reason\xa6length"),
    (
        Error(code="c", message="m", retryable=True),
        b"\x92\xa5error\x83\xa4code\xa1c\xa7message\xa1m\xa9retryable\xc3",
    ),
    (
        Done(finish_reason="stop"),
        b"\x92\xa4done\x85\xadfinish_reason\xa4stop\xa5usage\x83\xadprompt_tokens\x00\xb1completion_tokens\x00"
        b"\xadcached_tokens\x00\xa7latency\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa9breakdown\x80\xa8kept_seq\xc0",
    ),
    (
        Done(
            finish_reason="cancelled",
            usage=Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=4),
            latency=0.5,
            breakdown={"ttft": 0.125},
            kept_seq=3,
        ),
        b"\x92\xa4done\x85\xadfinish_reason\xa9cancelled\xa5usage\x83\xadprompt_tokens\t\xb1completion_tokens\x02"
        b"\xadcached_tokens\x04\xa7latency\xcb?\xe0\x00\x00\x00\x00\x00\x00\xa9breakdown\x81\xa4ttft\xcb?\xc0\x00\x00\x00\x00"
        b"\x00\x00\xa8kept_seq\x03",
    ),
]


@pytest.mark.parametrize(("event", "data"), GOLDEN, ids=lambda value: getattr(value, "type", ""))
def test_an_event_of_0_1_0_has_the_bytes_of_0_1_0(event: Event, data: bytes) -> None:
    """Both releases write into one log during a rolling restart: an event without new fields has the old bytes."""
    assert encode_event(event) == data
    assert decode_event(data) == event


# The fields of 0.1.0, in the order in which it writes them.
FIELDS_OF_0_1_0 = {
    "meta": ("model", "stream_id", "created", "prompt_tokens", "cached_tokens"),
    "status": ("status", "step", "of", "message", "resumable"),
    "token": ("text", "token_ids", "index", "choice", "logprobs"),
    "choice_done": ("choice", "finish_reason"),
    "error": ("code", "message", "retryable"),
    "done": ("finish_reason", "usage", "latency", "breakdown", "kept_seq"),
}


@given(events)
def test_any_event_without_new_fields_has_the_bytes_of_0_1_0(event: Event) -> None:
    """The bytes are those of a map of the old fields, in the old order, for any values."""
    if event.type not in FIELDS_OF_0_1_0:
        return
    added = {name: None for name in ("stop_string",) if hasattr(event, name)}
    if isinstance(event, Done):
        event = replace(event, usage=replace(event.usage, reasoning_tokens=0))
    event = replace(event, **added)
    old: dict[str, object] = {name: getattr(event, name) for name in FIELDS_OF_0_1_0[event.type]}
    if isinstance(event, Done):
        names = ("prompt_tokens", "completion_tokens", "cached_tokens")
        old["usage"] = {name: getattr(event.usage, name) for name in names}
    assert encode_event(event) == msgspec.msgpack.encode((event.type, old))


@given(events)
def test_0_1_0_finds_all_fields_it_knows(event: Event) -> None:
    """A field that 0.1.0 writes is written whatever its value; an added one only where it is not at its default."""
    kind, written = msgspec.msgpack.decode(encode_event(event))
    names = {one.name for one in fields(event)}
    assert kind == event.type
    assert names - ADDED_FIELDS <= set(written) <= names
    assert all(written[name] is not None for name in ADDED_FIELDS & set(written))


def test_a_field_that_is_absent_has_its_default() -> None:
    """A log of an older release can be read; the payload lacks the field too."""
    data = msgspec.msgpack.encode(("status", {"status": "loading", "step": None, "of": None, "message": None}))
    event = decode_event(data)
    assert isinstance(event, Status)
    assert (event.resumable, event.payload()) == (None, {"status": "loading"})
    shown = Status(status="log_full", resumable=False)
    assert decode_event(encode_event(shown)) == shown
    assert shown.payload() == {"status": "log_full", "resumable": False}


def test_a_field_that_is_unknown_is_skipped_and_counted() -> None:
    """A log of a newer release can be read, and `/metrics` shows that it was; known fields are never counted."""
    before = UNKNOWN_COUNT.num_fields
    data = msgspec.msgpack.encode(("status", {"status": "loading", "mood": "good", "colour": "red"}))
    assert decode_event(data) == Status(status="loading")
    assert UNKNOWN_COUNT.num_fields == before + 2
    for event, written in GOLDEN:
        assert decode_event(written) == event
    assert decode_event(encode_event(Done(finish_reason="stop", stop_string="END"))).payload()["stop_string"] == "END"
    assert UNKNOWN_COUNT.num_fields == before + 2


@given(st.from_regex(r"[a-z_]{1,32}", fullmatch=True), st.dictionaries(st.text(), st.integers(0, 9) | st.text()))
def test_an_event_that_is_unknown_is_kept_and_counted(kind: str, values: dict[str, object]) -> None:
    """It keeps its number, and is written again with the bytes it was read from."""
    kind += "_later"[: 32 - len(kind)]
    if kind in KINDS:
        return
    before, data = UNKNOWN_COUNT.num_events, msgspec.msgpack.encode((kind, values))
    event = decode_event(data)
    assert isinstance(event, Unknown)
    assert (event.kind, event.payload()) == (kind, {"kind": kind})
    assert encode_event(event) == data
    assert UNKNOWN_COUNT.num_events == before + 1


def test_what_has_no_place_in_bytes_is_an_error() -> None:
    """Half a surrogate and a number beyond 64 bits raise FrameError."""
    token = Token(text="a", token_ids=(1,))
    for event in (replace(token, text="\ud800"), replace(token, token_ids=(2**70,))):
        with pytest.raises(FrameError):
            encode_event(event)


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_frames_survive_any_cut(payloads: list[bytes], data: st.DataObject) -> None:
    """Wherever the bytes are cut, the payloads come out whole and in order."""
    raw = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    cutter, out = FrameCutter(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        out += cutter.feed(raw[start:end])
    assert out == payloads


def test_a_length_over_the_limit_is_refused_at_once() -> None:
    """The length alone is refused, before its payload arrives; a payload that is too long is not framed either."""
    with pytest.raises(FrameError):
        FrameCutter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError):
        frame(bytes(MAX_FRAME_BYTES + 1))
