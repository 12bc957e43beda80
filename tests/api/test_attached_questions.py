"""Questions with files: what the engine is given, now and at later turns, and what readers and lists are told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test.utils import override_settings

from streamserve import Run, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.engine.config import EngineConfig
from streamserve.models import Message
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import parse_sse

pytestmark = pytest.mark.django_db(transaction=True)

BILL = "month,total\n" + "May,9.90\n" * 12
BLOCK_SIZE = EngineConfig().block_size
SHORT = {"max_tokens": 8, "seed": 7, "ignore_eos": True}


async def assistant(run: Run) -> None:
    """Say what it was given."""
    await run.say(json.dumps([run.question, [(one.name, one.type, one.text) for one in run.attachments]]))


class Talk:
    """A conversation of a caller with a model or pipeline."""

    def __init__(self, caller: Caller, conversation_id: str) -> None:
        self.caller, self.id = caller, conversation_id

    async def attach(self, name: str, text: str) -> str:
        form = {"file": SimpleUploadedFile(name, text.encode())}
        return str((await self.caller.client.post("/attachments", form, headers=self.caller.headers)).json()["id"])

    async def post(self, **body: Any) -> Any:
        return await self.caller.post(f"/conversations/{self.id}/messages", {**SHORT, **body})

    async def ask(self, content: str, *files: str, **body: Any) -> list[Any]:
        """Ask, and return the events once the answer is written."""
        response = await self.post(content=content, attachments=[*files], **body)
        assert response.status_code == 200, response.content
        events = parse_sse(await body_of(response))
        while await Message.objects.filter(state="running").aexists():  # written after the reader has the last event
            pass
        return events

    async def messages(self) -> list[dict[str, Any]]:
        return list((await self.caller.get(f"/conversations/{self.id}/messages")).json()["messages"])


@pytest.fixture
async def make(alice_key: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """Make a conversation with a model."""
    models = {"chat": {"PATH": "echo", "ANSWERS": None, "ENGINE": {"MAX_MODEL_LEN": 1024}}}
    conf = {
        "TESTING": True,
        "CONVERSATIONS": True,
        "TITLES": "words",
        "STATE_DIR": tmp_path,
        "MODELS": models,
        "LIMITS": {"MAX_ATTACHMENTS": 2},
    }
    pipeline("assistant")(assistant)
    try:
        with override_settings(STREAMSERVE=conf):
            await until_ready()
            caller = Caller(key=alice_key)

            async def talk(model: str = "chat") -> Talk:
                return Talk(caller, (await caller.post("/conversations", {"model": model})).json()["id"])

            yield talk
            await site.reset()
    finally:
        forget("assistant")


def prompts() -> list[list[str]]:
    """Return the prompts of all streams, the oldest first, as the engine was given them."""
    streams = sorted(site.get_site().streams.all(), key=lambda one: one.created_at)
    return [[message.content for message in one.request.messages or ()] for one in streams]


async def test_a_file_is_in_the_prompt_now_and_later(make: Any) -> None:
    """Before the words, in one form; the next turn has the same words, and the engine has them cached."""
    talk = await make()
    file_id = await talk.attach("bill.csv", BILL)
    await talk.ask("What was May's?", file_id)
    await talk.ask("And June's?")
    asked = f'<file name="bill.csv">\n{BILL.strip()}\n</file>\n\nWhat was May\'s?'
    one, two = prompts()
    assert one == [asked]
    assert (two[0], two[-1]) == (asked, "And June's?")
    question, first, _, second = await talk.messages()
    num_whole = first["usage"]["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE
    assert second["usage"]["cached_tokens"] >= num_whole > len(BILL)
    (shown,) = question["attachments"]
    assert (shown["id"], shown["name"], shown["characters"]) == (file_id, "bill.csv", len(BILL.strip()))
    assert question["blocks"][0]["text"] == "What was May's?"


async def test_what_does_not_fit_is_cut_once(make: Any) -> None:
    """The reader is told at once; later turns have the same first part; the list shows how much was kept."""
    talk = await make()
    pages = "\n\n".join(f"Page {number}. " + "word " * 10 for number in range(40))
    file_id = await talk.attach("book.md", pages)
    events = await talk.ask("Which page?", file_id)
    (trimmed,) = [event.json for event in events if event.event == "status" and event.json["status"] == "trimmed"]
    assert "characters" in trimmed["message"]
    (second_meta,) = [event.json for event in events if event.event == "meta" and "trimmed" in event.json]
    assert second_meta["trimmed"][0]["message"] == trimmed["message"]
    (shown,) = (await talk.messages())[0]["attachments"]
    assert 0 < shown["kept"] < shown["characters"] == len(pages.strip())
    await talk.ask("And before it?")
    one, two = prompts()
    assert one[0] == two[0]
    assert one[0].startswith('<file name="book.md" cut>\nPage 0. ')
    assert pages[: shown["kept"]] in one[0]


async def test_another_answer_and_another_question_have_the_files(make: Any) -> None:
    """A question that is asked again has its files; an edited question brings the same ids again."""
    talk = await make()
    file_id = await talk.attach("bill.csv", BILL)
    await talk.ask("What was May's?", file_id)
    question = (await talk.messages())[0]["id"]
    again = await talk.post(parent=question)
    await body_of(again)
    await talk.ask("What was July's?", file_id, parent=None)
    one, two, three = prompts()
    assert one == two
    assert three[0] == one[0].replace("May's?", "July's?")


async def test_files_that_cannot_be_brought(make: Any, lonely_key: str) -> None:
    """Unknown, another's, or too many: nothing is stored."""
    talk = await make()
    mine = [await talk.attach(f"{number}.txt", "hi") for number in range(3)]
    stranger = Talk(Caller(key=lonely_key), "")
    for files, status, code in (
        (["0" * 32], 404, "attachment_not_found"),
        ([await stranger.attach("theirs.txt", "hi")], 404, "attachment_not_found"),
        (mine, 400, "invalid_value"),
        (["../x"], 400, "invalid_value"),
        ([mine[0]], 400, "conflicting_fields"),
    ):
        body = {"content": "Hi", "attachments": files}
        if code == "conflicting_fields":
            body = {"parent": "0" * 32, "attachments": files}
        response = await talk.post(**body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (status, code, error["param"])
        assert error["param"].startswith("attachments")
    assert await talk.messages() == []


async def test_a_pipeline_has_words_and_files_apart(make: Any) -> None:
    """`run.question` is what its user wrote; `run.attachments` are the files of the conversation."""
    talk = await make("assistant")
    await talk.ask("What was May's?", await talk.attach("bill.csv", BILL))
    events = await talk.ask("And in this?", await talk.attach("notes.txt", "June: 5"))
    text = "".join(event.json["text"] for event in events if event.event == "token")
    files = [["bill.csv", "text/csv", BILL.strip()], ["notes.txt", "text/plain", "June: 5"]]
    assert json.loads(text) == ["And in this?", files]
