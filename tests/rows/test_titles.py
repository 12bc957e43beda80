"""Laws of titles: made by the model of the first answer, cleaned, and never over the owner's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from django.contrib.auth import get_user_model

from streamserve.api.call import Caller
from streamserve.clients.thread.client import ThreadClient
from streamserve.models import Conversation, Message
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import BATCH, GenerateRequest
from streamserve.rows.conversation_store import ConversationRows
from streamserve.rows.titles import MAX_CHARS, OWNER, Titles, clean

pytestmark = pytest.mark.django_db(transaction=True)


class Asked:
    """The echo engine, and what it was asked."""

    def __init__(self, client: ThreadClient) -> None:
        self._client, self.alias = client, client.alias
        self.requests: list[tuple[GenerateRequest, str]] = []

    async def generate(self, request, admission, *rest):  # type: ignore[no-untyped-def]
        self.requests.append((request, admission.owner))
        return await self._client.generate(request, admission, *rest)


@pytest.fixture
def model(echo: ThreadClient) -> Asked:
    return Asked(echo)


@pytest.fixture
async def titles(model: Asked) -> AsyncIterator[Titles]:
    made = Titles({"echo": model}, {"echo": "Be brief."})  # type: ignore[dict-item]
    yield made
    await made.aclose()


async def answered(question: str = "Why is it late?", **fields: object) -> Message:
    """Return the first answer of a new conversation."""
    user, _ = await get_user_model().objects.aget_or_create(username="ann")
    found = await ConversationRows(Limits()).create(Caller(f"user:{user.pk}"))
    await Conversation.objects.filter(pk=found.id).aupdate(title=question)
    asked = await Message.objects.acreate(conversation_id=found.id, role="user", text=question)
    answer = {"state": "done", "finish_reason": "stop", "text": "It rained.", "model": "echo", **fields}
    return await Message.objects.acreate(
        conversation_id=found.id, role="assistant", parent=asked, stream_id=asked.pk, **answer
    )


async def titled(titles: Titles, answer: Message) -> tuple[str, str]:
    titles.note(answer.stream_id or "")
    await titles.join()
    row = await Conversation.objects.aget(pk=answer.conversation_id)
    return row.title, row.titled_by


async def test_the_model_makes_a_title_of_the_first_answer(titles: Titles, model: Asked) -> None:
    """It is asked in the class `batch`, for the site, with few tokens, behind the conversation's own words."""
    title, by = await titled(titles, await answered())
    assert by == "model"
    assert 0 < len(title) <= MAX_CHARS
    ((request, owner),) = model.requests
    assert (request.latency_class, owner, request.sampling.max_tokens) == (BATCH, OWNER, 24)
    assert [turn.content for turn in request.messages or ()][:3] == ["Be brief.", "Why is it late?", "It rained."]


@pytest.mark.parametrize("fields", [{"state": "failed"}, {"finish_reason": "cancelled"}, {"text": ""}, {"model": "no"}])
async def test_other_answers_give_no_title(titles: Titles, model: Asked, fields: dict[str, str]) -> None:
    """A failed, stopped or empty answer, and a model that is not there: the first words stay."""
    assert await titled(titles, await answered(**fields)) == ("Why is it late?", "words")
    assert model.requests == []


async def test_a_title_of_the_owner_stays(titles: Titles, model: Asked) -> None:
    """A conversation that was renamed before, or while the title is made, keeps its name."""
    answer = await answered()
    of_owner = {"title": "Mine", "titled_by": "owner"}
    await Conversation.objects.filter(pk=answer.conversation_id).aupdate(**of_owner)
    assert await titled(titles, answer) == ("Mine", "owner")
    other, generate = await answered(), model.generate

    async def rename(*args: object) -> object:
        await Conversation.objects.filter(pk=other.conversation_id).aupdate(**of_owner)
        return await generate(*args)  # type: ignore[no-untyped-call]

    model.generate = rename  # type: ignore[method-assign]
    assert await titled(titles, other) == ("Mine", "owner")


async def test_a_later_answer_gives_no_title(titles: Titles, model: Asked) -> None:
    """Another answer to the first question, or the answer to a second question."""
    answer = await answered()
    for parent in (answer.parent, answer):
        again = await Message.objects.acreate(
            conversation_id=answer.conversation_id,
            role="assistant",
            parent=parent,
            state="done",
            finish_reason="stop",
            text="No.",
            model="echo",
            stream_id=f"{parent.role if parent else ''}",
        )
        assert (await titled(titles, again))[1] == "words"
    assert model.requests == []


@pytest.mark.parametrize(
    ("answer", "title"),
    [
        ('"Late Fees"\nBecause…', "Late Fees"),
        ("<think>hm\n</think>\n\n**Late  fees.**", "Late fees"),
        ("Title " * 40, ""),
        ('""\n', ""),
    ],
)
def test_an_answer_becomes_a_title(answer: str, title: str) -> None:
    """Its first line without marks; what is too long is none."""
    assert clean(answer) == title
