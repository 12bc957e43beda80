"""Web processes are killed with -9 around a run that asks its user: before the answer, with it, and while the run goes
on. The answer is taken once, the tool runs once, and readers have what an unbroken run shows.

Two web processes of one site; the engine is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.workers import SECONDS, Reader, Site, client, two_workers
from tests.support.checks.stream_checks import Frame, text_of

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(7200 if IS_SOAK else 900),
    pytest.mark.cut_streams("a web process is killed with -9"),
]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.approvals_site"}
NUM_KILLS = scaled(40)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with two_workers(tmp_path_factory.mktemp("site"), variables=SETTINGS) as site:
        yield site


class Answer(Reader):
    """Reads the stream that continues `asked` once its user allows the call."""

    def __init__(self, asked: Reader) -> None:
        super().__init__(asked.number, 0)
        self.asked = asked
        (self.call,) = [frame.json["id"] for frame in asked.frames if frame.event == "approval"]

    async def begin(self, url: str, path: str = "", **more: Any) -> None:
        """Allow the call, as often as it takes for the answer to be heard; the key makes it one."""
        body = {"approvals": [{"id": self.call, "allow": True}]}
        headers = {"Idempotency-Key": f"{self.asked.id}"}
        async with client(url) as http:
            path = f"/streams/{self.asked.id}/approvals"
            await self._take(http.stream("POST", path, json=body, headers=headers))


async def asked_at(url: str, number: int) -> Reader:
    """Run until the run asks."""
    reader = Reader(number, 0)
    await reader.begin(url, "/pipelines/till", stream=True, prompt=f"bill {number}", max_tokens=400, ignore_eos=False)
    assert reader.frames[-1].json["finish_reason"] == "interrupt", reader.frames[-1]
    return reader


def calls_of(site: Site, number: int) -> Counter[str]:
    lines = (line.split(": ") for line in (site.folder / "calls").read_text().splitlines())
    return Counter(step for of, step in lines if of == f"bill {number}")


def shown(frames: list[Frame]) -> tuple[str, list[str], str]:
    """Return the text, the kinds of its blocks, and the end."""
    kinds = [frame.json["kind"] for frame in frames if frame.event == "block_start"]
    return text_of(frames), kinds, json.dumps(frames[-1].json.get("finish_reason"))


async def unbroken(site: Site, number: int) -> tuple[Reader, Answer]:
    """Return both streams of a run that nothing has cut."""
    asked = await asked_at(site.servers[0].url, number)
    answer = Answer(asked)
    await answer.begin(site.servers[0].url)
    return asked, answer


async def test_both_processes_die_before_the_answer(site: Site) -> None:
    """Nothing of the process that has asked is left: the run goes on at new processes, and repeats nothing."""
    _, expected = await unbroken(site, 1)
    before = calls_of(site, 1)
    assert before == {"look": 1, "pay": 1}
    asked = await asked_at(site.servers[0].url, 1)
    for index in range(2):
        site.kill(index)
    for index in range(2):
        await asyncio.to_thread(site.start, index)
    answer = Answer(asked)
    await answer.begin(site.servers[1].url)
    assert shown(answer.frames) == shown(expected.frames)
    assert calls_of(site, 1) - before == {"look": 1, "pay": 1}


async def test_kills_while_the_run_goes_on(site: Site) -> None:
    """At any event after the tool's result: the other process has the rest; no tool, step or answer comes again."""
    chance, num_cut = random.Random(28), 0
    _, expected = await unbroken(site, 2)
    for _ in range(NUM_KILLS):
        asked, before = await asked_at(site.servers[1].url, 2), calls_of(site, 2)
        answer = Answer(asked)
        reading = asyncio.create_task(answer.begin(site.servers[0].url))
        await answer.seen(chance.randrange(4, 50))
        site.kill(0)
        await reading
        num_cut += not answer.is_over
        await answer.to_the_end(site.servers[1].url)
        assert shown(answer.frames) == shown(expected.frames)
        assert calls_of(site, 2) - before == {"pay": 1}
        await refused_again(site.servers[1].url, answer)
        await asyncio.to_thread(site.start, 0)
    assert num_cut
    print(f"\nkill -9 of a web process, runs that were allowed: {NUM_KILLS} kills, {num_cut} cut; each tool ran once")


async def test_kills_while_the_answer_is_given(site: Site) -> None:
    """Sent again to the other process with its key, the answer gets one stream, whatever the first one has done."""
    num_paid = 0
    for number in range(NUM_KILLS):
        asked, before = await asked_at(site.servers[1].url, 3), calls_of(site, 3)
        answer = Answer(asked)
        reading = asyncio.create_task(answer.begin(site.servers[0].url))
        await answer.seen(number % 3)
        site.kill(0)
        await reading
        known = answer.id
        async with asyncio.timeout(SECONDS):
            while not answer.is_over:
                if answer.frames:
                    await answer.go_on(site.servers[1].url)
                else:
                    await answer.begin(site.servers[1].url)
        assert known in ("", answer.id)
        assert answer.frames[-1].json["finish_reason"] == "length"
        num_paid += (calls_of(site, 3) - before)["pay"]
        await asyncio.to_thread(site.start, 0)
    # A tool whose process died in it, or before its result was kept, is called again.
    assert NUM_KILLS <= num_paid <= 2 * NUM_KILLS
    print(f"\nkill -9 while an approval is given: {NUM_KILLS} kills, {num_paid} payments, one stream for each answer")


async def refused_again(url: str, answer: Answer) -> None:
    """A second answer is refused, and runs nothing."""
    async with client(url) as http:
        body = {"approvals": [{"id": answer.call, "allow": True}]}
        again: httpx.Response = await http.post(f"/streams/{answer.asked.id}/approvals", json=body)
    assert again.status_code == 409, again.text
