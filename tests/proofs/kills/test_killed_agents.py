"""A web process is killed with -9 while agents of each framework run in it: the other process continues each run.

Two web processes of one site; the engine is a process of its own. A finished tool is called once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.proofs.support.workers import SECONDS, Reader, Site, two_workers
from tests.support.checks.stream_checks import Frame, text_of

pytest.importorskip("pydantic_ai")
pytest.importorskip("langgraph")
pytest.importorskip("agents")

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800),
    pytest.mark.cut_streams("a web process is killed with -9"),
]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.frameworks_site"}
AGENTS = ("pydantic", "openai", "graph")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with two_workers(tmp_path_factory.mktemp("site"), variables=SETTINGS) as site:
        yield site


def shown(frames: list[Frame]) -> tuple[str, list[object], str]:
    """Return the text, the blocks and steps, and how it ended."""
    marks = [
        (one.json["kind"], one.json.get("name")) if one.event == "block_start" else one.json.get("message")
        for one in frames
        if one.event == "block_start" or one.json.get("status") == "step"
    ]
    return text_of(frames), marks, f"{frames[-1].event} {frames[-1].json.get('finish_reason')}"


def tools_of(site: Site, stream_id: str) -> Counter[str]:
    """Return how often each tool of a run was called."""
    lines = (line.split() for line in (site.folder / "tools").read_text().splitlines())
    return Counter(name for of, name in lines if of == stream_id)


async def until_called(site: Site, name: str, num: int) -> None:
    """Wait until a tool was called so often, in all runs."""
    file = site.folder / "tools"
    async with asyncio.timeout(SECONDS):
        while not file.exists() or file.read_text().count(f" {name}\n") < num:  # noqa: ASYNC110  (another process's)
            await asyncio.sleep(0.05)


async def wholes(site: Site) -> list[Reader]:
    """Return the readers of an uninterrupted run of each agent."""
    readers = [Reader(number, 40) for number in range(len(AGENTS))]
    await asyncio.gather(*begun(readers, site.servers[1].url))
    return readers


def begun(readers: list[Reader], url: str) -> list[asyncio.Task[None]]:
    return [
        asyncio.create_task(reader.begin(url, f"/pipelines/{name}", stream=True))
        for reader, name in zip(readers, AGENTS, strict=True)
    ]


async def test_a_run_continues_in_a_tool(site: Site) -> None:
    """The tool that ran is called again, the tool that had finished is not; the rest comes without gap or repeat."""
    expected = await wholes(site)
    for reader in expected:
        assert reader.frames[-1].event == "done"
        assert tools_of(site, reader.id) == {"first": 1, "second": 1}
    gate, readers = site.folder / "gate", [Reader(number, 40) for number in range(len(AGENTS))]
    gate.touch()
    reading = begun(readers, site.servers[0].url)
    await until_called(site, "second", 2 * len(AGENTS))
    site.kill(0)
    await asyncio.gather(*reading)
    assert not any(one.is_over for one in readers)
    resuming = [asyncio.create_task(one.to_the_end(site.servers[1].url)) for one in readers]
    await until_called(site, "second", 3 * len(AGENTS))
    gate.unlink()
    await asyncio.gather(*resuming)
    for reader, whole in zip(readers, expected, strict=True):
        assert shown(reader.frames)[1:] == shown(whole.frames)[1:]
        assert tools_of(site, reader.id) == {"first": 1, "second": 2}
    await asyncio.to_thread(site.start, 0)


async def test_a_run_continues_in_its_answer(site: Site) -> None:
    """Every tool is called once; the answer of the site's own model is made again with its seed, and continues."""
    readers = [Reader(number, 40) for number in range(len(AGENTS))]
    reading = begun(readers, site.servers[0].url)
    await asyncio.gather(*(one.seen(16) for one in readers))
    site.kill(0)
    await asyncio.gather(*reading)
    cut = [one for one in readers if not one.is_over]
    assert cut
    await asyncio.gather(*(one.to_the_end(site.servers[1].url) for one in cut))
    for reader in readers:
        assert (reader.frames[-1].event, len(text_of(reader.frames)) > 0) == ("done", True)
        assert tools_of(site, reader.id) == {"first": 1, "second": 1}
        later = Reader(reader.number, 40)
        await later.follow(site.servers[1].url, reader.id)
        assert shown(later.frames) == shown(reader.frames)
    await asyncio.to_thread(site.start, 0)
