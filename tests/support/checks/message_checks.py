"""The laws of a stream of the Messages API, checked on the bytes that a client has read.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop

Written from the official client's fold (anthropic 2.12, `lib/streaming/_messages.py`), not from our encoder.
"""

from __future__ import annotations

import json
from typing import Any

from tests.support.checks.sse_reader import Read, read_events

_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_OWNERS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "tool_use",
           "signature_delta": "thinking", "citations_delta": "text"}  # fmt: skip


def events_in(body: bytes) -> list[tuple[Read, dict[str, Any]]]:
    """Return the events without pings; each one's name is its type."""
    found = [(one, json.loads(one.data)) for one in read_events(body)]
    assert [one.event for one, _ in found] == [data["type"] for _, data in found]
    return [(one, data) for one, data in found if one.event != "ping"]


def check_message(body: bytes) -> dict[str, Any]:
    """Return the message that a whole, successful stream makes."""
    message, is_over = folded(body)
    assert is_over
    return message


def folded(body: bytes) -> tuple[dict[str, Any], bool]:
    """Return the message so far, and whether it is over."""
    message: dict[str, Any] = {}
    text, is_open, has_delta, is_over = "", False, False, False
    for _, event in events_in(body):
        kind = event["type"]
        assert not is_over
        assert bool(message) == (kind != "message_start")
        assert is_open == (kind in ("content_block_delta", "content_block_stop"))
        if kind == "message_start":
            message = event["message"]
            assert message["content"] == []
        elif kind == "content_block_start":
            assert not has_delta
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            text, is_open = "", True
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            text += _take(message["content"][-1], event["delta"])
        elif kind == "content_block_stop":
            assert event["index"] == len(message["content"]) - 1
            block, is_open = message["content"][-1], False
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = _object(text)
            else:
                block[block["type"]] = text
        elif kind == "message_delta":
            assert not has_delta
            has_delta = True
            message |= {**event["delta"], "usage": {**message["usage"], **event["usage"]}}
        else:
            assert kind == "message_stop"
            assert has_delta
            is_over = True
    return message, is_over


def _take(block: dict[str, Any], delta: dict[str, Any]) -> str:
    """Apply a delta that is not text; return the text of one that is."""
    assert _OWNERS[delta["type"]] == block["type"]
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    elif delta["type"] == "citations_delta":
        block.setdefault("citations", []).append(delta["citation"])
    else:
        return str(delta[_FIELDS[delta["type"]]])
    return ""


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"partial_json": text}
