"""Ten thousand abrupt ends at the site: no later step holds a sequence whose reader left, and nothing is left behind.

The engine, a process of its own, is held in a step while readers leave. When the site has noticed, it sends the engine
one more request. Messages to the engine keep their order, so once that request is accepted the engine knows which
readers left. Then the step may end, and the next plan must hold none of them. Other readers leave while the engine
runs: for each sequence the test counts the plans that were made after the engine's process received the cancel, and
still hold it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.gated_engine import GatedEngine, gated_engine, held_by
from tests.proofs.support.leaving import WAYS, Client, HttpClient, fin
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.docs.demo_site import environment
from tests.support.plugins.migrated import MAKE_KEY, prepare
from tests.support.servers.web_servers import SERVERS, Server, wait_until_ready

pytestmark = [pytest.mark.timeout(3600)]

NUM_ENDS = scaled(10_000)  # at both servers together
STAGES = ("prefill", "first token", "middle", "queued", "last token", "running on")
NUM_READERS = 42  # of a stage at a time: six in each way
NUM_ROUNDS = round(NUM_ENDS / (len(SERVERS) * len(STAGES) * NUM_READERS))
NUM_MIDDLE, NUM_TOKENS = 4, 7
# So many steps run while readers leave. The engine runs at most 256 tokens ahead of them.
NUM_FREE, MANY_TOKENS = 200, 400
# More than enough: a round takes at most 15 steps at each of four stages where the engine is held.
COMPANION_TOKENS = (60 + NUM_FREE) * (NUM_ROUNDS + 2)
# The plan that is being made while the engine's process receives the cancel.
MOST_PLANS = 1
DEADLINE_SECONDS = 300.0 if IS_SOAK else 60.0
# These clients answer no pings, and the connection over which the test queries the server must not be closed.
OPTIONS = {
    "daphne": ("--ping-interval", "3600"),
    "uvicorn": ("--timeout-keep-alive", "3600", "--ws-ping-interval", "3600"),
}


Leaver = tuple[Callable[[Any], None], Any]  # how it leaves, and its client


@dataclass
class Site:
    """A server, its engine, and an answer that runs all the time."""

    server: Server
    engine: GatedEngine
    folder: Path
    http: httpx.Client
    companion: HttpClient | None = None
    companion_id: int = 0  # of its sequence
    num_companion: int = 0  # of its tokens that the engine has made
    num_ends: int = 0
    num_late: int = 0  # plans that held a sequence whose reader had left
    clients: list[Client] = field(default_factory=list)  # that may be connected still

    def held(self) -> dict[str, Any]:
        """Return what the web process holds."""
        value: dict[str, Any] = self.http.get("/held").json()
        return value

    def num_connections(self) -> int:
        """Count the server's connections without ours; a connection that it has closed has no owner (inode 0)."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port = f":{self.server.port:04X}"
        return sum(line[1].endswith(port) and line[9] != "0" for line in lines) - 2  # its listener, and ours

    def step(self, num_steps: int = 1) -> list[int]:
        """Release the engine; return the sequences of the step in which it is held next."""
        self.num_companion += num_steps
        return self.engine.step(num_steps)

    def ask(self, kind: type[Client], *, max_tokens: int, **fields: Any) -> Any:
        """Connect and send the request; it is accepted when this returns."""
        client: Any = kind(self.server)
        self.clients.append(client)
        client.ask({"prompt": "x" * 20, "max_tokens": max_tokens, "ignore_eos": True, **fields})
        client.read_until(client.meta)
        return client

    def rows(self) -> dict[tuple[str, str], int]:
        """Count the site's rows by state and reason."""
        with closing(sqlite3.connect(self.folder / "site.sqlite3", timeout=DEADLINE_SECONDS)) as database:
            query = "select state, finish_reason, count(*) from streamserve_stream group by 1, 2"
            return {(state, reason): count for state, reason, count in database.execute(query)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with its database."""
    folder = tmp_path_factory.mktemp("site")
    prepare(folder, MAKE_KEY)
    return folder


@pytest.fixture(params=SERVERS)
def site(request: pytest.FixtureRequest, folder: Path) -> Iterator[Site]:
    """As many seats as the readers of a stage need, and one for the companion."""
    variables = {"SEATS": str(NUM_READERS + 1), "RETENTION": "1"}
    env = environment(folder, DJANGO_SETTINGS_MODULE="tests.support.sites.pages.gated_site", **variables)
    with ExitStack() as stack:
        engine = stack.enter_context(gated_engine(folder, env))
        server = stack.enter_context(
            SERVERS[request.param]("tests.support.sites.ends_app:app", *OPTIONS[request.param], env=env)
        )
        wait_until_ready(server.url)
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=DEADLINE_SECONDS, trust_env=False))
        site = Site(server, engine, folder, http)
        yield site
        for client in site.clients:
            client.socket.close()


def until(claim: Callable[[], bool], what: Callable[[], str]) -> None:
    """Query until `claim` holds."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not claim():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


def test_abrupt_ends(site: Site, request: pytest.FixtureRequest) -> None:
    """At every stage, in every way: in no later plan; no sequence, block, task, descriptor or thread is left."""
    site.held()
    prompt = {"prompt": "companion", "seed": 3}
    companion_starts(site, prompt)
    reference = companion_ends(site)
    companion_starts(site, prompt)
    one_round(site, num_readers=NUM_READERS)  # as large as the rounds that are counted: pools have their threads
    assert companion_ends(site) == reference
    before = at_rest(site)
    site.num_ends = site.num_late = 0
    companion_starts(site, prompt)
    for _ in range(NUM_ROUNDS):
        one_round(site, num_readers=NUM_READERS)
    assert companion_ends(site) == reference
    at_rest(site, most=before)
    assert set(site.rows()) == {("finished", "abandoned"), ("finished", "length")}
    assert site.num_ends == NUM_ROUNDS * len(STAGES) * NUM_READERS
    print(
        f"\nabrupt ends, {request.node.callspec.id}: {site.num_ends:,} ({NUM_ROUNDS * NUM_READERS:,} each: "
        f"{', '.join(STAGES)}; FIN, RST, half-close; WebSocket close, FIN, RST, half-close); plans made after the"
        f" engine received the cancel, which held one of them: {site.num_late}; left: 0 sequences, 0 blocks, 0 tasks, 0"
        " descriptors, 0 threads in both processes"
    )


def companion_starts(site: Site, prompt: dict[str, Any]) -> None:
    """Begin the answer that runs beside all others; the engine is held in its first step."""
    begun = site.engine.hold()
    site.companion, site.num_companion = site.ask(HttpClient, max_tokens=COMPANION_TOKENS, **prompt), 0
    (site.companion_id,) = site.engine.held(begun + 1)


def companion_ends(site: Site) -> str:
    """Hold the engine no longer; return the companion's text."""
    assert site.companion is not None
    site.engine.open()
    text = text_of(check_native(site.companion.read_all()))
    site.companion.socket.close()
    return text


def at_rest(site: Site, *, most: dict[str, int] | None = None) -> dict[str, int]:
    """Wait until ended answers are cleaned up, and no count is above `most`; return the counts.

    A thread or a descriptor may take time to end: the counts before may be one too high, never too low.
    """
    seen: dict[str, Any] = {}

    def is_quiet() -> bool:
        web, engine = site.held(), site.engine.state()
        seen["counts"] = {"web tasks": sum(web["tasks"].values()), "engine tasks": engine["tasks"]}
        for name, held in (("web", web), ("engine", held_by(site.engine.pid))):
            seen["counts"] |= {f"{name} descriptors": len(held["fds"]), f"{name} threads": held["threads"]}
        stats = engine["stats"]
        seen["left"] = {name: web[name] for name in ("streams", "readers", "generations")}
        seen["left"] |= {name: stats[name] for name in ("running", "waiting", "blocks_used")}
        seen["left"] |= {"asked": engine["open"], "connections": site.num_connections()}
        seen["left"] |= {"rows": sum(num for (state, _), num in site.rows().items() if state != "finished")}
        return not any(seen["left"].values()) and all(
            count <= (most or seen["counts"])[name] for name, count in seen["counts"].items()
        )

    until(is_quiet, lambda: f"not at rest: {seen}; before: {most}")
    counts: dict[str, int] = seen["counts"]
    return counts


def one_round(site: Site, *, num_readers: int) -> None:
    """So many readers leave at each stage."""
    for stage, reach in REACHED.items():
        leave(site, stage, reach(site, num_readers))
    leave_running(site, with_tokens(site, num_readers, 1, max_tokens=MANY_TOKENS))


def come(site: Site, num_readers: int, max_tokens: int = NUM_TOKENS) -> list[Leaver]:
    """So many requests at once, in each way in turn; half of the streams end on a disconnect, half are kept."""
    clients = []
    for number in range(num_readers):
        kind, leave_so = WAYS[number % len(WAYS)]
        on_disconnect = ("abort", "park")[number // len(WAYS) % 2]
        clients.append((leave_so, site.ask(kind, max_tokens=max_tokens, on_disconnect=on_disconnect)))
    return clients


def prefill(site: Site, num_readers: int, max_tokens: int = NUM_TOKENS) -> list[Leaver]:
    """All their prompts are in computation."""
    clients = come(site, num_readers, max_tokens)
    held = site.step()
    assert len(held) == num_readers + 1
    *_, plan = site.engine.plans(-1)
    assert sorted(num_tokens for _, num_tokens, _ in plan) == [1] + [20] * num_readers
    return clients


def with_tokens(site: Site, num_readers: int, num_tokens: int, max_tokens: int = NUM_TOKENS) -> list[Leaver]:
    """All readers have so many tokens; the next one is in computation."""
    clients = prefill(site, num_readers, max_tokens)
    assert len(site.step(num_tokens)) == num_readers + 1
    for _, client in clients:
        client.read_until(client.token, num_tokens)
        assert client.data.count(client.token) == num_tokens
    return clients


def first_token(site: Site, num_readers: int) -> list[Leaver]:
    return with_tokens(site, num_readers, 1)


def middle_and_queued(site: Site, num_readers: int) -> list[Leaver]:
    """Fill all seats and as many places in the queue; the readers in the seats have some tokens by then."""
    sitting = with_tokens(site, num_readers, NUM_MIDDLE - 2)
    others = come(site, NUM_READERS)
    held = site.step(2)
    assert len(held) == num_readers + 1 + NUM_READERS - num_readers
    for _, client in sitting:
        client.read_until(client.token, NUM_MIDDLE)
    return sitting + others


def last_token(site: Site, num_readers: int) -> list[Leaver]:
    """All readers have all their tokens but one, which is in computation."""
    return with_tokens(site, num_readers, NUM_TOKENS - 1)


REACHED: dict[str, Callable[[Site, int], list[Leaver]]] = {
    "prefill": prefill,
    "first token": first_token,
    "middle and queued": middle_and_queued,
    "last token": last_token,
}


def leave(site: Site, stage: str, clients: list[Leaver]) -> None:
    """All readers leave while the engine is held; see the top of this file."""
    (before,) = site.engine.plans(-1)
    assert len({chunk[0] for chunk in before}) >= 2
    for leave_so, client in clients:
        leave_so(client)
    until(lambda: site.held()["readers"] == 1, lambda: f"{stage}: not all are seen to leave: {site.held()}")
    witness = site.ask(HttpClient, max_tokens=1, seed=1)
    assert site.engine.plans(-1) == [before], "the engine was to be held until then"
    held = site.step()
    known = {site.companion_id, max(held)}  # the witness came last
    site.num_late += len(set(held) - known)
    assert len(held) == 2, f"{stage}: the next step holds {len(held) - 2} whose reader had left"
    assert site.step() == [site.companion_id]
    assert len(check_native(witness.read_all())) == 3
    stats, ((_, _, num_blocks),) = site.engine.state()["stats"], *site.engine.plans(-1)
    assert (stats["running"], stats["waiting"]) == (1, 0), stage
    assert stats["blocks_used"] <= num_blocks, f"{stage}: more than the companion's blocks are in use"
    for _, client in [*clients, (fin, witness)]:
        client.socket.close()
    assert site.engine.left() == [0] * len(clients), f"{stage}: the engine received not one cancel for each"
    over(site, clients)


def leave_running(site: Site, clients: list[Leaver]) -> None:
    """All readers leave while the engine takes its steps."""
    wanted = site.engine.run(NUM_FREE)
    for leave_so, client in clients:
        leave_so(client)
    until(lambda: site.held()["readers"] == 1, lambda: f"running on: not all are seen to leave: {site.held()}")
    until(lambda: site.engine.state()["open"] == 1, lambda: f"running on: {site.engine.state()}")
    for _, client in clients:
        client.socket.close()
    site.engine.held(wanted)  # possibly planned before the last of them had left
    site.num_companion += NUM_FREE
    assert len(site.step()) == 1
    counts = site.engine.left()
    assert len(counts) == len(clients)
    assert max(counts) <= MOST_PLANS, f"while running: later plans that hold sequences of left readers: {counts}"
    site.num_late += sum(counts)
    over(site, clients)


def over(site: Site, clients: list[Leaver]) -> None:
    """The companion has had all its tokens meanwhile."""
    site.num_ends += len(clients)
    assert site.companion is not None
    site.clients = [site.companion]
    site.companion.read_until(site.companion.token, site.num_companion)
