"""`Titles`: a conversation's title, made by its model after the first answer; until then it has its first words.

The question and its answer begin the prompt, as the next turn has them, so that the prefix cache knows them. It is in
the class `batch`, which takes what other answers leave, and counts as the site's own. A title that does not come, as of
an engine that is full or a process that ends, is not asked for again: the first words stay. A title of the owner's is
never replaced. Of one event loop.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from contextvars import Context
from dataclasses import replace

from streamserve.api.logs import get_logger
from streamserve.clients.base import EngineClient
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.conf import get_settings
from streamserve.keys import salt_of
from streamserve.models import Conversation, Message
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import SUCCESS_REASONS, Done, Token
from streamserve.protocol.requests import BATCH, Admission, GenerateRequest, SamplingParams, with_system
from streamserve.protocol.requests import Message as Turn
from streamserve.protocol.trace import Trace
from streamserve.rows import orm, rates, usage
from streamserve.rows.branch import without_nul
from streamserve.rows.usage_days import TITLE
from streamserve.tracing.answers import describe_inner, inner_answer

log = get_logger(__name__)

OWNER = "site"
MAX_CHARS = 80
_MAX_TOKENS, _SECONDS = 24, 120.0
_MAX_WAITING = 100  # conversations whose titles are made or wait; later ones keep their first words
_MAX_SHOWN_CHARS = 4_000  # of the question and of the answer
_ASK = "Give this conversation a title of at most six words, in its own language. Answer with the title alone."
_AROUND = " \t\"'*#`.:“”„«»"


class Titles:
    """Makes titles, one at a time. `aclose()` ends what is under way."""

    def __init__(self, clients: Mapping[str, EngineClient], systems: Mapping[str, str]) -> None:
        self._clients, self._systems = clients, systems
        self._waiting: asyncio.Queue[tuple[str, Trace | None]] = asyncio.Queue(_MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def note(self, stream_id: str, trace: Trace | None = None) -> None:
        """Make the title of the conversation of an answer that has ended, if that is its first; below its span."""
        if self._waiting.full():
            return
        self._waiting.put_nowait((stream_id, trace))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="titles", context=Context())

    async def aclose(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def join(self) -> None:
        """Wait until all titles that were asked for are made."""
        await self._waiting.join()

    async def _run(self) -> None:
        while True:
            stream_id, trace = await self._waiting.get()
            try:
                async with asyncio.timeout(_SECONDS):
                    await self._title(stream_id, trace)
            except (StreamserveError, TimeoutError) as error:
                log.info("title_not_made", stream_id=stream_id, error=str(error))
            except Exception:  # the edge of a task
                log.exception("title_not_made", stream_id=stream_id)
            finally:
                self._waiting.task_done()

    async def _title(self, stream_id: str, trace: Trace | None) -> None:
        answer = await orm.read(_first_answer, stream_id)
        client = None if answer is None else self._client(answer.model)
        if answer is None or client is None:
            return
        title = clean(await self._answer(client, answer, trace))
        if title:
            untitled = Conversation.objects.filter(pk=answer.conversation_id, titled_by="words", deleted_at=None)
            await orm.write(untitled.update, title=title, titled_by="model")

    def _client(self, model: str) -> EngineClient | None:
        """Return the client of a model, or of a pipeline's model: a run has steps and looks up, and makes no titles."""
        client = self._clients.get(model)
        return self._clients.get(client.model) if isinstance(client, PipelineClient) else client

    async def _answer(self, client: EngineClient, answer: Message, trace: Trace | None) -> str:
        """Return what the model answers."""
        question, conversation = answer.parent, answer.conversation
        assert question is not None
        turns = (
            Turn(role="user", content=question.text[:_MAX_SHOWN_CHARS]),
            Turn(role="assistant", content=answer.text[:_MAX_SHOWN_CHARS]),
            Turn(role="user", content=_ASK),
        )
        request = GenerateRequest(
            model=client.alias,
            messages=turns,
            sampling=SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS),
            chat_template_kwargs={"enable_thinking": False},  # of templates that know it
            latency_class=BATCH,
        )
        request = with_system(request, self._systems.get(client.alias, ""))
        admission = Admission(owner=OWNER, tenant=OWNER, salt=salt_of(conversation.tenant))
        with inner_answer(request, trace) as span:
            if span is not None:
                span.describe({"streamserve.is_title": True})
                admission = replace(admission, trace=span.trace)
            asked_at, text = time.monotonic(), ""
            generation = await client.generate(request, admission)
            try:
                async for event in generation:
                    if isinstance(event, Token):
                        text += event.text
                    elif isinstance(event, Done):
                        if span is not None:
                            describe_inner(span, event, asked_at, num_parks=0)
                        await self._count(client.alias, event)
                        return text if event.finish_reason in SUCCESS_REASONS else ""
            finally:
                generation.cancel()
        return ""  # it failed, or was parked

    async def _count(self, model: str, end: Done) -> None:
        """Count a title's tokens for the site: nobody has asked for it."""
        used = usage.used_by(end.usage, finish_reason=end.finish_reason, error_code="", phases=end.phases or {})
        entry = usage.Entry(whose=usage.Whose(owner=OWNER, tenant=OWNER), model=model, kind=TITLE, used=used)
        await orm.call(usage.add_all, [entry])
        if get_settings().rates:
            tokens = end.usage.prompt_tokens + end.usage.completion_tokens
            await orm.call(rates.count, Admission(owner=OWNER, tenant=OWNER), tokens, is_work=True)


def _first_answer(stream_id: str) -> Message | None:
    """Return the message of an answer that a title may be made of: it is whole, and its conversation's first."""
    rows = Message.objects.filter(stream_id=stream_id, state="done", finish_reason__in=SUCCESS_REASONS)
    found = rows.filter(parent__role="user", parent__parent=None, conversation__titled_by="words")
    answer = found.exclude(text="").select_related("conversation", "parent").first()
    if answer is None:
        return None
    others = Message.objects.filter(conversation=answer.conversation_id, role="assistant").exclude(pk=answer.pk)
    return None if others.exists() else answer


def clean(text: str) -> str:
    """Return a model's answer as a title: its first line, without marks around it; "" if it is none."""
    text = re.sub(r"(?s)^.*</think>", "", text)
    line = next((line for line in without_nul(text).splitlines() if line.strip(_AROUND)), "")
    title = " ".join(line.strip(_AROUND).split())
    return title if len(title) <= MAX_CHARS else ""
