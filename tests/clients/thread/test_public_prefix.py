"""Laws of the public prefix: the server's own text before a chat is computed once; no text of a caller is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.echo import EchoTokenizer
from streamserve.engine.text.tokenizer import Prompt, PublicPrefixes
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import Done
from streamserve.protocol.requests import Admission, GenerateRequest, Message, SamplingParams, with_system
from tests.support.engines.clients import CONFIG, collect, serving

SIZE = CONFIG.block_size
QUESTION = "the very same question"


def chat(system: str, question: str = QUESTION, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=4)
    request = GenerateRequest(model="echo", messages=(Message(role="user", content=question),), sampling=sampling)
    return replace(with_system(request, system), **fields)


async def cached(client: ThreadClient, request: GenerateRequest, tenant: str = "a") -> int:
    """Answer, and return how many tokens of the prompt were in the cache."""
    done = (await collect(await client.generate(request, Admission(owner=tenant, tenant=tenant, salt=tenant))))[-1]
    assert isinstance(done, Done)
    return done.usage.cached_tokens


def public(system: str) -> int:
    """The echo template's tokens before the first turn's text: role, text, end of turn, role."""
    return len(system) + 3


@pytest.mark.parametrize("beyond", [-1, 0, 1])
async def test_another_tenant_hits_the_public_blocks_and_none_beyond(beyond: int) -> None:
    """On both sides of a block's boundary, and though the two prompts are equal to the last token."""
    system = "s" * (5 * SIZE + beyond - 3)
    assert public(system) == 5 * SIZE + beyond
    async with serving() as client:
        assert await cached(client, chat(system), tenant="a") == 0
        assert await cached(client, chat(system), tenant="b") == public(system) // SIZE * SIZE
        length = public(system) + len(QUESTION) + 2
        assert await cached(client, chat(system), tenant="a") == (length - 1) // SIZE * SIZE


@pytest.mark.parametrize("turn", ["a", "0", "abc", "0123", ""])
async def test_what_a_rendering_tries_is_no_turn(turn: str) -> None:
    """A caller whose turn begins as the probes do shares no more than another caller."""
    system = "s" * (5 * SIZE - 4)  # the next token would fill the block
    async with serving() as client:
        await cached(client, chat(system, turn), tenant="a")
        assert await cached(client, chat(system, turn), tenant="b") == 4 * SIZE


async def test_a_callers_system_prompt_is_its_own() -> None:
    """Even word for word the server's prompt: otherwise its speed would reveal the server's prompt."""
    system = "s" * 40
    mine = (Message(role="system", content=system), Message(role="user", content=QUESTION))
    async with serving() as client:
        await cached(client, chat(system), tenant="a")
        own = with_system(chat("", messages=mine), system)
        assert (own.messages, own.has_public_system) == (mine, False)
        assert await cached(client, own, tenant="b") == 0


def test_the_server_puts_its_prompt_before_a_chat_without_one() -> None:
    """Once, and before nothing else: a bare prompt has no turns."""
    request = chat("Be kind.")
    assert request.messages is not None
    assert [(one.role, one.content) for one in request.messages] == [("system", "Be kind."), ("user", QUESTION)]
    assert request.has_public_system
    assert with_system(request, "Be cruel.") == request
    bare = GenerateRequest(model="echo", prompt="x")
    assert with_system(bare, "Be kind.") == bare
    developer = chat("", messages=(Message(role="developer", content="x"), Message(role="user", content="y")))
    assert with_system(developer, "Be kind.") == developer


class Dated(EchoTokenizer):
    """Writes the date first, as some templates do, and a budget that the caller chose."""

    def __init__(self) -> None:
        self.date = "1 May"
        self.num_encoded = 0

    def encode(self, request: GenerateRequest) -> Prompt:
        self.num_encoded += 1
        head = f"{self.date} {request.chat_template_kwargs.get('thinking_budget', '')};".encode()
        return Prompt(token_ids=(*head, *super().encode(request).token_ids))


def test_a_rendering_is_made_once_and_again_when_the_date_changes() -> None:
    """A rendering is cached for the next caller; on the next day the shared part is as long as before."""
    tokenizer = Dated()
    prefixes = PublicPrefixes(tokenizer)

    def num_public(**fields: Any) -> int:
        request = chat("Be kind.", **fields)
        return prefixes.num_tokens(request, tokenizer.encode(request).token_ids)

    assert [num_public(), num_public(), num_public(question="another")] == [public("Be kind.") + 7] * 3
    assert tokenizer.num_encoded == 3 + 2
    tokenizer.date = "2 May"
    assert [num_public(), num_public()] == [public("Be kind.") + 7] * 2
    assert tokenizer.num_encoded == 3 + 2 + 2 + 2


def test_what_a_caller_sets_in_the_template_is_not_public() -> None:
    """The shared part ends before the first token that a caller's own value has changed."""
    tokenizer = Dated()
    prefixes = PublicPrefixes(tokenizer)
    request = chat("Be kind.", chat_template_kwargs={"thinking_budget": 123})
    for _ in range(2):
        assert prefixes.num_tokens(request, tokenizer.encode(request).token_ids) == len("1 May ")


def test_a_template_that_refuses_the_probe_shares_nothing() -> None:
    """The chat is answered all the same."""

    class Strict(EchoTokenizer):
        def encode(self, request: GenerateRequest) -> Prompt:
            if request.messages is not None and len(request.messages[-1].content) < 2:
                raise BadRequest("too short")
            return super().encode(request)

    request = chat("Be kind.")
    assert PublicPrefixes(Strict()).num_tokens(request, Strict().encode(request).token_ids) == 0
