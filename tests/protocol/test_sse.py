"""Laws of SSE frames: a reader true to the specification gets back the framed text, as exactly one event."""

import json

import httpx
import httpx_sse
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from streamserve.protocol.sse import FIRST_BYTES, KEEPALIVE, comment, frame, one_line_json
from tests.support.checks.sse_reader import Read, read_events

# Any code points, lone surrogates too: a model may generate any text.
NASTY = "\r\n\0\ufeff\x85\u2028\u2029:dat {}\"'\\"
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=())) | st.text(NASTY)


@given(ANY_TEXT)
@example("a\r\n\r\ndata: {}\n\nid: x\nevent: done")
@example("\ud800 \0 \u2028\u2029\x85\ufeff")
def test_any_text_survives_the_wire(text: str):
    """parse(frame(encode(text))) == text, as exactly one event."""
    wire = frame(one_line_json({"text": text}), event="token", id="log-1")
    (read,) = read_events(wire)
    assert (read.event, read.id) == ("token", "log-1")
    assert json.loads(read.data) == {"text": text}


@given(ANY_TEXT)
def test_sloppy_readers_see_the_same(text: str):
    """Readers that split at each of Python's line ends (httpx's `iter_lines` did) get the same events."""
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=frame(one_line_json([text])))
    (event,) = httpx_sse.EventSource(response).iter_sse()
    assert json.loads(event.data) == [text]
    assert len(frame(one_line_json([text])).decode().splitlines()) == 2


def test_a_frame_is_event_id_data_in_that_order():
    """The exact bytes."""
    assert frame("{}", event="token", id="abc-1") == b"event: token\nid: abc-1\ndata: {}\n\n"
    assert frame("[DONE]") == b"data: [DONE]\n\n"
    assert comment("keepalive") == b": keepalive\n"


def test_text_stays_readable_on_the_wire():
    """Text is sent as UTF-8, not as escapes three times as long."""
    assert frame(one_line_json({"t": "日本 🎉"})) == 'data: {"t":"日本 🎉"}\n\n'.encode()


@pytest.mark.parametrize("data", ["a\nb", "a\rb", "\r\n"])
def test_data_of_several_lines_raises(data: str):
    """Data with a line end raises: it would forge the next line."""
    with pytest.raises(ValueError, match="one line"):
        frame(data)
    with pytest.raises(ValueError, match="one line"):
        comment(data)


@pytest.mark.parametrize("bad", ["", "a b", "a\n", "a\nb", "a\r", "\0", "ü", "x" * 65])
def test_ids_and_event_names_keep_to_their_alphabet(bad: str):
    """A newline in either raises: it would forge an event (CVE-2026-44214)."""
    with pytest.raises(ValueError, match="SSE line"):
        frame("{}", id=bad)
    with pytest.raises(ValueError, match="SSE line"):
        frame("{}", event=bad)


def test_a_number_that_json_lacks_raises():
    """NaN raises and never reaches a reader."""
    with pytest.raises(ValueError, match="JSON compliant"):
        one_line_json({"latency": float("nan")})


@given(st.lists(st.sampled_from(["\r", "\n", "\r\n", "data: a", "id: 1", ": c", "event: e"]), max_size=12))
def test_our_reader_agrees_with_the_openai_one(lines: list[str]):
    """The tests' reader splits any line ends as the official client's decoder does."""
    whole = "".join(lines).encode() + b"\n\n"
    theirs = [(sse.event or "message", sse.data) for sse in SSEDecoder().iter_bytes(iter([whole])) if sse.data]
    assert [(read.event, read.data) for read in read_events(whole) if read.data] == theirs


def test_comments_are_invisible():
    """Keepalives and first bytes make no event for the specification, httpx-sse and openai.

    The last two dispatch an empty event at a blank line that follows any id (found with openai 3.52).
    """
    wire = FIRST_BYTES + frame("1", id="log-1") + KEEPALIVE + KEEPALIVE + frame("2", id="log-2") + KEEPALIVE
    assert read_events(wire) == [Read("message", "1", "log-1"), Read("message", "2", "log-2")]
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=wire)
    assert [event.data for event in httpx_sse.EventSource(response).iter_sse()] == ["1", "2"]
    assert [event.data for event in SSEDecoder().iter_bytes(iter([wire]))] == ["1", "2"]
