"""`GET /v1/models/{id}` as the official client calls it, on both sites that serve `ROUTES`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from streamserve import routing
from streamserve.asgi import anyone, app
from streamserve.clients.thread.client import ThreadClient


@pytest.fixture(params=["django", "asgi"])
async def models(
    request: pytest.FixtureRequest, engine: None, lonely_key: str, echo: ThreadClient
) -> AsyncIterator[Any]:
    """The official client's `models`, on a site with the model "echo"."""
    async with app(models={"echo": echo}, authenticate=anyone) as ai:
        site: Any = ai if request.param == "asgi" else routing.application
        http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=site))
        async with openai.AsyncOpenAI(
            api_key=lonely_key, base_url="http://testserver/v1", max_retries=0, http_client=http_client
        ) as client:
            yield client.models


async def test_a_model_is_retrieved_by_its_id(models: Any) -> None:
    """The list and the model itself are the same to the client; an unknown id is a 404 that names the parameter."""
    model = await models.retrieve("echo")
    assert (model.id, model.object, model.owned_by) == ("echo", "model", "streamserve")
    assert [one async for one in models.list()] == [model]
    with pytest.raises(openai.NotFoundError) as raised:
        await models.retrieve("nope")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
