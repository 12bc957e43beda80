"""Laws of the two plain formats, `tokens` and `text`."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects.plain import TextEncoder, TokensEncoder
from streamserve.protocol.events import GoingAway, LoggedEvent
from tests.support.bodies.event_logs import LOG_ID, blocks, failure, numbered, success, tok
from tests.support.checks.sse_reader import read_events


def tokens_wire(log: list[LoggedEvent]) -> bytes:
    """Return the log as `tokens`."""
    encoder = TokensEncoder(LOG_ID)
    return b"".join(encoder.encode(logged) for logged in log)


def text_wire(log: list[LoggedEvent]) -> str:
    """Return the log as `text`."""
    encoder = TextEncoder()
    return b"".join(encoder.encode(logged) for logged in log).decode()


def test_tokens_until_done():
    """A short answer has exactly these bytes; an event without text makes no frame."""
    assert tokens_wire(success(tok("Hel"), tok(""), tok("lo\n"))) == (
        b'id: abcdefghijkl-3\ndata: {"token":"Hel"}\n\n'
        b'id: abcdefghijkl-5\ndata: {"token":"lo\\n"}\n\n'
        b"id: abcdefghijkl-6\ndata: [DONE]\n\n"
    )


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (failure(tok("Hi")), "engine_unavailable"),
        (success(tok("Hi"), reason="cancelled"), "cancelled"),
        (success(tok("Hi"), reason="abandoned"), "abandoned"),
    ],
)
def test_only_success_is_done(log: list[LoggedEvent], code: str):
    """`[DONE]` never follows a failure, a stop or an abandonment; an error names which it was."""
    read = read_events(tokens_wire(log))
    assert "[DONE]" not in [one.data for one in read]
    assert json.loads(read[-1].data)["error"]["code"] == code
    assert f"[error {code}: " in text_wire(log).splitlines()[-1]


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "content_filter"])
def test_every_success_is_done(reason: str):
    """`[DONE]` follows each of the four reasons that mean a whole answer."""
    log = success(tok("Hi"), reason=reason)
    assert read_events(tokens_wire(log))[-1].data == "[DONE]"
    assert text_wire(log) == "Hi"


@given(st.lists(st.text(), max_size=10))
def test_both_carry_the_text_whole(pieces: list[str]):
    """The frames joined, and the plain text, are the answer."""
    log = success(*[tok(piece) for piece in pieces])
    frames = [json.loads(one.data)["token"] for one in read_events(tokens_wire(log))[:-1]]
    assert "".join(frames) == "".join(pieces) == text_wire(log)


def test_only_text_blocks_are_shown():
    """Thinking, calls and citations make no frame; a resumed reader's encoder has seen the block begin."""
    assert tokens_wire(blocks()) == (
        b'id: abcdefghijkl-8\ndata: {"token":"Hel"}\n\n'
        b'id: abcdefghijkl-9\ndata: {"token":"lo"}\n\n'
        b"id: abcdefghijkl-18\ndata: [DONE]\n\n"
    )
    assert text_wire(blocks()) == "Hello"


def test_going_away_is_an_error_in_formats_without_an_event_for_it():
    """Plain text ends in an error line; `tokens` ends without `[DONE]`."""
    notice = GoingAway(stream_id="s", seq=3, retry_ms=500)
    assert TextEncoder().going_away(notice) == b"\n[error engine_unavailable: The server is shutting down.]\n"
    assert TokensEncoder(LOG_ID).going_away(notice) == b""


def test_plain_text_survives_a_lone_surrogate():
    """A character that UTF-8 cannot carry becomes a question mark, not an exception."""
    assert text_wire(numbered(tok("a\ud800b"))) == "a?b"


def test_plain_text_has_no_keepalive():
    """Plain text has no first bytes and no keepalive: they would be part of the answer."""
    assert (TextEncoder.first_bytes, TextEncoder.keepalive) == (b"", b"")
    assert TokensEncoder.first_bytes == b": ok\n\n"
