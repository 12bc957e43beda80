"""decode(encode(e)) == e, in every dialect, for any text, wherever TCP cuts; other projects' clients read it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator

import httpx
import httpx_sse
import pytest
from httpx_sse._decoders import SSEDecoder as SSELines
from hypothesis import example, given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from streamserve.dialects import native
from streamserve.dialects.anthropic.message import MessageEncoder
from streamserve.dialects.encoder import Encoder
from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.openai.chat import ChatEncoder
from streamserve.dialects.plain import TextEncoder, TokensEncoder
from streamserve.protocol.events import (
    BLOCK_KINDS,
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Done,
    Error,
    Event,
    LoggedEvent,
    Meta,
    Status,
    Token,
    Usage,
)
from streamserve.protocol.frames import FrameCutter, decode_event, encode_event, frame
from tests.support.bodies.event_logs import IDENTITY, LOG_ID, numbered
from tests.support.bodies.texts import any_texts, cut_up, cuts, texts
from tests.support.checks.sse_reader import Read, read_events

counts = st.integers(0, 2**40)
EVERYTHING = "\r\n\r\ndata: x\nid: 7\r\0\ufeff\x85\u2028\u2029\x0b\x0c\x1c🎉日本"


def events_of(any_text: st.SearchStrategy[str]) -> st.SearchStrategy[Event]:
    """Return events whose texts are of `any_text`."""
    ids = st.lists(st.integers(0, 2**32), max_size=4).map(tuple)
    usage = st.builds(
        Usage, prompt_tokens=counts, completion_tokens=counts, cached_tokens=counts, reasoning_tokens=counts
    )
    choice, index, kind = st.integers(0, 3), st.integers(0, 9), st.sampled_from(BLOCK_KINDS)
    seconds = st.integers(0, 10**7).map(lambda number: number / 1e4)
    reason = st.sampled_from(["stop", "length", "tool_calls", "content_filter", "cancelled", "abandoned"])
    return st.one_of(
        st.builds(Meta, model=any_text, stream_id=any_text, created=counts, prompt_tokens=counts, cached_tokens=counts),
        st.builds(Status, status=any_text, step=st.none() | counts, of=st.none() | counts, message=any_text),
        st.builds(Token, text=any_text, token_ids=ids, index=index, choice=choice),
        st.builds(
            BlockStart, choice=choice, index=index, kind=kind, id=st.none() | any_text, name=st.none() | any_text
        ),
        st.builds(BlockStop, choice=choice, index=index, signature=st.none() | any_text),
        st.builds(
            Citation,
            source=any_text,
            id=any_text,
            title=st.none() | any_text,
            url=st.none() | any_text,
            choice=st.none() | choice,
            index=st.none() | index,
            start=st.none() | counts,
            end=st.none() | counts,
        ),
        st.builds(ChoiceDone, choice=choice, finish_reason=reason, stop_string=st.none() | any_text),
        st.builds(Error, code=any_text, message=any_text, retryable=st.booleans()),
        st.builds(
            Done,
            finish_reason=reason,
            usage=usage,
            latency=seconds,
            breakdown=st.dictionaries(any_text, seconds, max_size=3),
            kept_seq=st.none() | counts,
            stop_string=st.none() | any_text,
        ),
    )


any_events = events_of(any_texts)


def _response(pieces: list[bytes]) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=_each(pieces))


def by_httpx_sse(pieces: list[bytes]) -> list[Read]:
    """Read with httpx-sse 0.4.3, which splits lines at CR, LF and CRLF."""
    events = httpx_sse.EventSource(_response(pieces)).iter_sse()
    return [Read(one.event, one.data, one.id) for one in events if one.data]


def by_lines(pieces: list[bytes]) -> list[Read]:
    """Read over httpx's `iter_lines`, as httpx-sse before 0.4.1 and many scripts: it splits like `str.splitlines`."""
    decoder = SSELines()
    events = [decoder.decode(line) for line in _response(pieces).iter_lines()]
    return [Read(one.event, one.data, one.id) for one in events if one is not None and one.data]


def by_openai(pieces: list[bytes]) -> list[Read]:
    """Read with the official client's decoder."""
    read = SSEDecoder().iter_bytes(iter([piece for piece in pieces if piece]))
    return [Read(one.event or "message", one.data, one.id or "") for one in read if one.data]


def _each(pieces: list[bytes]) -> Iterator[bytes]:
    yield from pieces


READERS: list[Callable[[list[bytes]], list[Read]]] = [read_events, by_httpx_sse, by_lines, by_openai]
readers = pytest.mark.parametrize("read", READERS, ids=["specification", "httpx-sse", "lines", "openai"])


def wire(encoder: Encoder, log: list[LoggedEvent], places: list[float] | None) -> list[bytes]:
    """Return all bytes for a reader, keepalives included, as TCP may cut them."""
    frames = [encoder.first_bytes, *(encoder.encode(one) + encoder.keepalive for one in log)]
    return cut_up(b"".join(frames), places)


def decoded(read: Read) -> LoggedEvent:
    """Return the event that a native frame stands for."""
    data = json.loads(read.data)
    if read.event == "token":
        data["token_ids"] = tuple(data["token_ids"])
    if read.event == "done":
        assert abs(data.pop("latency_ms") - 1000 * data["latency"]) <= 0.1
        usage = data.pop("usage")
        cached = usage.pop("prompt_tokens_details")["cached_tokens"]
        assert usage.pop("total_tokens") == usage["prompt_tokens"] + usage["completion_tokens"]
        assert data.pop("totalTokens") == usage["completion_tokens"]
        reasoning = usage.pop("completion_tokens_details", {"reasoning_tokens": 0})["reasoning_tokens"]
        data["usage"] = Usage(**usage, cached_tokens=cached, reasoning_tokens=reasoning)
    kinds: dict[str, Callable[..., Event]] = {
        kind.type: kind for kind in (Meta, Status, Citation, BlockStart, Token, BlockStop, ChoiceDone, Error, Done)
    }
    return LoggedEvent(seq=int(read.id.removeprefix(f"{LOG_ID}-")), event=kinds[read.event](**data))


def without_closing_meta(got: list[Read]) -> list[Read]:
    """Return the events of the log: without the `meta` that is made of the `done` behind it."""
    return [one for one in got if one.event != "meta" or "latency" not in json.loads(one.data)]


@readers
@given(st.lists(any_events, max_size=6), cuts())
@example([Token(text=EVERYTHING, token_ids=(1,)), Error(code=EVERYTHING, message=EVERYTHING)], [0.4, 0.5])
def test_native(read: Callable[[list[bytes]], list[Read]], events: list[Event], places: list[float]) -> None:
    """Every event arrives whole, once, with its number."""
    log = numbered(*events)
    assert [decoded(one) for one in without_closing_meta(read(wire(NativeEncoder(LOG_ID), log, places)))] == log


@readers
@given(any_events)
def test_native_byte_by_byte(read: Callable[[list[bytes]], list[Read]], event: Event) -> None:
    """Every event arrives from single bytes."""
    assert [decoded(one) for one in read(wire(NativeEncoder(LOG_ID), numbered(event), None))] == numbered(event)


@given(st.lists(any_events, max_size=6))
def test_websocket(events: list[Event]) -> None:
    """Every event arrives as a JSON message with its number."""
    for logged in numbered(*events):
        message = json.loads(json.dumps(native.websocket_message("s", LOG_ID, logged), ensure_ascii=False))
        read = Read(message["event"], json.dumps(message["data"]), message["event_id"])
        assert (decoded(read), message["seq"]) == (logged, logged.seq)


def answer(pieces: list[str]) -> list[LoggedEvent]:
    """Return a log of one choice with these texts."""
    tokens = [Token(text=text, token_ids=(number,)) for number, text in enumerate(pieces)]
    return numbered(*tokens, Done(finish_reason="stop"))


@readers
@given(st.lists(any_texts, max_size=6), cuts())
def test_tokens(read: Callable[[list[bytes]], list[Read]], pieces: list[str], places: list[float]) -> None:
    """Each text arrives under the number of its event, then `[DONE]`."""
    *tokens, last = read(wire(TokensEncoder(LOG_ID), answer(pieces), places))
    expected = [(f"{LOG_ID}-{seq}", text) for seq, text in enumerate(pieces, start=1) if text]
    assert [(one.id, json.loads(one.data)["token"]) for one in tokens] == expected
    assert (last.data, last.id) == ("[DONE]", f"{LOG_ID}-{len(pieces) + 1}")


@readers
@given(st.lists(st.tuples(any_texts, st.integers(0, 1)), max_size=6), cuts())
def test_openai_chat(
    read: Callable[[list[bytes]], list[Read]], pieces: list[tuple[str, int]], places: list[float]
) -> None:
    """Each choice's text arrives, then `[DONE]`."""
    log = numbered(
        *(Token(text=text, token_ids=(1,), choice=choice) for text, choice in pieces), Done(finish_reason="stop")
    )
    *chunks, last = read(wire(ChatEncoder(LOG_ID, n=2, **IDENTITY), log, places))  # type: ignore[arg-type]
    texts_of: dict[int, list[str]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in json.loads(chunk.data)["choices"]:
            texts_of[choice["index"]].append(choice["delta"].get("content", ""))
    assert {index: "".join(some) for index, some in texts_of.items()} == {
        index: "".join(text for text, choice in pieces if choice == index) for index in (0, 1)
    }
    assert last.data == "[DONE]"


@readers
@given(st.lists(any_texts, max_size=6), cuts())
def test_anthropic(read: Callable[[list[bytes]], list[Read]], pieces: list[str], places: list[float]) -> None:
    """Each text arrives under the number of its event, pings between them; then the stop."""
    encoder = MessageEncoder(LOG_ID, message_id="msg_1", model="m")
    got = [(one.id, json.loads(one.data)) for one in read(wire(encoder, answer(pieces), places)) if one.event != "ping"]
    texts_of = [(id, data["delta"]["text"]) for id, data in got if data["type"] == "content_block_delta"]
    assert texts_of == [(f"{LOG_ID}-{seq}", text) for seq, text in enumerate(pieces, start=1) if text]
    assert (got[-1][0], got[-1][1]["type"]) == (f"{LOG_ID}-{len(pieces) + 1}", "message_stop")


@given(st.lists(texts, max_size=6), cuts())
def test_plain_text(pieces: list[str], places: list[float]) -> None:
    """The text arrives byte for byte through an incremental decoder."""
    reader = codecs.getincrementaldecoder("utf-8")()
    got = [reader.decode(piece) for piece in wire(TextEncoder(), answer(pieces), places)]
    assert "".join(got) + reader.decode(b"", final=True) == "".join(pieces)


@given(st.lists(events_of(texts), max_size=6), cuts())
@example([Token(text=EVERYTHING, token_ids=(1,))], [0.5])
def test_between_our_processes(events: list[Event], places: list[float]) -> None:
    """Events survive the log's and the engine socket's bytes, cut anywhere."""
    sent = b"".join(frame(encode_event(event)) for event in events)
    cutter = FrameCutter()
    assert [decode_event(one) for piece in cut_up(sent, places) for one in cutter.feed(piece)] == events


def test_a_sloppy_reader_breaks_what_is_not_one_line_for_all() -> None:
    """A reader that splits at line separators breaks a frame that has them unescaped: the tests above can fail."""
    naive = 'data: {"token":"a\u2028b"}\n\n'.encode()
    assert [one.data for one in by_httpx_sse([naive])] == ['{"token":"a\u2028b"}']
    assert [one.data for one in by_lines([naive])] == ['{"token":"a']
