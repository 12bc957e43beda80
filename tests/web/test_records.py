"""What is written down: one log line a stream, without a word anybody wrote."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from streamserve.models import ApiKey
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.web import site as runtime
from streamserve.web.permissions import PermissionChecks
from streamserve.web.records import answer_text
from tests.conftest import Caller, body_of, until_ready
from tests.support.event_logs import blocks
from tests.support.streams import ScriptedClient, ask

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


async def test_one_line_a_stream_without_its_text(alice_key: str) -> None:
    """Ids, counts, TTFT, ITL, reason: and neither the question nor the key."""
    with structlog.testing.capture_logs() as lines:
        response = await Caller(key=alice_key).post("/streams", {"prompt": "canary-7391", "max_tokens": 6})
        answer = await body_of(response)
        await runtime.reset()
    [line] = [line for line in lines if line["event"] == "stream_finished"]
    assert line["stream_id"] == response["X-Stream-Id"]
    assert (line["completion_tokens"], line["finish_reason"]) == (6, "length")
    assert line["ttft_ms"] > 0
    assert line["itl_p50_ms"] <= line["itl_p95_ms"]
    assert "canary" not in str(lines)
    assert alice_key not in str(lines)
    assert answer


async def test_the_stored_text_is_that_of_text_blocks() -> None:
    """Thinking and tool calls are no part of the answer that is stored, and that a next turn continues."""
    scripted = ScriptedClient()
    streams = Streams({"scripted": scripted}, MemoryLog())
    stream = await streams.start(ask("scripted"), owner="u1", tenant="t1", on_disconnect="finish")
    scripted.last.push(*(logged.event for logged in blocks()[1:]))
    await stream.ended.wait()
    assert await answer_text(streams.log, stream.log_id) == "Hello"
    await streams.aclose()


async def test_answers_of_a_revoked_key_end(alice: Any) -> None:
    """Looked at every 30 s, one query a kind."""
    from asgiref.sync import sync_to_async
    from django.test.utils import override_settings

    await runtime.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        row, key = await sync_to_async(lambda: ApiKey.objects.make(user=alice))()
        response = await Caller(key=key).post("/streams", {"prompt": "hi", "max_tokens": 500, "ignore_eos": True})
        chunks = aiter(response)
        await anext(chunks)
        watch = PermissionChecks(runtime.get_streams())
        await watch.check()
        [stream] = runtime.get_streams().all()
        assert stream.terminal is None
        await sync_to_async(ApiKey.objects.filter(pk=row.pk).revoke)()
        await watch.check()
        assert stream.terminal is not None
        rest = b"".join([chunk async for chunk in chunks])
        assert b'"finish_reason":"cancelled"' in rest
        await runtime.reset()
