"""Bills, usage and limits over time under kill -9 of web processes, on SQLite and PostgreSQL: each answer once.

Two daphnes on one engine process and one log. Readers ask, read and are cut off; what they leave is continued, or
ended, by the other web process. The database alone is judged: the rows of streams against the bills of a receiver,
against the usage, and against what is counted in a window of a day.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.proofs.scale import scaled
from tests.proofs.support.workers import Site, client, two_workers
from tests.support.docs.demo_site import manage
from tests.support.servers.postgres_server import PostgresServer

pytestmark = [pytest.mark.timeout(7200), pytest.mark.cut_streams("web processes are killed with -9")]

NUM_KILLS = scaled(60)  # on each database
NUM_READERS = 8
MOST_ENDS = 16  # answers that end between two kills
WAYS = ("abort", "park")
# Waits until no stream runs, and prints the rows of streams and bills.
LOOK = """
import json, time
from django.db.models import F, Sum
from streamserve.models import RateWindow, Stream, UsageDay
from tests.support.sites.billing.models import Bill
while Stream.objects.filter(state="running").exists():
    time.sleep(0.1)
tokens = ("prompt_tokens", "completion_tokens")
print(json.dumps({
    "streams": [list(row) for row in Stream.objects.values_list("pk", *tokens)],
    "usage": UsageDay.objects.aggregate(num=Sum("requests"), tokens=Sum(F("prompt_tokens") + F("completion_tokens"))),
    "counted": {row.what: row.used for row in RateWindow.objects.all()},
    "bills": [list(row) for row in Bill.objects.values_list("kind", "stream_id", *tokens)],
}))
"""


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    variables = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.billing_site"}
    with ExitStack() as stack:
        if request.param == "postgres":
            variables["BILLS_POSTGRES"] = str(stack.enter_context(PostgresServer()).port)
        yield stack.enter_context(two_workers(tmp_path_factory.mktemp("site"), variables=variables))


class Crowd:
    """Readers that ask one question after the other, and count the answers that have ended for them."""

    def __init__(self, site: Site, chance: random.Random) -> None:
        self.num_ended = 0
        self.is_over = False
        self._site, self._chance = site, chance
        self._ends = asyncio.Condition()

    async def read(self) -> None:
        while not self.is_over:
            port, chance = self._chance.choice(self._site.ports), self._chance
            body = {
                "prompt": f"question {chance.random()}",
                "max_tokens": chance.randrange(1, 30),
                "on_disconnect": chance.choice(WAYS),
            }
            async with client(f"http://127.0.0.1:{port}") as http:
                try:
                    await self._ask(http, body, most=chance.choice((2, 1 << 20)))
                except httpx.TransportError:
                    await asyncio.sleep(0.05)  # that web process has been killed: perhaps the other
            self.num_ended += 1
            async with self._ends:
                self._ends.notify_all()

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, object], most: int) -> None:
        """Read an answer, and leave after so many pieces."""
        async with http.stream("POST", "/streams", json=body) as response:
            assert response.status_code in (200, 503), await response.aread()
            async for _ in response.aiter_raw():
                most -= 1
                if not most:
                    return

    async def until_ended(self, num: int) -> None:
        async with self._ends:
            await self._ends.wait_for(lambda: self.num_ended >= num)


async def test_each_answer_is_billed_once(site: Site) -> None:
    """Whoever is killed: each stream has one start and, once it has ended, one end with its row's tokens.

    Usage and the window of a day have the same tokens, and nothing stays held.
    """
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    crowd = Crowd(site, chance)
    async with asyncio.TaskGroup() as reading:
        for _ in range(NUM_READERS):
            reading.create_task(crowd.read())
        for kill in range(NUM_KILLS):
            await crowd.until_ended(crowd.num_ended + chance.randrange(1, MOST_ENDS))
            site.kill(kill % 2)
            await asyncio.to_thread(site.start, kill % 2)
        crowd.is_over = True
    looked = await asyncio.to_thread(manage, site.folder, "shell", "-c", LOOK, **site.variables)
    assert looked.returncode == 0, looked.stderr
    found = json.loads(looked.stdout.splitlines()[-1])
    streams = sorted(found["streams"])
    ends = sorted([stream_id, *tokens] for kind, stream_id, *tokens in found["bills"] if kind == "end")
    starts = Counter(stream_id for kind, stream_id, *_ in found["bills"] if kind == "start")
    assert ends == streams, f"seed {seed}"
    assert starts == Counter(stream_id for stream_id, *_ in streams), f"seed {seed}"
    tokens = sum(completion for *_, completion in streams)
    assert tokens > 0
    of_all = sum(prompt + completion for _, prompt, completion in streams)
    assert found["usage"] == {"num": len(streams), "tokens": of_all}, f"seed {seed}"
    assert found["counted"] == {"tokens": of_all}, f"seed {seed}"
    print(f"\n{NUM_KILLS} kills -9: {len(streams):,} answers, one bill each, {tokens:,} tokens billed; seed {seed}")
