"""`AdaptedClient`: one adapter of a model, as callers see it: a model of its own, whose engine is the model's.

It names the adapter in each request, and passes on what the model says of itself. Any event loop. Knows no weights.
"""

from __future__ import annotations

from dataclasses import replace

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.requests import NO_CALLER, START, Admission, GenerateRequest, Resume
from streamserve.protocol.spelling import Spell, Spelled


class AdaptedClient:
    """See `EngineClient` in clients/base.py. `client` is the model's, which its site starts and closes."""

    def __init__(self, alias: str, client: EngineClient) -> None:
        self.alias = alias
        self._client = client

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request, as the model does."""
        return await self._client.generate(self._adapted(request), admission, resume)

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's token ids."""
        return await self._client.tokenize(self._adapted(request), admission)

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids."""
        return await self._client.spell(asked)

    async def warm(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> None:
        """Prefill the prompt into the prefix cache, as the adapter computes it."""
        await self._client.warm(self._adapted(request), admission)

    def start(self) -> None:
        """Start loading the model."""
        self._client.start()

    def wake(self) -> None:
        """Wake the model."""
        self._client.wake()

    async def control(self, action: str) -> None:
        """Carry out an operator's action on the model, with all its adapters."""
        await self._client.control(action)

    def describe(self) -> ModelDescription:
        """Return the model's state, under the adapter's name."""
        return replace(self._client.describe(), alias=self.alias, parent=self._client.alias)

    def stats(self) -> EngineStats:
        """Return no counts: they are the model's."""
        return EngineStats()

    async def aclose(self) -> None:
        """Leave the model to its site."""

    def _adapted(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, model=self._client.alias, adapter=self.alias)
