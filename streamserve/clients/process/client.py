"""`ProcessClient`: an engine in a process of its own, shared by all processes of a site. The default for sites.

Lives on the event loop of a web process or worker; never imports torch. Its `EngineLink` finds, starts and watches the
engine; what is asked goes through the session of the link's connection.
"""

from __future__ import annotations

from dataclasses import replace

from streamserve.clients.base import Generation
from streamserve.clients.process.config import LaunchConfig
from streamserve.clients.process.link import EngineLink
from streamserve.clients.process.messages import Open, Spelling, Tokenize, Warm
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.requests import NO_CALLER, START, Admission, GenerateRequest, Resume
from streamserve.protocol.spelling import Spell, Spelled


class ProcessClient:
    """An `EngineClient` for the engine of `config`: found, or started if `autostart`. One event loop."""

    def __init__(self, config: LaunchConfig) -> None:
        self.alias = config.model.alias
        self._link = EngineLink(config)

    @classmethod
    def visiting(cls, config: LaunchConfig) -> ProcessClient:
        """Return a client for operators: it uses the engine as it is, and neither starts nor replaces it."""
        return cls(replace(config, autostart=False, made_at=0.0))

    @property
    def is_connected(self) -> bool:
        """Whether an engine is connected and has sent its state."""
        return self._link.is_connected

    @property
    def engine_pid(self) -> int | None:
        """The process id of the connected engine; None until it has sent its state."""
        session = self._link.session
        return None if session is None or not self._link.is_connected else session.connection.peer.pid

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request or raise: BadRequest (never fits, bad template), Refused (not now)."""
        answer = await self._link.require().ask(
            lambda new_id: Open(new_id, request, replace(admission, turn=None), resume),  # rows are no engine's
            stream_id=admission.stream_id,
        )
        assert isinstance(answer, Generation)
        return answer

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's token ids as `generate` would see them."""
        answer = await self._link.require().ask(
            lambda new_id: Tokenize(new_id, request, admission), stream_id=admission.stream_id
        )
        assert isinstance(answer, tuple)
        return answer

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids."""
        answer = await self._link.require().ask(lambda new_id: Spelling(new_id, asked))
        assert isinstance(answer, Spelled)
        return answer

    async def warm(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> None:
        """Prefill the prompt into the prefix cache and generate nothing; returns when that is done."""
        await self._link.require().ask(lambda new_id: Warm(new_id, request, admission), stream_id=admission.stream_id)

    async def control(self, action: str) -> None:
        """Pause, resume, drain, sleep or wake for all processes; "stop" drains and then ends the process."""
        await self._link.control(action)

    def start(self) -> None:
        """Start looking for the engine, once; returns at once. On the event loop."""
        self._link.start()

    def wake(self) -> None:
        """Look for the engine, and have it loaded; returns at once. On the event loop."""
        self._link.wake()

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""
        return self._link.description

    def stats(self) -> EngineStats:
        """Return the counts of the last second. Never blocks."""
        return self._link.stats

    async def aclose(self) -> None:
        """End every generation with an `error` event and disconnect; the engine process stays."""
        await self._link.aclose()
