"""`embed` and `aembed`: vectors from the site's own code, for whom it names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.test.utils import override_settings

from streamserve import aembed, embed
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.web import site
from tests.conftest import until_ready

SITE = {
    "TESTING": True,
    "EMBEDDING_MODELS": {"search": {"PATH": "echo"}, "hidden": {"PATH": "echo", "PERMISSION": "staff"}},
    "LIMITS": {"MAX_EMBEDDING_INPUTS": 3, "MAX_PROMPT_CHARS": 20},
}


@pytest.fixture(autouse=True)
async def served(transactional_db: Any) -> AsyncIterator[None]:
    with override_settings(STREAMSERVE=SITE):
        await until_ready()
        yield
        await site.reset()


async def test_texts_have_vectors_in_order() -> None:
    """However many: they are sent as as many requests as the limits need; one text is a list of one vector."""
    texts = [f"text {number}" for number in range(8)]
    vectors = await aembed(texts)
    assert len(vectors) == 8
    assert await aembed(texts[5]) == [vectors[5]]
    assert [len(one) for one in await aembed(texts[:2], dimensions=8)] == [8, 8]
    assert site.get_site().services.answers.embedders.clients["search"].stats().embedded_requests == 5
    assert await aembed([]) == []


async def test_synchronous_code_has_the_same() -> None:
    """On a thread; the event loop is not blocked by it."""
    assert await sync_to_async(embed)(["a", "b"]) == await aembed(["a", "b"])
    with pytest.raises(SynchronousOnlyOperation, match="await aembed"):
        embed("a")


async def test_a_user_has_the_models_that_it_may_use(alice: Any, staff: Any) -> None:
    """The site itself may use every model."""
    with pytest.raises(NotFound):
        await aembed("a", model="hidden", user=alice)
    assert await aembed("a", model="hidden", user=staff) == await aembed("a", model="hidden")


async def test_what_no_request_takes_is_refused() -> None:
    """As over HTTP."""
    for texts in ([""], ["a" * 21], [1]):
        with pytest.raises((BadRequest, TypeError)):
            await aembed(texts)  # type: ignore[arg-type]
