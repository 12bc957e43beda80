"""Laws of a remote client against a server on a real socket, good or bad: answers, refusals, connections, errors."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.clients.remote.server import _found
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, StreamserveError, TooLarge
from streamserve.protocol.events import BlockText, Done, Event, Usage
from streamserve.protocol.requests import ShownChoice
from tests.support.engines.clients import collect, text
from tests.support.servers.upstreams import (
    DONE,
    JSON,
    LAST_CHUNK,
    STREAM_HEAD,
    WHOLE,
    Upstream,
    ask,
    certificate,
    chat,
    chatting,
    chunk,
    counts,
    delta,
    event,
    never,
    outcome,
    raw,
    remote,
    response,
    says,
    until,
    usage,
)

pytestmark = pytest.mark.usefixtures("patient")

ERROR = {"error": {"message": "temperature is too warm", "param": "temperature", "code": 400}}


async def test_an_answer_comes_through() -> None:
    """Tokens without ids, and the server's usage; the connection is used again."""
    upstream = Upstream(says(*WHOLE))
    async with remote(upstream, warm_connections=1) as client:
        for _ in range(3):
            events = await ask(client)
            assert text(events) == "Hello."
            assert isinstance(events[-1], Done)
            assert events[-1].usage == Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
            await until(lambda: client.stats().running == 0)
        assert upstream.num_connections == 1
        stats = client.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, counts(client)["requests"]) == (15, 6, 3)


async def test_connections_are_open_before_the_first_request() -> None:
    """As many as WARM_CONNECTIONS, by asking for the models."""
    upstream = Upstream(says(*WHOLE))
    async with remote(upstream, warm_connections=3) as client:
        assert upstream.num_connections == 3
        await asyncio.gather(*(ask(client) for _ in range(3)))
        assert upstream.num_connections == 3


async def test_the_key_goes_to_the_server_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes from the environment, and stands in no message, log line or description."""
    monkeypatch.setenv("UPSTREAM_KEY", "sk-secret-1")
    caplog.set_level(logging.DEBUG)
    upstream = Upstream(raw(response("401 Unauthorized", b'{"error":{"message":"wrong key"}}', JSON)))
    async with remote(upstream, api_key_env="UPSTREAM_KEY") as client:
        with pytest.raises(EngineUnavailable) as caught:
            await ask(client)
        assert upstream.posts[0].headers["authorization"] == "Bearer sk-secret-1"
        shown = [caught.value.message, caplog.text, repr(client.describe()), repr(RemoteConfig(alias="m", url="x"))]
    assert "sk-secret-1" not in "".join(shown)
    assert "refuses our key (401)" in caplog.text
    assert "key" not in caught.value.message


@pytest.mark.parametrize(
    ("status", "headers", "kind", "http_status", "code", "param", "retry_after"),
    [
        ("400 Bad Request", (), BadRequest, 400, "upstream_refused", "temperature", None),
        ("422 Unprocessable Entity", (), BadRequest, 400, "upstream_refused", "temperature", None),
        ("413 Too Large", (), TooLarge, 413, "body_too_large", None, None),
        ("429 Too Many", ("Retry-After: 7",), Overloaded, 503, "overloaded", None, 7),
        ("503 Busy", ("Retry-After: 1e9",), Overloaded, 503, "overloaded", None, 120),
        ("503 Busy", ("Retry-After: soon",), Overloaded, 503, "overloaded", None, 5),
        ("503 Busy", ("Retry-After: Thu, 01 Jan 1970 00:00:00 GMT",), Overloaded, 503, "overloaded", None, 1),
        ("401 Unauthorized", (), EngineUnavailable, 503, "engine_unavailable", None, 30),
        ("403 Forbidden", (), EngineUnavailable, 503, "engine_unavailable", None, 30),
        ("404 Not Found", (), EngineUnavailable, 503, "engine_unavailable", None, 30),
        ("302 Found", ("Location: http://127.0.0.1:1/",), EngineUnavailable, 503, "engine_unavailable", None, 30),
        ("500 Error", (), EngineUnavailable, 503, "engine_unavailable", None, 5),
    ],
)
async def test_refusals_are_ours(
    status: str,
    headers: tuple[str, ...],
    kind: type[StreamserveError],
    http_status: int,
    code: str,
    param: str | None,
    retry_after: int | None,
) -> None:
    """What concerns the request is the caller's, in the server's words; what concerns the site is not shown."""
    upstream = Upstream(raw(response(status, json.dumps(ERROR).encode(), JSON, *headers)), says(*WHOLE))
    async with remote(upstream) as client:
        with pytest.raises(kind) as caught:
            await ask(client)
        error = caught.value
        assert (error.http_status, error.code, error.param) == (http_status, code, param)
        assert getattr(error, "retry_after", None) == retry_after
        assert ("too warm" in error.message) == (http_status in (400, 413))
        assert len(upstream.posts) == 1  # no redirect was followed
        assert text(await ask(client)) == "Hello."


TOO_MANY = [
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 64. This model's maximum context length is 60 tokens "
        "and your request has 50 input tokens (64 > 60 - 50).",
        10,
    ),
    (
        "This model's maximum context length is 60 tokens. However, you requested 114 tokens (50 in the messages, 64 "
        "in the completion). Please reduce the length of the messages or completion.",
        10,
    ),
    (
        "This model's maximum context length is 60 tokens. However, you requested 64 output tokens and your prompt "
        "contains 50 input tokens, for a total of 114 tokens.",
        10,
    ),
    (
        "Requested token count exceeds the model's maximum context length of 60 tokens. You requested a total of 114 "
        "tokens: 50 tokens from the input messages and 64 tokens for the completion.",
        10,
    ),
    ("max_tokens is too large: 64. This model supports at most 32 completion tokens, whereas you provided 64.", 32),
]


@pytest.mark.parametrize(("message", "room"), TOO_MANY)
async def test_a_maximum_that_does_not_fit_there_is_lowered(message: str, room: int) -> None:
    """The server refuses the maximum, and says what would fit: asked once more with that, it answers."""
    refused = response("400 Bad Request", json.dumps({"error": {"message": message, "code": 400}}).encode(), JSON)
    upstream = Upstream(raw(refused), says(*WHOLE))
    async with remote(upstream) as client:
        assert text(await ask(client)) == "Hello."
        assert [post.body["max_tokens"] for post in upstream.posts] == [64, room]
    upstream = Upstream(raw(refused))
    async with remote(upstream) as client:
        with pytest.raises(BadRequest):
            await ask(client)
        assert len(upstream.posts) == 2


async def test_a_maximum_is_lowered_once() -> None:
    """A server that names less room with each refusal is not asked a third time."""
    refusals = [
        "'max_tokens' or 'max_completion_tokens' is too large: 64. "
        f"This model's maximum context length is {most} tokens and your request has 50 input tokens (64 > {most} - 50)."
        for most in (80, 70, 60)
    ]
    upstream = Upstream(
        *(raw(response("400 Bad Request", json.dumps({"error": {"message": one}}).encode(), JSON)) for one in refusals)
    )
    async with remote(upstream) as client:
        with pytest.raises(BadRequest):
            await ask(client)
        assert [post.body["max_tokens"] for post in upstream.posts] == [64, 30]


async def test_a_prompt_that_does_not_fit_there_is_refused() -> None:
    """Nothing is left for an answer: the refusal is the caller's, and the server is not asked again."""
    message = "This model's maximum context length is 60 tokens. However, your request has 61 input tokens."
    upstream = Upstream(raw(response("400 Bad Request", json.dumps({"error": {"message": message}}).encode(), JSON)))
    async with remote(upstream) as client:
        with pytest.raises(BadRequest, match="61 input tokens"):
            await ask(client)
        assert len(upstream.posts) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "a\\r\\n\\u0000b", "param": "<b>"}}', "a b"),
        (b'{"message": "flat"}', "flat"),
        (b'{"detail": "of FastAPI"}', "of FastAPI"),
        (b'{"error": "a text"}', "a text"),
        (b'{"errors": [{"message": "one"}, {"message": "two"}]}', "one; two"),
        (b'[{"error": {"message": "in a list"}}]', "in a list"),
        (b'{"message": {"detail": [{"msg": "nested"}]}}', "nested"),
        (b'{"error": {"message": ""}, "detail": 7}', "the model's server refuses this request."),
        (b'{"a":' * 20_000, "the model's server refuses this request."),
        (b"<html>", "the model's server refuses this request."),
        (b"[" * 100_000, "the model's server refuses this request."),
        (json.dumps({"error": {"message": "x" * 1000}}).encode(), "x" * 500),
    ],
    ids=lambda value: str(value[:20]),
)
async def test_the_servers_words_are_bounded_and_on_one_line(body: bytes, message: str) -> None:
    """A refusal of any shape is a sentence; what names no field of ours is no `param`."""
    async with remote(Upstream(raw(response("400 Bad Request", body, JSON)))) as client:
        with pytest.raises(BadRequest) as caught:
            await ask(client)
    assert (caught.value.message, caught.value.param) == (message, None)


async def test_a_422_names_its_fields() -> None:
    """FastAPI's `detail` is a list of what is wrong, each with its place: the sentence has all, `param` the first."""
    detail = [
        {"type": "less_than_equal", "loc": ["body", "temperature"], "msg": "Input should be at most 2"},
        {"type": "missing", "loc": ["body", "messages", 0, "role"], "msg": "Field required"},
    ]
    body = json.dumps({"detail": detail}).encode()
    async with remote(Upstream(raw(response("422 Unprocessable Entity", body, JSON)))) as client:
        with pytest.raises(BadRequest) as caught:
            await ask(client)
    assert caught.value.message == "temperature: Input should be at most 2; messages.0.role: Field required"
    assert (caught.value.param, caught.value.code) == ("temperature", "upstream_refused")


async def test_an_empty_finish_reason_does_not_end_the_answer() -> None:
    """A server that sends "" in each delta is read to its end, and one that stops in between is a loss."""
    words = [delta(content=word, finish_reason="") for word in ("One", " two")]
    async with remote(Upstream(says(*words, delta(finish_reason="length"), usage(), DONE))) as client:
        events = await ask(client)
        assert text(events) == "One two"
        assert isinstance(events[-1], Done)
        assert events[-1].finish_reason == "length"
    async with remote(Upstream(says(*words, DONE), owned_by="org")) as client:
        code, is_retryable, _ = await outcome(client)
        assert (code, is_retryable) == ("cannot_continue", True)


@pytest.mark.parametrize(
    ("models", "max_model_len"),
    [
        ([{"id": "m", "context_length": 4096}], 4096),
        ({"data": [{"id": "m", "max_model_len": "2048"}]}, 2048),
        ({"data": [{"id": "m", "max_model_len": None, "context_window": 1024.0}]}, 1024),
        ({"data": [None, {"id": "m", "max_context_length": 512}]}, 512),
        ({"data": [{"id": "m", "max_model_len": True, "meta": []}]}, 0),
    ],
)
def test_a_list_of_models_in_other_forms(models: Any, max_model_len: int) -> None:
    """A list alone, other names of the context's length, and numbers as strings are read."""
    found = _found(json.dumps(models).encode(), RemoteConfig(alias="m", url="http://x/v1"))
    assert (found.max_model_len, found.warning) == (max_model_len, "")


@pytest.mark.parametrize(
    "answer",
    [
        raw(response("200 OK", b'{"choices": []}', JSON)),
        raw(response("200 OK", b"hello", "Content-Type: text/html")),
        raw(STREAM_HEAD.replace(b"Transfer", b"Content-Encoding: gzip\r\nTransfer") + chunk(b"\x1f\x8b") + LAST_CHUNK),
        raw(b"220 mail.example.org ESMTP\r\n", keeps=False),
        says(b"data: {oops\n\n"),
        says(b"data: \xff\n\n"),
        says(b"data: " + b"x" * 70_000, whole=False),
        says(event({"error": {"message": "CUDA error at /srv/secret.py"}})),
        says(event({"choices": [{"index": 9, "delta": {"content": "x"}}]})),
        raw(STREAM_HEAD + b"zz\r\nno chunk\r\n", keeps=False),
    ],
    ids=["json", "html", "gzip", "smtp", "no json", "no utf-8", "long line", "error event", "index", "no chunk"],
)
async def test_a_broken_response_ends_its_own_answer_only(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets one retryable error without the server's words, and the next request is answered."""
    caplog.set_level(logging.WARNING, logger="streamserve.remote")
    upstream = Upstream(answer)
    async with remote(upstream, max_line_bytes=65_536) as client:
        _, is_retryable, message = await outcome(client)
        assert is_retryable
        assert "secret" not in message
        upstream.answers = [says(*WHOLE)]
        assert text(await ask(client)) == "Hello."
    assert caplog.records


async def test_code_points_cut_by_reads_and_exotic_line_ends() -> None:
    """The text comes through whole, whatever the reads."""
    stream = b"".join([delta(content="né😀"), delta(content="\u2028z"), *WHOLE[3:]]).replace(b"\n", b"\r\n")
    parts = [stream[index : index + 1] for index in range(len(stream))]
    async with remote(Upstream(says(*parts))) as client:
        assert text(await ask(client)) == "né😀\u2028z"


async def test_a_server_that_cannot_be_reached_is_refused_at_once() -> None:
    """Its model counts as failed, with the reason for the operator; when it is there, the next request is answered."""
    upstream = Upstream(says(*WHOLE))
    await upstream.start()
    port = int(upstream.url.rsplit(":", 1)[1].split("/")[0])
    await upstream.stop()
    client = RemoteClient(RemoteConfig(alias="m", url=f"http://127.0.0.1:{port}/v1"))
    try:
        with pytest.raises(EngineUnavailable) as caught:
            await client.generate(chat())
        assert (client.describe().state, caught.value.retry_after) == ("failed", 2)
        assert "cannot connect" in client.describe().message
        assert str(port) not in caught.value.message
        await upstream.start(port)
        await until(lambda: client.describe().state == "ready")
        assert text(await ask(client)) == "Hello."
    finally:
        await client.aclose()
        await upstream.stop()


async def test_a_kept_connection_that_was_closed_is_not_an_error() -> None:
    """A server that closes a connection when the next request comes is asked again."""
    upstream = Upstream(says(*WHOLE), raw(b"", keeps=False), says(*WHOLE))
    async with remote(upstream, warm_connections=1) as client:
        assert text(await ask(client)) == "Hello."
        await until(lambda: client.stats().running == 0)
        assert text(await ask(client)) == "Hello."
        assert counts(client)["retries"] == 1
    assert len(upstream.posts) == 3


async def test_a_connection_that_breaks_again_and_again_is_an_error() -> None:
    """A request is sent three times at most, and over a new connection once."""
    upstream = Upstream(raw(b"", keeps=False))
    async with remote(upstream, warm_connections=1) as client:
        assert (await outcome(client))[:2] == ("engine_unavailable", True)
        assert len(upstream.posts) == 2  # the kept connection, then a new one
        assert counts(client)["lost"] == 1


async def test_the_server_is_recognised() -> None:
    """By `owned_by`; the model's context length is shown, and a model that it lacks is a warning for the operator."""
    for owned_by, server in (("vllm", "vllm"), ("llamacpp", "llama-server"), ("acme", "openai")):
        async with remote(Upstream(never, owned_by=owned_by)) as client:
            description = client.describe()
            assert (description.dtype, description.max_model_len, description.message) == (server, 512, "")
    async with remote(Upstream(never), remote_model="other") as client:
        assert "no model 'other'" in client.describe().message
    async with remote(Upstream(never), server="sglang") as client:
        assert client.describe().dtype == "sglang"


async def test_a_server_that_has_no_time_to_list_its_models_stays_what_it_is() -> None:
    """A 429 says that it is there: it keeps its kind and context length, so that no field is refused of a sudden."""
    upstream = Upstream(never)
    async with remote(upstream, poll_seconds=0.01) as client:
        upstream.models_status, before = "429 Too Many", len(upstream.asked)
        await until(lambda: len(upstream.asked) > before + 4)
        description = client.describe()
        assert (description.state, description.dtype, description.max_model_len) == ("ready", "vllm", 512)


async def test_a_wrong_key_is_seen_before_any_request(caplog: pytest.LogCaptureFixture) -> None:
    """The model counts as failed."""
    upstream = Upstream(never)
    upstream.models_status = "401 Unauthorized"
    async with remote(upstream) as client:
        assert client.describe().state == "failed"
        assert "refuses our key" in client.describe().message
        with pytest.raises(EngineUnavailable):
            await client.generate(chat())
    assert len(upstream.posts) == 0
    assert "refuses our key" in caplog.text


async def test_an_https_server_is_checked_by_the_given_certificates(tmp_path: Path) -> None:
    """A server that signs itself is used with CA_FILE, and refused without."""
    upstream, file = Upstream(says(*WHOLE)), certificate(tmp_path)
    upstream.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    upstream.ssl.load_cert_chain(file)
    async with remote(upstream, ca_file=str(file)) as client:
        assert text(await ask(client)) == "Hello."
    async with remote(upstream) as client:
        assert client.describe().state == "failed"
        assert "certificate" in client.describe().message


async def test_what_was_shown_in_full_is_not_asked_for_again() -> None:
    """A connection that was lost after the last token that was asked for ends the answer here."""
    upstream = Upstream(never)
    shown = (ShownChoice(blocks=(BlockText(index=0, kind="text", text="x" * 9, is_open=True),), num_tokens=9),)
    async with remote(upstream) as client:
        events: list[Event] = await collect(await client.generate(*chatting(max_tokens=9, shown=shown)))  # type: ignore[arg-type]
    assert events == [Done(finish_reason="length", usage=Usage(completion_tokens=9))]
    assert upstream.posts == []


async def test_operators_pause_the_server_there() -> None:
    """The site does not pause a server that others may use."""
    async with remote(Upstream(never)) as client:
        with pytest.raises(BadRequest, match="runs on a server elsewhere"):
            await client.control("pause")


async def test_a_prompt_is_warmed_by_one_token() -> None:
    """`warm` computes the prompt there; it raises what the server says."""
    upstream = Upstream(
        says(delta(content="x"), delta(finish_reason="length"), usage(), DONE),
        raw(response("503 Busy", b"", "Retry-After: 3")),
    )
    async with remote(upstream) as client:
        await client.warm(chat(max_tokens=50))
        assert upstream.posts[0].body["max_tokens"] == 1
        with pytest.raises(Overloaded):
            await client.warm(chat())
