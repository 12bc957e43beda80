"""Answers of owners that lost their permission end, also while the log is away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.test.utils import override_settings

from streamserve.models import ApiKey
from streamserve.streams.registry import Streams
from streamserve.web import permissions, site
from streamserve.web.permissions import PermissionChecks
from tests.conftest import Caller, until_ready
from tests.support.streams import ScriptedClient, StallingLog, ask, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


async def test_answers_of_a_revoked_key_end(alice: Any) -> None:
    """Keys are checked every 30 s, with one query a kind."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        row, key = await sync_to_async(lambda: ApiKey.objects.make(user=alice))()
        response = await Caller(key=key).post("/streams", {"prompt": "hi", "max_tokens": 500, "ignore_eos": True})
        chunks = aiter(response)
        await anext(chunks)
        checks = PermissionChecks(site.get_site().streams)
        await checks.check()
        [stream] = site.get_site().streams.all()
        assert stream.terminal is None
        await sync_to_async(ApiKey.objects.filter(pk=row.pk).revoke)()
        await checks.check()
        assert stream.terminal is not None
        rest = b"".join([chunk async for chunk in chunks])
        assert b'"finish_reason":"cancelled"' in rest
        await site.reset()


async def test_a_stop_that_the_log_does_not_take_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check returns, the next one stops what is new, and the first stop is committed when the log is back."""
    monkeypatch.setattr(permissions, "_STOP_SECONDS", 0.0)
    scripted, log = ScriptedClient(), StallingLog()
    streams = Streams({"scripted": scripted}, log)
    checks = PermissionChecks(streams)
    stuck, other = [await streams.start(ask("scripted"), owner="key:99999", tenant="t") for _ in range(2)]
    log.go.clear()
    await checks.check()
    await checks.check()
    await until(lambda: all(one.is_cancelled for one in scripted.generations), "the engine is free")
    assert (stuck.terminal, other.terminal) == (None, None)
    log.go.set()
    await asyncio.gather(stuck.ended.wait(), other.ended.wait())
    assert {stuck.terminal.finish_reason, other.terminal.finish_reason} == {"cancelled"}
    await checks.aclose()
    await streams.aclose()
