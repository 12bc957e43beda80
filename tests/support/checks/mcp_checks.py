"""The grammar of a response of `/mcp` as events: perhaps an event without data, progress that grows, one response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def check_response(events: Sequence[tuple[str, str]], *, is_whole: bool) -> dict[str, Any] | None:
    """Check the (id, data) of each event; return the response, None where it has not come."""
    response: dict[str, Any] | None = None
    step, tokens, seq = 0.0, set[Any](), -1
    for place, (id_, data) in enumerate(events):
        assert response is None, "something follows the response"
        if id_:
            number = int(id_.partition(":")[0].rpartition("-")[2])
            assert number > seq, f"ids do not rise: {id_}"
            seq = number
        if not data:
            assert place == 0, "an event without data within a response"
            assert id_, "an event without data and without an id"
            continue
        message = json.loads(data)
        assert message["jsonrpc"] == "2.0", message
        if "method" in message:
            assert message["method"] == "notifications/progress", message
            assert "id" not in message, message
            params = message["params"]
            tokens.add(params["progressToken"])
            assert params["progress"] > step, f"progress does not grow: {params}"
            step = params["progress"]
        else:
            assert isinstance(message["id"], str | int), message
            assert ("result" in message) != ("error" in message), message
            if "result" in message:
                assert all(block["type"] in ("text", "resource_link") for block in message["result"]["content"])
                assert isinstance(message["result"]["isError"], bool)
            response = message
    assert len(tokens) <= 1, f"progress of several requests: {tokens}"
    assert response is not None or not is_whole, "no response"
    return response
