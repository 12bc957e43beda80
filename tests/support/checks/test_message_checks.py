"""Laws of the checks of Messages API streams: each fault is found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.checks.message_checks import check_message
from tests.support.checks.stream_checks import check_stream

START: dict[str, Any] = {"type": "message_start", "message": {"content": [], "usage": {}}}
OPEN: dict[str, Any] = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
DELTA: dict[str, Any] = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}}
CLOSE: dict[str, Any] = {"type": "content_block_stop", "index": 0}
LAST: dict[str, Any] = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}}
STOP: dict[str, Any] = {"type": "message_stop"}
ERROR: dict[str, Any] = {"type": "error", "error": {"type": "api_error"}}
GOOD = (START, OPEN, DELTA, CLOSE, LAST, STOP)


def wire(*events: dict[str, Any], name: str = "") -> bytes:
    frames = [f"event: {name or one['type']}\ndata: {json.dumps(one)}\n\n" for one in events]
    return "".join(frames).encode()


def test_a_good_stream_passes() -> None:
    """Whole, ended by an error, and as far as it has come."""
    assert check_message(wire(*GOOD))["content"] == [{"type": "text", "text": "Hi"}]
    check_stream(wire(*GOOD), after=0, is_whole=True)
    check_stream(wire(START, ERROR), after=0, is_whole=True)
    check_stream(wire(*GOOD[:3]), after=0, is_whole=False)


@pytest.mark.parametrize(
    "events",
    [
        GOOD[:-1],
        GOOD[1:],
        (START, *GOOD),
        (START, DELTA, *GOOD[1:]),
        (START, OPEN, OPEN, *GOOD[2:]),
        (START, OPEN, DELTA, LAST, STOP),
        (START, OPEN, {**DELTA, "index": 1}, CLOSE, LAST, STOP),
        (START, {**OPEN, "index": 1}, *GOOD[2:]),
        (START, OPEN, {**DELTA, "delta": {"type": "thinking_delta", "thinking": "Hm"}}, CLOSE, LAST, STOP),
        (*GOOD[:4], STOP),
        (*GOOD[:4], LAST, LAST, STOP),
        (*GOOD, STOP),
        (START, OPEN, ERROR, CLOSE),
    ],
    ids=range(13),
)
def test_a_bad_stream_fails(events: tuple[dict[str, Any], ...]) -> None:
    """An event that is missing, twice, out of order, or of another block."""
    with pytest.raises(AssertionError):
        check_stream(wire(*events), after=0, is_whole=True)
    with pytest.raises(AssertionError):
        check_message(wire(*events))


def test_a_frame_without_its_name_fails() -> None:
    """The official client would drop it."""
    with pytest.raises(AssertionError):
        check_message(wire(*GOOD, name="message"))
