"""`AdapterClient`: one adapter of a model, as callers see it: a model of its own, whose engine is the model's.

It names the adapter in each request, and passes on what the model says of itself. Any event loop. Knows no weights.
"""

from __future__ import annotations

from dataclasses import replace

from streamserve.clients.base import EngineClient, Generation, WrappedClient
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.requests import NO_CALLER, START, Admission, GenerateRequest, Resume


class AdapterClient(WrappedClient):
    """The client of an adapter. `client` is the model's, which its site starts and closes."""

    def __init__(self, alias: str, client: EngineClient) -> None:
        super().__init__(client)
        self.alias = alias

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request, as the model does."""
        return await super().generate(self._named(request), admission, resume)

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's token ids."""
        return await super().tokenize(self._named(request), admission)

    async def warm(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> None:
        """Prefill the prompt into the prefix cache, as the adapter computes it."""
        await super().warm(self._named(request), admission)

    def describe(self) -> ModelDescription:
        """Return the model's state, under the adapter's name."""
        return replace(super().describe(), alias=self.alias, parent=self._client.alias)

    def stats(self) -> EngineStats:
        """Return no counts: they are the model's."""
        return EngineStats()

    async def aclose(self) -> None:
        """Leave the model to its site."""

    def _named(self, request: GenerateRequest) -> GenerateRequest:
        return replace(request, model=self._client.alias, adapter=self.alias)
