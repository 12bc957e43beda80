"""Web processes and the engine are killed with -9 under the streams of each front end: its client resumes, and has the
whole answer: the text of the log, no frame twice, none left out, one end.

Two web processes of one site; the engine is a process of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.proofs.kills.test_conversation_kills import killed
from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.front_ends import FRONT_ENDS, FrontEnd, FrontEndReader
from tests.proofs.support.workers import Reader, Site, two_workers
from tests.support.checks.stream_checks import text_of

pytestmark = [
    pytest.mark.timeout(7200 if IS_SOAK else 900),
    pytest.mark.cut_streams("a web process is killed with -9"),
]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.front_ends_site"}
NUM_KILLS = scaled(60)  # of each front end
MOST_MORE = 10  # kills, where no stream was cut yet
AT_ONCE = 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with two_workers(tmp_path_factory.mktemp("site"), variables=SETTINGS) as site:
        yield site


@pytest.mark.parametrize("front_end", FRONT_ENDS, ids=[one.name for one in FRONT_ENDS])
async def test_a_client_has_the_whole_answer(site: Site, front_end: FrontEnd) -> None:
    """Whoever is killed, and when: what the client has put together is what the log has."""
    chance, kills, num_cut = random.Random(28), Counter[str](), 0
    for round_ in range(NUM_KILLS + MOST_MORE):
        if round_ >= NUM_KILLS and num_cut:
            break
        readers = [FrontEndReader(front_end, round_ * AT_ONCE + index) for index in range(AT_ONCE)]
        reading = [asyncio.create_task(one.begin(site.servers[index % 2].url)) for index, one in enumerate(readers)]
        await chance.choice(readers).seen(chance.randrange(1, front_end.most_frames))
        which = ("first", "engine", "second")[round_ % 3]
        kills[await killed(site, which)] += 1
        await asyncio.gather(*reading)
        num_cut += sum(not one.is_over for one in readers)
        await asyncio.gather(*(one.to_the_end(site.servers[chance.randrange(2)].url) for one in readers))
        for one in readers:
            await check_whole(site, one)
    assert num_cut
    print(f"\nkill -9 under {front_end.name}: {dict(kills)}, {num_cut} streams cut; each client has the log's text")


async def check_whole(site: Site, reader: FrontEndReader) -> None:
    """The client has the text that the native events have, each frame once, in order, and one end, a success."""
    native = Reader(reader.number, 0)
    await native.follow(site.servers[0].url, reader.id)
    assert native.frames[-1].event == "done", native.frames[-1]
    front_end, frames = reader.front_end, reader.frames
    assert front_end.text_of(frames) == text_of(native.frames)
    assert text_of(native.frames)
    assert [front_end.is_end(frame) for frame in frames].count(True) == 1
    places = [place for frame in frames if (place := front_end.place_of(frame)) is not None]
    assert places == sorted(set(places)), f"frames are missing or repeated: {places}"
