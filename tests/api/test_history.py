"""Laws of a conversation that is longer than its model takes: its oldest turns are left out, and readers are told."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from streamserve.api.fitting import num_tokens_of, room_of
from streamserve.api.history import shorten
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.errors import PromptTooLong
from streamserve.protocol.requests import Admission, GenerateRequest, Message, SamplingParams, Turn
from tests.support.streams.hand_made import started_echo

IN_CONVERSATION = Admission(owner="user:1", tenant="user:1", turn=Turn(conversation_id="c", answer_id="a"))
SYSTEM = Message(role="system", content="Be brief.")


@pytest.fixture
async def small() -> AsyncIterator[ThreadClient]:
    """An engine that takes 512 tokens."""
    client = await started_echo(max_model_len=512)
    yield client
    await client.aclose()


def asked(turns: Sequence[Message], *, continues: bool = False) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=64)
    messages = (SYSTEM, *turns)
    return GenerateRequest(model="echo", messages=messages, sampling=sampling, continue_final_message=continues)


def spoken(num: int, rng: random.Random) -> list[Message]:
    """Return so many turns of different lengths."""
    roles = ("user", "assistant")
    return [Message(role=roles[index % 2], content=f"{index} " + "word " * rng.randint(2, 12)) for index in range(num)]


async def test_the_oldest_turns_go_and_the_prompt_fits(small: ThreadClient) -> None:
    """System prompt and newest question stay, the rest begins with a question, and `trimmed` has the numbers."""
    turns = spoken(41, random.Random(1))
    request, admission = await shorten(small, asked(turns), IN_CONVERSATION, loading_seconds=9)
    messages = request.messages or ()
    assert messages[0] == SYSTEM
    assert list(messages[1:]) == turns[-len(messages) + 1 :]
    assert messages[1].role == "user"
    num_tokens = await num_tokens_of(small, request, admission)
    assert room_of(small, request) / 3 < num_tokens <= room_of(small, request)
    assert admission.trimmed is not None
    assert (admission.trimmed.status, admission.trimmed.step, admission.trimmed.of) == (
        "trimmed",
        len(messages) - 1,
        41,
    )
    (await small.generate(request, admission)).cancel()
    with pytest.raises(PromptTooLong):
        await small.generate(asked(turns), admission)


async def test_the_prompts_of_many_turns_begin_alike(small: ThreadClient) -> None:
    """A conversation that grows is cut in jumps: most turns begin with the same message as the turn before."""
    rng = random.Random(2)
    turns = [replace(turn, content=turn.content[: rng.randint(4, 24)]) for turn in spoken(161, rng)]
    begins = []
    for end in range(41, 162, 2):
        request, _ = await shorten(small, asked(turns[:end]), IN_CONVERSATION, loading_seconds=9)
        begins.append(turns.index((request.messages or ())[1]))
    assert begins == sorted(begins)
    assert len(set(begins)) <= len(begins) / 2


async def test_what_fits_or_is_one_question_stays(small: ThreadClient) -> None:
    """A short history, and a question that is too long by itself."""
    rng = random.Random(3)
    short = asked(spoken(3, rng))
    assert await shorten(small, short, IN_CONVERSATION, loading_seconds=9) == (short, IN_CONVERSATION)
    long = asked([*spoken(4, rng), Message(role="user", content="word " * 500)])
    assert await shorten(small, long, IN_CONVERSATION, loading_seconds=9) == (long, IN_CONVERSATION)


async def test_an_answer_to_continue_stays_with_its_question(small: ThreadClient) -> None:
    """The last two messages are a question and the text that is continued."""
    turns = spoken(42, random.Random(4))
    request, _ = await shorten(small, asked(turns, continues=True), IN_CONVERSATION, loading_seconds=9)
    messages = request.messages or ()
    assert len(messages) < 42
    assert messages[1].role == "user"
    assert list(messages[-2:]) == turns[-2:]
