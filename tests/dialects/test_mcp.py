"""Laws of MCP's dialect: what is streamed is what is whole, wherever it is cut; what comes in is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from streamserve.dialects import mcp
from streamserve.dialects.encoder import coalesce
from streamserve.dialects.fold import Answer
from streamserve.dialects.mcp import Asked, McpEncoder, Rpc
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import GoingAway, LoggedEvent, Status, is_terminal
from tests.support.bodies.random_logs import RandomAnswer, random_answer
from tests.support.checks.mcp_checks import check_response
from tests.support.checks.sse_reader import read_events

SEEDS = range(150)
OLD = Asked(id="a", token=7, is_resumable=True, is_primed=True)
NEW = Asked(id=3, is_modern=True)


def answers() -> Iterator[RandomAnswer]:
    """Return answers with an end of any kind."""
    made = (random_answer(seed, succeeds=seed % 2 == 0) for seed in SEEDS)
    return (answer for answer in made if is_terminal(answer.log[-1].event))


@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("asked", [OLD, NEW])
def test_the_last_event_is_the_whole_result(asked: Asked, joined: int) -> None:
    """However tokens are joined: the response that a caller gets who takes JSON."""
    for answer in answers():
        encoder = McpEncoder(answer, asked)
        sent = encoder.first_bytes + b"".join(map(encoder.encode, coalesce(answer.log, max_tokens=joined)))
        response = check_response([(one.id, one.data) for one in read_events(sent)], is_whole=True)
        assert response is not None
        whole = mcp.whole_json(Answer.of(answer.log, 1), answer.id)
        assert response == mcp.response_json(asked.id, whole, is_modern=asked.is_modern)


def test_an_event_s_id_holds_the_request() -> None:
    """A reader who resumes gets the same frames as before, at every event."""
    for answer in answers():
        first = McpEncoder(answer, OLD)
        sent = read_events(first.first_bytes + b"".join(map(first.encode, answer.log)))
        for place, event in enumerate(sent):
            found = mcp.resumed(event.id)
            assert found is not None
            id_, asked = found
            assert (asked.id, asked.token) == ("a", 7)
            seq = int(id_.rpartition("-")[2])
            again = McpEncoder(answer, asked)
            rest = b"".join([part for one in answer.log if (part := again.encode(one)) and one.seq > seq])
            assert [one.data for one in read_events(rest)] == [one.data for one in sent[place + 1 :]]


def test_a_server_that_goes_away_ends_only_what_cannot_be_resumed() -> None:
    """A resumable response just breaks off; another ends in an error."""
    answer, notice = random_answer(0), GoingAway(stream_id="s", seq=1, retry_ms=5)
    assert McpEncoder(answer, OLD).going_away(notice) == b""
    (event,) = read_events(McpEncoder(answer, NEW).going_away(notice))
    assert json.loads(event.data)["result"]["_meta"]["streamserve/run"]["retryable"] is True


def test_progress_grows() -> None:
    """A step that is shown late is left out; without a token there is none."""
    steps = [LoggedEvent(n, Status(status="step", step=k, message="m")) for n, k in ((1, 1), (2, 3), (3, 2), (4, 4))]
    encoder = McpEncoder(random_answer(0), OLD)
    shown = [json.loads(one.data)["params"]["progress"] for one in read_events(b"".join(map(encoder.encode, steps)))]
    assert shown == [1, 3, 4]
    assert b"".join(map(McpEncoder(random_answer(0), NEW).encode, steps)) == b""


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"id": 0, "method": "ping"}, Rpc(method="ping", id=0, params={})),
        ({"id": "", "method": "ping", "params": {}}, Rpc(method="ping", id="", params={})),
        ({"method": "notifications/initialized"}, Rpc(method="notifications/initialized", params={})),
        ({"id": 1, "result": {}}, Rpc(params={})),
        ({"id": 1, "error": {"code": 1, "message": "m"}}, Rpc(params={})),
    ],
)
def test_messages_are_read(body: dict[str, Any], wanted: Rpc) -> None:
    """Requests, notifications, and responses, which ask for nothing."""
    assert mcp.parse({"jsonrpc": "2.0", **body}) == wanted


def test_a_message_that_is_none_is_refused() -> None:
    """No JSON-RPC, ids that are none, and parameters that are no object."""
    for body in ({}, {"jsonrpc": "2.0"}, {"jsonrpc": "2.0", "id": [], "method": "a"}, {"jsonrpc": "2.0", "method": ""}):
        with pytest.raises(BadRequest):
            mcp.parse(body)
