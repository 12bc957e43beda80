"""`RowSite`: the `Site` that the rows of batches are requests to, as work/batch_runs.py asks it. asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streamserve.api.call import Caller, Found
from streamserve.keys import salt_of
from streamserve.protocol.errors import no_stream
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.quota import Places
from streamserve.streams.registry import Streams
from streamserve.streams.store import Admission, Once
from streamserve.streams.stream import Stream

if TYPE_CHECKING:
    from streamserve.web.site import DjangoSite

CLASS = "batch"
# A finished row is read at once.
_KEEP_SECONDS, _MAX_FINISHED = 1.0, 32


class RowSite:
    """The `Site` (api/call.py) that the rows of batches are answered by. One a worker process; of its event loop.

    Rows are accepted as requests are, in the latency class `batch`. Their streams have no row, no quota, and a log in
    memory: a row that a kill has cut short is run again from its beginning, so nothing of it is kept.
    """

    takes_prompt_in_url = False
    unseal = stored_chats = None

    def __init__(self, site: DjangoSite) -> None:
        self._site = site
        self.clients, self.limits, self.default_model = site.clients, site.limits, site.default_model
        self.is_debug, self.reasoning_field = site.is_debug, site.reasoning_field
        config = replace(site.settings.streams, retention_seconds=_KEEP_SECONDS, max_finished=_MAX_FINISHED)
        self.streams = Streams(site.clients, MemoryLog(), config)

    @property
    def is_draining(self) -> bool:
        """Whether the process is shutting down."""
        return self._site.is_draining

    async def start(
        self,
        caller: Caller,
        request: GenerateRequest,
        on_disconnect: str = "abort",
        *,
        received_at: float | None = None,
        once: Once | None = None,
        begins_unloaded: bool = False,
        places: Places | None = None,
    ) -> Stream:
        """Start the answer of a row, which waits while its model loads. Raises StreamserveError."""
        request = replace(self._site.prepared(request), latency_class=CLASS)
        admission = Admission(
            owner=caller.owner,
            tenant=caller.tenant,
            salt=salt_of(caller.tenant),
            on_disconnect="abort",
            received_at=received_at,
        )
        return await self.streams.start(request, admission, places)

    def with_own_system(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the system prompt that the settings give its model."""
        return self._site.with_own_system(request)

    def default_class(self, route: str, model: str) -> str:
        """Return the class of batches."""
        return CLASS

    async def find(self, caller: Caller, *, stream_id: str = "", log_id: str = "") -> Found:
        """Raise NotFound: a row is not resumed."""
        raise no_stream()

    async def health(self) -> Mapping[str, Any]:
        """Return nothing: no probe asks."""
        return {}

    async def work(self) -> Mapping[str, Mapping[str, int]]:
        """Return nothing: `/metrics` asks the site itself."""
        return {}

    async def aclose(self) -> None:
        """End the rows that run."""
        await self.streams.aclose()
        await self.streams.log.aclose()
