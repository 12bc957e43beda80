"""Our bytes through the official client: its decoder, its types, its errors. No server, a mocked transport."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from streamserve.dialects.fold import Answer
from streamserve.dialects.openai.chat import ChatEncoder, completion_json
from streamserve.dialects.openai.shapes import error_json, models_json
from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.errors import BadRequest, NotFound, Overloaded, StreamserveError, to_body
from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.sse import KEEPALIVE
from tests.support.bodies.event_logs import IDENTITY, LOG_ID, failure, split_emoji, success, tok, two_choices

HI: list[Any] = [{"role": "user", "content": "Hi"}]


class Pieces(httpx2.SyncByteStream):
    """A body that arrives a few bytes at a time, so that frames and code points are cut anywhere."""

    def __init__(self, body: bytes, size: int) -> None:
        self._body, self._size = body, size

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._body), self._size):
            yield self._body[start : start + self._size]


def client(answer: Callable[[httpx2.Request], httpx2.Response]) -> openai.OpenAI:
    """Return the official client with `answer` for a server."""
    transport = httpx2.MockTransport(answer)
    return openai.OpenAI(
        api_key="sk-test", base_url="http://test/v1", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


def streaming(
    log: list[LoggedEvent], *, size: int = 7, include_usage: bool = True, n: int = 1, are_events: bool = False
) -> openai.OpenAI:
    """Return a client whose server streams `log`, with first bytes, and keepalives before each event."""
    encoder = ChatEncoder(LOG_ID, include_usage=include_usage, n=n, **IDENTITY)
    body = encoder.first_bytes
    for logged in log:
        body += (encoder.keepalive_event if are_events else KEEPALIVE) + encoder.encode(logged)
    headers = {"content-type": encoder.content_type}
    return client(lambda request: httpx2.Response(200, headers=headers, stream=Pieces(body, size)))


def answering(status: int, body: dict[str, Any]) -> openai.OpenAI:
    """Return a client whose server answers with JSON."""
    return client(lambda request: httpx2.Response(status, json=body))


@pytest.mark.parametrize("size", [1, 2, 3, 64, 100_000])
def test_the_client_reads_every_token(size: int):
    """Text, roles, reasons, usage and logprobs arrive, however the bytes are cut."""
    stream = streaming(success(tok("日本\r\n\u2028"), split_emoji()), size=size).chat.completions.create(
        model="helpdesk", messages=HI, stream=True
    )
    seen = list(stream)
    assert "".join(c.delta.content or "" for chunk in seen for c in chunk.choices) == "日本\r\n\u2028🎉"
    assert seen[0].choices[0].delta.role == "assistant"
    assert seen[-2].choices[0].finish_reason == "stop"
    assert seen[-1].usage is not None
    assert seen[-1].usage.prompt_tokens_details is not None
    assert seen[-1].usage.prompt_tokens_details.cached_tokens == 4
    logprobs = seen[2].choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes == [240, 159]


@pytest.mark.parametrize("include_usage", [True, False])
def test_the_client_reads_past_keepalives_that_are_events(include_usage: bool):
    """Chunks without choices, also before the first: the client's helper makes the same completion of the others."""
    finals = []
    for are_events in (True, False):
        server = streaming(success(tok("Hi"), tok(" you")), include_usage=include_usage, are_events=are_events)
        with server.chat.completions.stream(model="helpdesk", messages=HI) as stream:
            for _ in stream:
                pass
            finals.append(stream.get_final_completion())
    assert finals[0] == finals[1]
    assert finals[0].choices[0].message.content == "Hi you"


def test_the_clients_own_accumulator_takes_our_chunks():
    """`client.chat.completions.stream` folds chunks by strict rules; n=2 is folded into two whole choices."""
    state: Any = ChatCompletionStreamState()
    created = streaming(two_choices(), n=2).chat.completions.create(model="helpdesk", messages=HI, stream=True, n=2)
    for chunk in created:
        state.handle_chunk(chunk)
    choices = state.current_completion_snapshot.choices
    found = [(one.index, one.message.content, one.finish_reason) for one in choices]
    assert found == [(0, "AB", "stop"), (1, "x", "length")]


@pytest.mark.parametrize(
    ("log", "code"),
    [(failure(tok("Hi")), "engine_unavailable"), (success(tok("Hi"), reason="cancelled"), "cancelled")],
)
def test_a_failure_after_the_head_raises(log: list[LoggedEvent], code: str):
    """The text before the failure is delivered; then `APIError` is raised, with our code."""
    seen = []

    def read() -> None:
        for chunk in streaming(log).chat.completions.create(model="helpdesk", messages=HI, stream=True):
            seen.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError) as caught:
        read()
    assert "".join(seen) == "Hi"
    assert caught.value.code == code


def test_a_whole_answer_fits_the_clients_types():
    """An answer that is not streamed is read back as the client's models: message, reason, usage, logprobs."""
    body = completion_json(Answer.of(success(split_emoji())), **IDENTITY)
    whole = answering(200, body).chat.completions.create(model="helpdesk", messages=HI)
    assert whole.choices[0].message.content == "🎉"
    assert whole.usage is not None
    assert whole.usage.total_tokens == 11
    # to_dict() drops what the server did not send: nothing was lost, nothing made up.
    assert whole.to_dict() == body
    type(whole).model_validate(body, strict=True)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BadRequest("No.", code="invalid_value", param="top_p"), openai.BadRequestError),
        (NotFound("No.", code="model_not_found", param="model"), openai.NotFoundError),
        (Overloaded("No."), openai.InternalServerError),
    ],
)
def test_errors_become_the_clients_exceptions(error: StreamserveError, expected: type[openai.APIStatusError]):
    """The status gives the class; message, code and param arrive as sent."""
    body = to_body(error)
    with pytest.raises(expected) as caught:
        answering(body.http_status, error_json(body)).chat.completions.create(model="helpdesk", messages=HI)
    assert (caught.value.code, caught.value.param) == (error.code, error.param)
    assert "No." in caught.value.message


def test_the_model_list_fits_the_clients_types():
    """`client.models.list()` finds the alias."""
    body = models_json([ModelDescription(alias="helpdesk", state="ready", created=5, max_model_len=1024)])
    (model,) = answering(200, body).models.list()
    assert (model.id, model.created, model.owned_by) == ("helpdesk", 5, "streamserve")
