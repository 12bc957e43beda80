"""`/v1/*` through Django alone: shapes, errors, and that a disconnect stops the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.engine.echo import EchoRunner
from streamserve.engine.plan import StepPlan
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.stream_checks import check_native, parse_sse

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 7, **fields}


async def test_streamed_and_whole_are_the_same_answer(caller: Caller) -> None:
    """One log, two shapes; usage only when asked for."""
    whole = (await caller.post("/v1/chat/completions", ask())).json()
    options = {"include_usage": True}
    frames = parse_sse(
        await body_of(await caller.post("/v1/chat/completions", ask(stream=True, stream_options=options)))
    )
    assert frames[-1].data == "[DONE]"
    chunks = [frame.json for frame in frames[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 8
    assert whole["id"].startswith("chatcmpl-")


async def test_models_are_listed(caller: Caller) -> None:
    """By alias."""
    models = (await caller.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["echo"]


async def test_errors_are_in_the_openai_shape(caller: Caller) -> None:
    """type, code, param, message."""
    error = (await caller.post("/v1/chat/completions", ask(model="nope"))).json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    wrong = (await caller.post("/v1/chat/completions", ask(temperature=9))).json()["error"]
    assert (wrong["type"], wrong["param"]) == ("invalid_request_error", "temperature")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_wrong_schema_is_named_by_its_own_field(caller: Caller, is_stream: bool) -> None:
    """The engine finds what is wrong with a schema; the error names the field that it stood in."""
    schema = {"type": "strange"}
    for fields, param in (
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "response_format",
        ),
        ({"response_format": {"type": "text"}, "grammar": {"type": "json_schema", "schema": schema}}, "grammar"),
        ({"grammar": {"type": "regex", "pattern": "("}}, "grammar"),
    ):
        refused = await caller.post("/v1/chat/completions", ask(stream=is_stream, **fields))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_leaving_a_whole_answer_stops_it(caller: Caller) -> None:
    """Django cancels the view; the reader is gone; the engine aborts and the stream ends as abandoned."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        asking = asyncio.create_task(caller.post("/v1/chat/completions", ask(max_tokens=1000, ignore_eos=True)))
        await until(site.get_site().streams.all)
        [stream] = site.get_site().streams.all()
        await until(lambda: stream.usage.completion_tokens >= 3)
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(60):
            await stream.ended.wait()
        assert stream.summary().finish_reason == "abandoned"
        await site.reset()


async def test_an_engine_that_dies_is_an_error_not_a_done(caller: Caller) -> None:
    """Non-streamed: a 5xx in the dialect; /readyz then answers 503."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        asking = asyncio.create_task(caller.post("/v1/chat/completions", ask(max_tokens=1000, ignore_eos=True)))
        await until(site.get_site().streams.all)
        await site.get_site().clients["echo"].aclose()
        response = await asking
        assert response.status_code == 503
        assert json.loads(response.content)["error"]["type"] == "server_error"
        assert (await caller.get("/readyz")).status_code == 503
        await site.reset()


async def test_a_step_that_raises_ends_streams_in_error_and_refuses_new_ones(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread dies in a step: a stream with shown tokens ends in `error`; then 503, and not ready."""
    await site.reset()
    whole = EchoRunner.launch

    def launch(runner: EchoRunner, plan: StepPlan) -> object:
        if plan.step_id == 5:
            raise RuntimeError("the device fell off the bus")
        return whole(runner, plan)

    monkeypatch.setattr(EchoRunner, "launch", launch)
    await until_ready()
    response = await caller.post("/streams", {"prompt": "tell me", "max_tokens": 100})
    frames = check_native(await body_of(response))
    assert [frame.event for frame in frames].count("token") >= 1
    assert frames[-1].event == "error"
    assert frames[-1].json["code"] == "engine_died"
    refused = await caller.post("/streams", {"prompt": "again"})
    assert refused.status_code == 503
    assert refused["Retry-After"]
    assert (await caller.get("/readyz")).status_code == 503
    await site.reset()
