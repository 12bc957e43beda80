"""Laws of the checks on which the whole suite relies: each fault is found."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.support.checks.stream_checks import (
    check_native,
    check_native_part,
    check_openai,
    check_tokens,
    parse_sse,
    text_of,
)

LOG_ID = "abcdefghijkl"
END = ("done", {"finish_reason": "stop"})


def native(*events: tuple[int, str, dict[str, object]], log_id: str = LOG_ID) -> bytes:
    """Return frames of (seq, event, payload)."""
    return "".join(
        f"event: {event}\nid: {log_id}-{seq}\ndata: {json.dumps(data)}\n\n" for seq, event, data in events
    ).encode()


def token(text: str = "x", *ids: int) -> tuple[str, dict[str, object]]:
    return "token", {"text": text, "token_ids": ids or (1,), "choice": 0}


def farewell(after: int) -> bytes:
    data = {"after": after, "event_id": f"{LOG_ID}-{after}"}
    return f"event: farewell\nretry: 9\ndata: {json.dumps(data)}\n\n".encode()


META = (1, "meta", {})
THOUGHT = {"choice": 0, "index": 0, "kind": "thinking"}
BLOCK_STOP = {"choice": 0, "index": 0}
GOOD = native(META, (2, *token("é")), (5, *token("b", 1, 2, 3)), (6, *END))


def test_a_good_stream_passes() -> None:
    """Comments, joined tokens, snapshots, notices and a resumed part are right."""
    assert text_of(check_native(b": ok\n\n" + GOOD)) == "éb"
    assert [frame.seq for frame in check_native(b": keepalive\n" + native((3, *token()), (4, *END)), after=2)] == [3, 4]
    assert check_native_part(GOOD[: GOOD.rindex(b"event")])[-1].seq == 5
    leap = native((9, "snapshot", {"text": "abc", "seq": 9}), (10, *token("d")), (11, *END))
    assert text_of(check_native(native(META, (2, *token())) + leap)) == "abcd"
    assert [frame.event for frame in check_native_part(native(META) + farewell(1))] == ["meta"]
    notice = b'event: status\ndata: {"status":"waiting"}\n\n'
    assert [frame.seq for frame in check_native(native(META, (2, *token())) + notice + native((3, *END)))] == [1, 2, 3]
    assert [frame.data for frame in parse_sse(b"data: a\r\ndata: b\r\n\r\ndata: unfinished")] == ["a\nb"]


def test_an_echoed_prompt_may_be_joined() -> None:
    """It has no ids, and stands in events of 4,096 characters; a longer leap is a gap."""

    def answer(num_chars: int) -> bytes:
        echo = {**token("x" * num_chars)[1], "token_ids": []}
        return native(META, (3, "token", echo), (4, *token()), (5, *END))

    assert len(check_native(answer(4097))) == 4
    with pytest.raises(AssertionError, match="seq 3 after 1"):
        check_native(answer(4096))


def test_a_scored_prompt_may_be_joined() -> None:
    """Its events have no ids and no text, and a position each at least; a longer leap is a gap."""

    def answer(num_positions: int) -> bytes:
        one = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
        scored = {**token("")[1], "token_ids": [], "logprobs": [one] * num_positions}
        return native(META, (4, "token", scored), (5, *token()), (6, *END))

    assert len(check_native(answer(3))) == 4
    with pytest.raises(AssertionError, match="seq 4 after 1"):
        check_native(answer(2))


def test_the_text_is_that_of_text_blocks() -> None:
    """Tokens of a thinking block are no text, before a snapshot and after it."""
    thought = [META, (2, "block_start", THOUGHT), (3, *token("hm")), (4, "block_stop", BLOCK_STOP)]
    text = [(5, "block_start", {**THOUGHT, "index": 1, "kind": "text"}), (6, "token", {**token("a")[1], "index": 1})]
    rest = [(7, "block_stop", {**BLOCK_STOP, "index": 1}), (8, *END)]
    assert text_of(check_native(native(*thought, *text, *rest))) == "a"
    block = {"index": 0, "kind": "thinking", "text": "h", "is_open": True}
    leap = [META, (2, "snapshot", {"text": "", "seq": 2, "blocks": [block]}), *thought[2:], *text, *rest]
    assert text_of(check_native(native(*leap))) == "a"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        native(META, (2, *token())),
        native(META, (2, *END), (3, *END)),
        native(META, (2, *END), (3, *token())),
        native(META, (3, *END)),
        native(META, (2, *token()), (2, *END)),
        native(META, (4, *token("ab", 1, 2)), (5, *END)),
        native(META) + native((2, *END), log_id="mnopqrstuvwx"),
        native(META, (9, "snapshot", {"text": "a", "seq": 8}), (10, *END)),
        native(META, (9, "snapshot", {"text": "a", "seq": 9}), (9, *token()), (10, *END)),
        native(META, (2, "token", {**token()[1], "index": 1}), (3, *END)),
        native(META, (2, "block_start", THOUGHT), (3, *END)),
        native(META, (2, *token()), (3, "done", {"finish_reason": "stop", "usage": {"completion_tokens": 2}})),
        native(META) + farewell(1),
        native(META) + farewell(1) + native((2, *END)),
        native(META, (2, *END)) + farewell(1),
        native((1, *token()), (2, *END)),
        native(META, (2, *token("\ufffdx")), (3, *END)),
        b'event: meta\ndata: {}\n\nevent: done\ndata: {}\n\n',
    ],
    ids=["nothing", "no end", "two ends", "after an end", "gap", "same seq", "gap in joined tokens", "two logs",
         "another seq in a snapshot", "a token again", "token of no block", "open block", "ids not counted",
         "a farewell is no end", "after a farewell", "after the end", "no meta", "broken code point", "no ids"],
)  # fmt: skip
def test_a_bad_native_stream_fails(data: bytes) -> None:
    """Each of these streams breaks one law."""
    with pytest.raises(AssertionError):
        check_native(data)


@pytest.mark.parametrize("check", [check_tokens, check_openai])
@pytest.mark.parametrize(
    "data",
    [
        b'data: {"token": "a"}\n\n',
        b"data: [DONE]\n\ndata: [DONE]\n\n",
        b'data: [DONE]\n\ndata: {"token": "a"}\n\n',
        b'data: {"error": {}}\n\ndata: [DONE]\n\n',
    ],
    ids=["no end", "twice", "after the end", "done after an error"],
)
def test_done_stands_after_success_and_only_then(check: Callable[[bytes], object], data: bytes) -> None:
    """A stream has one `[DONE]` or one error, and it is the last frame."""
    with pytest.raises(AssertionError):
        check(data)
