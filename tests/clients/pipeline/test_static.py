"""Laws of `Static`: what a pipeline says in every run is computed once for all callers, and no text of a caller is."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.static import Static, num_static
from streamserve.protocol.events import Done, Error
from streamserve.protocol.requests import Admission, Message
from streamserve.streams.reader.follow import collect
from tests.clients.pipeline.conftest import Function, Site, asked
from tests.support.streams.hand_made import started_echo

SIZE = 4
QUESTION = "the very same question"
FIELDS = {"max_tokens": 3, "seed": 1, "ignore_eos": True}


def public(*texts: str) -> int:
    """The echo template's tokens before the first turn's text: role, text and end of each, and the role."""
    return sum(len(text) + 2 for text in texts) + 1


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    echo = await started_echo(block_size=SIZE)
    site = Site(echo)
    yield site
    await site.streams.aclose()
    await echo.aclose()


async def cached(site: Site, tenant: str, function: Function, messages: Sequence[Message] = ()) -> int:
    """Run a pipeline for a tenant; return how many tokens of its prompts were in the cache."""
    site.serve(function)
    fields = {"messages": tuple(messages) or (Message(role="user", content=QUESTION),)}
    stream = await site.streams.start(asked(**fields), Admission(owner=tenant, tenant=tenant, salt=f"salt of {tenant}"))
    done = (await collect(site.streams, stream))[-1].event
    assert isinstance(done, Done), done
    return done.usage.cached_tokens


def says(*texts: str) -> Function:
    """A pipeline that asks with these messages, the first a system prompt, and then with its question."""

    async def function(run: Run) -> None:
        roles = ("system", "user", "assistant")
        fixed = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        await run.generate([*fixed, {"role": "user", "content": run.question}], **FIELDS)

    return function


@pytest.mark.parametrize("beyond", [-1, 0, 1])
async def test_another_tenant_hits_the_static_blocks_and_none_beyond(site: Site, beyond: int) -> None:
    """On both sides of a block's boundary, and though both ask the same; the same tenant hits its question too."""
    function = says(Static("s" * (6 * SIZE + beyond - 3)))
    assert await cached(site, "a", function) == 0
    assert await cached(site, "b", function) == (6 * SIZE + beyond) // SIZE * SIZE
    assert await cached(site, "a", function) > 6 * SIZE + SIZE


async def test_several_messages_may_be_static(site: Site) -> None:
    """Rules and an example of a question and its answer; the first message that is not static ends the prefix."""
    texts = [Static("Answer in a sentence."), Static("Where is my bill?"), Static("In the drawer, as always.")]
    await cached(site, "a", says(*texts))
    assert await cached(site, "b", says(*texts)) == public(*texts) // SIZE * SIZE
    mixed = says(texts[0], "A question of somebody's?", texts[2])
    await cached(site, "a", mixed)
    assert await cached(site, "c", mixed) == public(texts[0]) // SIZE * SIZE


@pytest.mark.parametrize("turn", ["a", "0", QUESTION, ""])
async def test_a_visitors_text_is_nobody_elses(site: Site, turn: str) -> None:
    """Whatever it is: the same words give another tenant the static blocks alone."""
    rules = Static("s" * (5 * SIZE - 4))  # the next token would fill the block

    async def function(run: Run) -> None:
        await run.generate([{"role": "system", "content": rules}, {"role": "user", "content": f"{turn}?"}], **FIELDS)

    await cached(site, "a", function)
    assert await cached(site, "b", function) == 4 * SIZE


@pytest.mark.parametrize(
    "make", [str, lambda rules: f"{rules}", lambda rules: rules + "", lambda rules: rules.replace("z", "")]
)
async def test_a_text_made_of_a_static_one_is_none(site: Site, make: Any) -> None:
    """Words alone are no mark: a caller could send them."""
    function = says(make(Static("Answer in a sentence, from what you know.")))
    await cached(site, "a", function)
    assert await cached(site, "b", function) == 0


async def test_a_caller_who_writes_the_system_message_shares_nothing(site: Site) -> None:
    """Word for word the rules: it finds no block of the pipeline, and leaves none for it."""
    rules = "Answer in a sentence, from what you know."

    async def theirs(run: Run) -> None:
        await run.generate(**FIELDS)

    own = (Message(role="system", content=rules), Message(role="user", content=QUESTION))
    assert await cached(site, "a", theirs, own) == 0
    assert await cached(site, "b", says(Static(rules))) == 0
    assert await cached(site, "c", theirs, own) == 0
    assert await cached(site, "d", says(Static(rules))) == public(rules) // SIZE * SIZE


async def test_what_was_warmed_is_shared(site: Site) -> None:
    """`run.warm` computes the static messages for every caller."""
    rules = Static("Answer in a sentence, from what you know.")

    async def warming(run: Run) -> None:
        run.warm([{"role": "system", "content": rules}])
        await asyncio.gather(*run._warming)
        await run.say("warm")

    await cached(site, "a", warming)
    assert await cached(site, "b", says(rules)) >= (public(rules) - 1) // SIZE * SIZE


async def test_a_static_text_is_not_made_in_a_run(site: Site) -> None:
    """Nor on a thread that the run calls: it may hold what the caller has sent."""
    errors: list[str] = []

    def make() -> None:
        try:
            Static("x")
        except RuntimeError as error:
            errors.append(str(error))

    async def function(run: Run) -> None:
        make()
        await run.step("On a thread", make)
        assert copy.deepcopy({"content": RULES}) == {"content": RULES}
        await run.say("made")

    site.serve(function)
    stream = await site.begin()
    async with aclosing(site.streams.clients["p"]):  # type: ignore[type-var]
        end = (await collect(site.streams, stream))[-1].event
    assert not isinstance(end, Error)
    assert len(errors) == 2
    assert "Make it at import" in errors[0]
    assert Static("after the run") == "after the run"


RULES = Static("Be kind.")


def test_a_message_with_more_than_a_text_is_not_static() -> None:
    """A name, or a call's id, may be a caller's."""
    named = {"role": "user", "content": RULES, "name": "Ann"}
    plain = {"role": "system", "content": RULES}
    assert [num_static(one) for one in ([named], [plain, named], [plain, plain], [], [{"role": "user"}])] == [
        0,
        1,
        2,
        0,
        0,
    ]
