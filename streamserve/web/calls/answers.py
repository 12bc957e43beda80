"""The Python API, which `streamserve` exports: `complete`, `acomplete` and `stream`; `run_pipeline` and `enqueue_job`.

docs/python.md, docs/pipelines.md and docs/jobs.md show them, in views, tasks and commands.

A call goes the way of a request: the same limits and quota, the same engine, a row and a log. It needs no HTTP and no
key. The async forms run on the caller's event loop, the synchronous forms on the loop of calls/background.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any, Self

from asgiref.sync import async_to_sync
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from django.urls import reverse

from streamserve.api.call import Caller, Reply
from streamserve.api.conversations import with_history
from streamserve.api.idempotency import once_for
from streamserve.api.interrupts import with_approvals
from streamserve.api.jobs import JobView, job_request
from streamserve.api.resume import encoder_for
from streamserve.asgi.handover import MORE_HEADERS
from streamserve.dialects import fold, native
from streamserve.dialects.approvals import read_approvals
from streamserve.dialects.fold import Delta, Failed, Piece
from streamserve.dialects.pace import SITES_OWN
from streamserve.protocol.errors import (
    BadRequest,
    NoChatTemplate,
    Unauthorized,
)
from streamserve.protocol.events import TEXT, LoggedEvent, Usage
from streamserve.protocol.requests import GenerateRequest, Once
from streamserve.rows.receivers import telling_refusals
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect, follow
from streamserve.streams.stream import Stream
from streamserve.tracing.spans import incoming
from streamserve.web.access import CHAT, check_access
from streamserve.web.auth import authenticate, give_cookie, keep_visitor
from streamserve.web.calls import background
from streamserve.web.site import get_site

Messages = Sequence[Mapping[str, Any]]
_MAX_TENANT_CHARS = 59  # what the column of owners takes after "site:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. `str()` of it is its text."""

    text: str
    finish_reason: str
    model: str
    stream_id: str
    usage: Usage
    message_id: str = ""  # in its conversation
    approvals: tuple[dict[str, Any], ...] = ()  # what a run asks its user: `finish_reason` is "interrupt" then

    def __str__(self) -> str:
        return self.text


def complete(question: str | Messages = "", **options: Any) -> Completion:
    """Return the whole answer, from synchronous code: views, tasks, commands, the shell. Blocks until it is there.

    `question` is a text or a list of messages. Options: `request` or `user`, whose answer it is, or `tenant`, a name;
    `system`, a text before the question; and every field of POST /streams (`model`, `max_tokens`, `prompt`,
    `conversation`, …). Without a question: `continues`, the stream id of an interrupted run, and `approvals`, its
    user's answers. Raises StreamserveError.
    """
    return stream(question, **options).whole()


async def acomplete(question: str | Messages = "", **options: Any) -> Completion:
    """Do what `complete` does, from async code."""
    return await stream(question, **options).awhole()


def stream(question: str | Messages = "", **options: Any) -> LazyAnswer:
    """Return an answer that has not begun: `for text in stream(...)`, or `async for`. Takes what `complete` takes.

    Leaving the loop stops the answer. To show it in a browser instead, `start` it and send its `url`, or return its
    `response()`.
    """
    return LazyAnswer(question, **options)


class LazyAnswer:
    """One answer. It begins when it is first read, or by `start`; it is read or handed on once."""

    def __init__(
        self,
        question: str | Messages = "",
        *,
        request: HttpRequest | None = None,
        user: Any = None,
        tenant: str = "",
        system: str = "",
        continues: str = "",
        approvals: Sequence[Mapping[str, Any]] = (),
        **fields: Any,
    ) -> None:
        given = [name for name, value in (("request", request), ("user", user), ("tenant", tenant)) if value]
        if len(given) > 1:
            raise BadRequest(f"An answer belongs to one owner: give {' or '.join(given)}.", code="invalid_request")
        if len(tenant) > _MAX_TENANT_CHARS:
            raise BadRequest(f"A tenant's name has at most {_MAX_TENANT_CHARS} characters.", param="tenant")
        self._request, self._user, self._tenant = request, user, tenant
        if continues and (question or system or set(fields) - {"model"}):
            message = "A run that was interrupted goes on with its own question: give continues and approvals alone."
            raise BadRequest(message, code="conflicting_fields", param="continues")
        # Of this thread and context: a call from synchronous code runs elsewhere.
        self.trace = incoming({} if request is None else {name.lower(): one for name, one in request.headers.items()})
        self._continues, self._approvals = continues, approvals
        self.bodies = [fields] if continues else list(_bodies(question, system, fields))
        self._stream: Stream | None = None
        self._pace = SITES_OWN

    @property
    def id(self) -> str:
        """The stream's id, once it has begun."""
        return self._begun().id

    @property
    def url(self) -> str:
        """The address of its events, for the browser of `request` or of `user`; see GET /streams/{id}/events."""
        return reverse("streamserve:stream_events", args=[self.id])

    def start(self) -> Self:
        """Begin an answer that waits for its reader; return it."""
        caller = self.caller("await astart()")
        background.run(lambda: self._start(caller, "park"), "await astart()")
        return self

    async def astart(self) -> Self:
        """Do what `start` does, from async code."""
        await self._start(await self.acaller(), "park")
        return self

    async def abegin(self) -> Stream:
        """Begin an answer that ends with its reader, and return its stream."""
        return await self._start(await self.acaller(), "abort")

    def response(self, format: str = "native", *, request: HttpRequest | None = None) -> HttpResponseBase:
        """Return the response of a view that streams the answer: server-sent events in this `format`.

        `request` is the view's, where the answer's owner is given in another way.
        """
        caller = self.caller("await aresponse()")
        return background.run(lambda: self._respond(caller, format, request), "await aresponse()")

    async def aresponse(self, format: str = "native", *, request: HttpRequest | None = None) -> HttpResponseBase:
        """Do what `response` does, from an async view."""
        return await self._respond(await self.acaller(), format, request)

    def whole(self) -> Completion:
        """Wait for the end; return the whole answer."""
        caller = self.caller("await acomplete()")
        return background.run(lambda: self._whole(caller), "await acomplete()")

    async def awhole(self) -> Completion:
        """Do what `whole` does, from async code."""
        return await self._whole(await self.acaller())

    def __iter__(self) -> Iterator[str]:
        return self._texts()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._follow(None)

    # The caller

    def caller(self, instead: str) -> Caller:
        """Return the owner. In this thread, whose transaction may hold the user's row."""
        background.refuse_on_loop(instead)
        if self._request is not None:
            return async_to_sync(self.acaller)()
        with self._telling():
            return self._named_caller()

    async def acaller(self) -> Caller:
        """Return the owner of the answer."""
        with self._telling():
            return self._named_caller() if self._request is None else await self._caller_of(self._request)

    def _telling(self, caller: Caller | None = None) -> AbstractContextManager[None]:
        model = self.bodies[0].get("model")
        return telling_refusals(caller, "python", model if isinstance(model, str) else "")

    async def _caller_of(self, request: HttpRequest) -> Caller:
        headers = {name.lower(): value for name, value in request.headers.items()}
        user = await request.auser() if hasattr(request, "auser") else getattr(request, "user", None)
        address = request.META.get("REMOTE_ADDR") or ""
        caller = await authenticate(headers, user, getattr(request, "session", None), address=address)
        if caller is None:
            message = "This request has no caller that may use the model. Check its login first, or name a tenant."
            raise Unauthorized(message)
        return keep_visitor(request, check_access(CHAT, caller))

    def _named_caller(self) -> Caller:
        if self._user is None:
            return Caller(f"site:{self._tenant}")
        if not self._user.pk or not self._user.is_active:
            raise Unauthorized(f"The user {self._user} has no account that is active.")
        return Caller(f"user:{self._user.pk}")

    # On the loop

    async def _start(self, caller: Caller, on_disconnect: str) -> Stream:
        """Begin the answer; a refusal is told to the site's receivers."""
        with self._telling(caller):
            return await self._started(caller, on_disconnect)

    async def _started(self, caller: Caller, on_disconnect: str) -> Stream:
        """Begin the answer. A model without a chat template continues the question instead."""
        if self._stream is not None:
            return self._stream
        answers = get_site().services.answers
        if self._continues:
            conversations = get_site().services.conversations
            turn = None if conversations is None else await conversations.continuation(self._continues)
            request = await self.continued(caller)
            self._stream = await answers.start(caller, request, on_disconnect, turn=turn, trace=self.trace)
            return self._stream
        model = await answers.default_model(caller)
        for body in self.bodies:
            asked = native.parse(body, answers.limits, default_model=model, in_conversations=True)
            self._pace = asked.pace
            asked, turn = await with_history(asked, caller, answers, get_site().services.conversations)
            try:
                self._stream = await answers.start(caller, asked.generate, on_disconnect, turn=turn, trace=self.trace)
                return self._stream
            except NoChatTemplate:
                if body is self.bodies[-1]:
                    raise
        raise AssertionError("the last body returns or raises")

    async def continued(self, caller: Caller, once: Once | None = None) -> GenerateRequest:
        """Return the request that continues the interrupted run. Raises as `with_approvals`."""
        given = read_approvals(list(self._approvals), "approvals")
        return await with_approvals(caller, self._continues, given, get_site().services.answers, once)

    async def _whole(self, caller: Caller) -> Completion:
        started = await self._start(caller, "abort")
        return _completion(started, await collect(get_site().streams, started))

    async def _respond(self, caller: Caller, format: str, request: HttpRequest | None) -> HttpResponseBase:
        from streamserve.web.views import needs_asgi, to_django

        request = request or self._request
        if request is None:
            raise BadRequest("A response needs the request: response(request=request).", code="invalid_request")
        if not hasattr(request, "scope"):
            raise needs_asgi()
        started = await self._start(caller, "park")
        delivery = Delivery(get_site().streams, started, encoder_for(format, started), pace=self._pace)
        response = to_django(request, Reply(body=delivery))
        if MORE_HEADERS not in request.scope:  # no StreamMiddleware, which sets the cookie
            give_cookie(response, caller)
        return response

    async def _follow(self, caller: Caller | None) -> AsyncGenerator[str]:
        """Yield the new text of the answer. Raises the error that it ends in."""
        started = await self._start(caller or await self.acaller(), "abort")
        pieces = fold.Fold()
        async with aclosing(follow(get_site().streams, started, transport="python")) as events:
            async for logged in events:
                for text in map(_text_of, pieces.feed(logged.event)):
                    if text:
                        yield text

    def _texts(self) -> Generator[str]:
        """Do what `_follow` does, from synchronous code."""
        texts = self._follow(self.caller("async for"))
        try:
            while (text := background.run(lambda: _next(texts), "async for")) is not None:
                yield text
        finally:
            background.run(texts.aclose, "async for")

    def _begun(self) -> Stream:
        if self._stream is None:
            raise RuntimeError("This answer has not begun: call start(), or astart() in async code.")
        return self._stream


def _bodies(question: str | Messages, system: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the bodies of POST /streams to try: a text is a chat message, or else what the model continues."""
    first = [{"role": "system", "content": system}] if system else []
    fields = dict(fields)
    question = question or fields.pop("messages", "")
    if not question and system:
        raise BadRequest("A 'system' text goes with a question or messages, not with a prompt.", param="system")
    if not question:
        yield fields
    elif isinstance(question, str):
        yield {**fields, "messages": [*first, {"role": "user", "content": question}]}
        if not system:
            yield {**fields, "prompt": question}
    else:
        yield {**fields, "messages": [*first, *question]}


def _completion(started: Stream, events: list[LoggedEvent]) -> Completion:
    """Fold the log to the whole answer; raise the error that it ended in."""
    answer = fold.Answer.of(events)
    done = answer.done
    return Completion(
        text=answer.choices[0].text,
        finish_reason=done.finish_reason,
        model=started.model,
        stream_id=started.id,
        usage=done.usage,
        message_id="" if started.admission.turn is None else started.admission.turn.answer_id,
        approvals=tuple(one.payload() for one in answer.approvals),
    )


def _text_of(piece: Piece) -> str:
    """Return the text that a piece adds to the first choice; raise the error that the answer ended in."""
    if isinstance(piece, Failed):
        raise piece.error()
    return piece.token.text if isinstance(piece, Delta) and piece.block.kind == TEXT and not piece.block.choice else ""


async def _next(texts: AsyncGenerator[str]) -> str | None:
    return await anext(texts, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A whole run. `str()` of it is its text; `citations`, `steps` and `customs` are its events, in order.

    `state` is the state that it ended with, None where it showed none.
    """

    text: str
    citations: tuple[dict[str, Any], ...]
    steps: tuple[dict[str, Any], ...]
    finish_reason: str
    stream_id: str
    usage: Usage
    approvals: tuple[dict[str, Any], ...] = ()  # what it asks its user: `finish_reason` is "interrupt" then
    state: dict[str, Any] | None = None
    customs: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.text


async def run_pipeline(
    name: str, question: str | Messages = "", *, input: dict[str, Any] | None = None, **options: Any
) -> RunResult:
    """Return the whole run of a pipeline; leaving early ends it.

    `question` is a text or a list of messages, `input` what the pipeline takes besides. The options are as in
    `acomplete`: `request`, `user` or `tenant`, `timeout_seconds`. Raises StreamserveError. From synchronous code:
    `async_to_sync`.
    """
    if input is not None:
        options["input"] = input
    started = await LazyAnswer(question, model=name, **options).abegin()
    events = await collect(get_site().streams, started)
    whole = native.run_json(fold.Answer.of(events), stream_id=started.id, pipeline=name, created=started.created)
    return RunResult(
        text=whole["text"],
        citations=tuple(whole["citations"]),
        steps=tuple(whole["steps"]),
        finish_reason=whole["finish_reason"],
        stream_id=started.id,
        usage=started.usage,
        approvals=tuple(whole.get("approvals", ())),
        state=whole.get("state"),
        customs=tuple(whole.get("customs", ())),
    )


def enqueue_job(
    name: str, question: str | Messages = "", *, input: dict[str, Any] | None = None, **options: Any
) -> JobView:
    """Queue a run of the pipeline `name` and return the job: its `id` is the id for GET /jobs/{id}.

    `question` is a text or a list of messages, `input` what the pipeline takes besides. Options: `request`, `user` or
    `tenant`, whose job it is; `webhook`; `once`, a key that queues one job however often it is sent; the fields of POST
    /jobs. Inside a transaction the job is queued at once and may run before the commit: use `transaction.on_commit`.
    Raises StreamserveError.
    """
    if transaction.get_connection().in_atomic_block and transaction.get_connection().vendor == "sqlite":
        message = "SQLite lets no job be queued inside a transaction: call transaction.on_commit(lambda: ...)."
        raise BadRequest(message, code="inside_transaction")
    job = _Job(name, question, input, options)
    caller = job.answer.caller("await aenqueue_job()")
    return background.run(lambda: job.enqueue(caller), "await aenqueue_job()")


async def aenqueue_job(
    name: str, question: str | Messages = "", *, input: dict[str, Any] | None = None, **options: Any
) -> JobView:
    """Do what `enqueue_job` does, from async code."""
    job = _Job(name, question, input, options)
    return await job.enqueue(await job.answer.acaller())


class _Job:
    """One call."""

    def __init__(
        self, name: str, question: str | Messages, input: dict[str, Any] | None, options: dict[str, Any]
    ) -> None:
        self._webhook, self._key = options.pop("webhook", ""), options.pop("once", "")
        if input is not None:
            options["input"] = input
        self.answer = LazyAnswer(question, **options)
        continued: dict[str, Any] = {name: options[name] for name in ("continues", "approvals") if name in options}
        self._body = {**self.answer.bodies[0], "pipeline": name, **continued}

    async def enqueue(self, caller: Any) -> JobView:
        with telling_refusals(caller, "python", self._body["pipeline"]):
            return await self._enqueue(caller)

    async def _enqueue(self, caller: Any) -> JobView:
        site = get_site()
        once = once_for(caller, self._key, "jobs", self._body) if self._key else None
        request = await job_request(self._body, caller, site.services.answers, once)
        jobs, trace = site.work.jobs, self.answer.trace
        return await jobs.enqueue(caller, request, webhook=self._webhook, once=once, trace=trace)
