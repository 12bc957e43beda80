"""Two daphnes that send spans to a collector, kill -9 of one amid its answers: the other continues their traces."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import pytest

from tests.proofs.scale import scaled
from tests.proofs.support.workers import STALLING, Reader, Site, client, two_workers
from tests.support.servers.collector import Collected, Collector

pytestmark = [pytest.mark.timeout(1800), pytest.mark.cut_streams("workers are killed with -9")]

NUM_READERS, NUM_TOKENS = 10, 100
NUM_KILLS = scaled(10)
ANSWER = "text_completion echo"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Site]:
    variables = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.workers.traced_site", **collector.variables}
    with two_workers(tmp_path_factory.mktemp("site"), app=STALLING, variables=variables) as site:
        yield site


class Traced(Reader):
    """A reader whose request has a trace of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number, NUM_TOKENS)
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)

    async def ask(self, url: str) -> None:
        fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": self.number}
        headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-01"}
        async with client(url) as http:
            body = {"prompt": f"question {self.number}", **fields}
            await self._take(http.stream("POST", "/streams", json=body, headers=headers))

    def ended(self, spans: list[Collected]) -> list[Collected]:
        """Return the spans of what has brought the answer to its end."""
        own = [one for one in spans if one.trace_id == self.trace_id and one.name == ANSWER]
        return [one for one in own if one.attributes.get("streamserve.has_ended")]


async def test_a_kill_cuts_no_trace(site: Site, collector: Collector) -> None:
    """Each time every answer ends in one span of its caller's trace, with its whole usage, below the killed process's.

    The span of the killed process is the only one that is not there: its id is the parent of what another continued.
    """
    for _ in range(NUM_KILLS):
        readers = [Traced(number) for number in range(NUM_READERS)]
        site.stall(0, NUM_TOKENS // 4)
        reading = [asyncio.create_task(reader.ask(site.servers[0].url)) for reader in readers]
        await asyncio.gather(*(reader.seen(1) for reader in readers))
        await site.stalled(0, reading)
        site.kill(0)
        await asyncio.gather(*reading)
        cut = [reader for reader in readers if not reader.is_over]
        assert cut
        await asyncio.gather(*(reader.to_the_end(site.servers[1].url) for reader in cut))
        spans = await asyncio.to_thread(
            collector.wait, lambda found, cut=cut: all(reader.ended(found) for reader in cut)
        )
        for reader in cut:
            [answer] = reader.ended(spans)
            assert answer.attributes["streamserve.stream_id"] == reader.id
            assert answer.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
            assert answer.parent_id != reader.span_id
            assert answer.parent_id not in {one.span_id for one in spans}
            below = {one.name for one in spans if one.parent_id == answer.span_id}
            assert "decode" in below
        await asyncio.to_thread(site.start, 0)
