"""`ProcessEmbedder`: an embedding model in a process of its own, shared by all processes of a site. No torch.

As with `ProcessClient`, an `EngineLink` finds, starts and watches the process. A long request is sent in parts, each
after the vectors of the part before it have come: a frame bounds a part's vectors, and nothing more is computed for a
client that has left.
"""

from __future__ import annotations

from dataclasses import replace

from streamserve.clients.process.config import LaunchConfig
from streamserve.clients.process.link import EngineLink
from streamserve.clients.process.messages import Embed, Spelling, Tokenize
from streamserve.protocol.embeddings import NUMBER_BYTES, Embedded, EmbedRequest
from streamserve.protocol.engine import EMBEDS, EngineStats, ModelDescription
from streamserve.protocol.frames import MAX_FRAME_BYTES
from streamserve.protocol.requests import NO_CALLER, Admission, GenerateRequest
from streamserve.protocol.spelling import Spell, Spelled

_MAX_INPUTS = 256  # of a part
_SHARE = 2  # of a frame, a part's vectors take half at most


class ProcessEmbedder:
    """An `EmbeddingClient` for the embedding model of `config`: found, or started if `autostart`. One event loop."""

    def __init__(self, config: LaunchConfig) -> None:
        assert config.embedder is not None
        self.alias = config.embedder.alias
        self._link = EngineLink(config)

    async def embed(self, request: EmbedRequest, admission: Admission = NO_CALLER) -> Embedded:
        """Return the vectors, or raise: BadRequest (an input never fits), Refused (not now)."""
        vectors: list[bytes] = []
        num_tokens = 0
        for part in request.parts(self._part_size(request)):
            embedded = await self._embed(part, admission)
            vectors += embedded.vectors
            num_tokens += embedded.num_tokens
        return Embedded(vectors=tuple(vectors), num_tokens=num_tokens)

    async def _embed(self, part: EmbedRequest, admission: Admission) -> Embedded:
        asked = replace(admission, turn=None)
        answer = await self._link.require().ask(lambda new_id: Embed(new_id, part, asked))
        assert isinstance(answer, Embedded)
        return answer

    def _part_size(self, request: EmbedRequest) -> int:
        """Return how many vectors fit a frame."""
        num = request.dimensions or self.describe().dimensions or 1
        return max(1, min(_MAX_INPUTS, MAX_FRAME_BYTES // _SHARE // (NUMBER_BYTES * num)))

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the ids of a request's `prompt`, as `embed` would see them."""
        answer = await self._link.require().ask(lambda new_id: Tokenize(new_id, request, admission))
        assert isinstance(answer, tuple)
        return answer

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids."""
        answer = await self._link.require().ask(lambda new_id: Spelling(new_id, asked))
        assert isinstance(answer, Spelled)
        return answer

    async def control(self, action: str) -> None:
        """Pause, resume, drain, sleep or wake for all processes; "stop" drains and then ends the process."""
        await self._link.control(action)

    def start(self) -> None:
        """Start looking for the process, once; returns at once. On the event loop."""
        self._link.start()

    def wake(self) -> None:
        """Look for the engine, and have it loaded; returns at once. On the event loop."""
        self._link.wake()

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""
        return replace(self._link.description, kind=EMBEDS)

    def stats(self) -> EngineStats:
        """Return the counts of the last second. Never blocks."""
        return self._link.stats

    async def aclose(self) -> None:
        """Refuse what waits, and disconnect; the process stays."""
        await self._link.aclose()
