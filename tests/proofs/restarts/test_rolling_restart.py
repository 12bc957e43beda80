"""Two workers behind nginx and their engine are restarted, one after the other, again and again, while they are used.

STREAMSERVE_OTHER_TREE=DIR builds two wheels, of the checkout in DIR and of this one, and installs each in a venv of its
own. The restarts alternate between the two, on one database and one log.

Workers and nginx: no request may fail, none is sent twice, and no stream ends early. A stream that outlasts the drain
is ended between two events, and its reader resumes, as every reader of ours does. Engine: while there is none, new
requests wait for the next one, and begun answers continue there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from streamserve.keys import MADE
from tests.proofs.scale import scaled
from tests.support.checks.stream_checks import Frame, check_native_part, text_of
from tests.support.docs.demo_site import ROOT, environment, manage, processes_of
from tests.support.docs.deploy_units import ENGINE, WEB, command_of
from tests.support.docs.installed_site import Site, install
from tests.support.servers.nginx_server import nginx
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import Server, wait_until_listening, wait_until_ready

pytestmark = [pytest.mark.timeout(3600)]

OTHER_TREE = os.environ.get("STREAMSERVE_OTHER_TREE", "")
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.workers.rolling_site"}
NUM_ROUNDS = scaled(20, least=2)  # even: with two versions, the last restart goes back
# In one round of four there are answers that outlast a drain, which then takes its whole time.
LONG_EVERY = 4
SECONDS = 120.0
RESTART_SECONDS = 1.0  # RestartSec of the engine's unit
NUM_QUESTIONS = 5
SHORT, MIDDLE, LONG = 15, 60, 600  # tokens: 0.3 s, 1.2 s, 12 s; a drain is 6 s


class Program:
    """A process of the site by the command of its systemd unit; it restarts at the same place."""

    def __init__(self, folder: Path, log: Path, unit: Path, instance: str) -> None:
        self._unit, self._instance, self.log = unit, instance, log
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, version: Site) -> None:
        env = environment(self._folder, DJANGO_SETTINGS_MODULE=version.settings("rolling_site"))
        command = command_of(self._unit, self._instance, version.python)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=version.folder, env=env, stdout=log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        """Send SIGTERM, as systemd does, and check its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS) == 0, self.log.read_text()[-3000:]

    def stop_now(self) -> None:
        """Send a second SIGTERM after a second, which may come when the process has nearly ended."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS) in {0, -signal.SIGTERM}, self.log.read_text()[-3000:]

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Engine(Program):
    """The engine, which the unit's `Restart=always` starts again whenever it ends, of the version that is installed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "engine.txt", ENGINE, "echo")
        self.version = Site(folder=ROOT)
        self.num_starts = 0
        self._is_over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)

    def begin(self, version: Site) -> None:
        self.version = version
        self.start(version)
        self._supervisor.start()

    def start(self, version: Site) -> None:
        super().start(version)
        self.num_starts += 1

    def _supervise(self) -> None:
        while not self._is_over.wait(0.1):
            assert self.process is not None
            if self.process.poll() is not None and not self._is_over.wait(RESTART_SECONDS):
                self.start(self.version)

    def wait_for_start(self, num_starts: int) -> None:
        """Wait until it has started so often."""
        deadline = time.monotonic() + SECONDS
        while self.num_starts < num_starts:
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def end(self) -> None:
        """Stop the supervisor, and kill what runs."""
        self._is_over.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        self.kill()


class Deployment:
    """nginx, two workers, one engine. An upgrade replaces `version` on disk before anything restarts."""

    def __init__(self, versions: list[Site], folder: Path) -> None:
        self.workers: dict[int, Program] = {}
        for port in (free_port(), free_port()):
            self.workers[port] = Program(folder, folder / f"web-{port}.txt", WEB, str(port))
        self.engine = Engine(folder)
        self.url = self.key = ""
        self._versions = itertools.cycle(versions)
        self._version = self._first = next(self._versions)

    def start(self) -> None:
        self.engine.begin(self._version)
        for port in self.workers:
            self._start_worker(port)

    def _start_worker(self, port: int) -> None:
        worker = self.workers[port]
        worker.start(self._version)
        assert worker.process is not None
        wait_until_listening(Server(port, worker.process, worker.log))
        wait_until_ready(f"http://127.0.0.1:{port}")

    def restart(self, round_: int, before_stop: Callable[[int], None]) -> None:
        """One after the other: worker, worker, engine; each is waited for before the next. Engine first to go back.

        `before_stop` gets the port of each worker before its signal.
        """
        before, self._version = self._version, next(self._versions)
        self.engine.version = self._version
        is_going_back = before is not self._version and self._version is self._first
        if is_going_back:
            self._restart_engine(round_)
        for port, worker in self.workers.items():
            before_stop(port)
            worker.stop()
            self._start_worker(port)
        if not is_going_back:
            self._restart_engine(round_)

    def _restart_engine(self, round_: int) -> None:
        """Send one signal: running answers end first. Or two: it ends now, and they continue at the next engine."""
        num_starts = self.engine.num_starts
        (self.engine.stop_now if round_ % 2 == 0 else self.engine.stop)()
        self.engine.wait_for_start(num_starts + 1)
        for port in self.workers:
            wait_until_ready(f"http://127.0.0.1:{port}")

    def end(self) -> None:
        for worker in self.workers.values():
            worker.kill()
        self.engine.end()


@pytest.fixture
def site(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    versions = [Site(folder=ROOT)]
    if OTHER_TREE:
        versions = [install(tree, tmp_path_factory.mktemp("version")) for tree in (Path(OTHER_TREE), ROOT)]
    site = Deployment(versions, tmp_path)
    for arguments in (["migrate", "--verbosity=0"], ["streamserve_key", "create"]):
        done = manage(tmp_path, *arguments, **SETTINGS)
        assert done.returncode == 0, done.stderr
    site.key = next(MADE.finditer(done.stdout)).group()
    try:
        site.start()
        with nginx(list(site.workers)) as site.url:
            yield site
    finally:
        site.end()
        assert processes_of(tmp_path) == set()


class Load:
    """Users of the site during the restarts. Each answer is compared with the undisturbed site's."""

    def __init__(self, url: str, key: str) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._outlasting: list[asyncio.Task[None]] = []
        self.is_over = self.is_long = False
        self.round = 0
        self._url = url
        self._expected: dict[tuple[str, int], str] = {}
        headers = {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=SECONDS, limits=limits, trust_env=False)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, limits=limits),
        )

    async def aclose(self) -> None:
        await self._http.aclose()
        await self._openai.close()

    async def learn(self) -> None:
        """Request every answer once without disturbance."""
        answers: dict[tuple[str, int], Awaitable[str]] = {}
        for number in range(NUM_QUESTIONS):
            answers["middle", number] = self._native(number, MIDDLE)
            answers["long", number] = self._native(number, LONG)
            answers["openai", number] = self._chat(number)
        self._expected = dict(zip(answers, await asyncio.gather(*answers.values()), strict=True))
        assert not self.failures
        assert all(self._expected.values())
        self.counts.clear()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Use the site in all ways until the block ends; then wait for all answers to end."""
        works: list[Callable[[int], Awaitable[None]]] = [
            *[self._ask_native] * 6,
            *[self._ask_openai] * 3,
            self._ask_whole,
        ]
        works += [self._ask_long] * 2
        tasks = [asyncio.create_task(self._repeat(work, first)) for first, work in enumerate(works)]
        try:
            yield
        finally:
            self.is_over = True
            results = await asyncio.gather(*tasks, *self._outlasting, return_exceptions=True)
        for result in results:
            if result is not None:
                raise result

    async def _repeat(self, work: Callable[[int], Awaitable[None]], first: int) -> None:
        for number in itertools.count(first):
            if self.is_over:
                return
            await self._attempt(work.__name__, work(number % NUM_QUESTIONS))

    async def _attempt(self, name: str, work: Awaitable[None]) -> None:
        try:
            await work
        except (httpx.HTTPError, openai.OpenAIError, AssertionError) as error:
            self.failures.append(f"round {self.round}: {name}: {type(error).__name__}: {error}"[:2000])

    def _check(self, name: str, number: int, text: str) -> None:
        self.counts[name] += 1
        if text != self._expected[name, number]:
            self.failures.append(f"{name} {number}: {text!r} instead of {self._expected[name, number]!r}")

    async def _ask_native(self, number: int) -> None:
        self._check("middle", number, await self._native(number, MIDDLE))

    async def _ask_long(self, number: int) -> None:
        if self.is_long:
            self._check("long", number, await self._native(number, LONG))
        else:
            await asyncio.sleep(0.1)

    async def outlast(self, port: int) -> None:
        """Begin an answer at the worker on `port`, longer than a drain; return when its first bytes have come."""
        has_begun = asyncio.Event()
        task = asyncio.create_task(self._attempt("outlast", self._ask_outlasting(port, has_begun)))
        task.add_done_callback(lambda _: has_begun.set())
        self._outlasting.append(task)
        await has_begun.wait()

    async def _ask_outlasting(self, port: int, has_begun: asyncio.Event) -> None:
        self._check("long", 0, await self._native(0, LONG, f"http://127.0.0.1:{port}", has_begun))

    async def _ask_openai(self, number: int) -> None:
        self._check("openai", number, await self._chat(number))

    async def _ask_whole(self, number: int) -> None:
        """Not streamed, and a small question between."""
        answer = await self._openai.chat.completions.create(**_question(number))
        self._check("openai", number, str(answer.choices[0].message.content))
        (await self._http.get("/v1/models")).raise_for_status()
        self.counts["small questions"] += 1

    async def _chat(self, number: int) -> str:
        """Read one answer with the official client: whole within a drain, or it has failed."""
        chunks = [chunk async for chunk in await self._openai.chat.completions.create(**_question(number), stream=True)]
        assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
        assert chunks[-1].choices[0].finish_reason == "length"
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def _native(
        self, number: int, num_tokens: int, server: str = "", has_begun: asyncio.Event | None = None
    ) -> str:
        """Read one answer as our page does: a POST, and after a cut GETs with Last-Event-ID.

        The POST goes to `server` ("": nginx), and sets `has_begun` with its first bytes.
        """
        question = {"prompt": f"question {number}", "max_tokens": num_tokens, "ignore_eos": True, "seed": number}
        stream_id, frames = await self._begin(f"{server}/streams", question, has_begun or asyncio.Event())
        while frames[-1].event not in {"done", "error"}:
            self.counts["resumed"] += 1
            frames += await self._go_on(stream_id, frames[-1])
        assert frames[-1].event == "done", frames[-1]
        assert sum(frame.event in {"done", "error"} for frame in frames) == 1
        return text_of(frames)

    async def _begin(self, url: str, question: dict[str, Any], has_begun: asyncio.Event) -> tuple[str, list[Frame]]:
        data = b""
        async with self._http.stream("POST", url, json=question) as response:
            response.raise_for_status()
            async for piece in response.aiter_bytes():
                data += piece
                has_begun.set()
        frames = check_native_part(data)
        assert frames, "an end before the first event"
        return response.headers["x-stream-id"], frames

    async def _go_on(self, stream_id: str, last: Frame) -> list[Frame]:
        response = await self._http.get(f"/streams/{stream_id}/events", headers={"Last-Event-ID": last.id})
        response.raise_for_status()
        assert response.headers["streamserve-from"] == str(last.seq + 1)
        return check_native_part(response.content, after=last.seq)


def _question(number: int) -> dict[str, Any]:
    message = {"role": "user", "content": f"question {number}"}
    return {
        "model": "echo",
        "messages": [message],
        "max_tokens": SHORT,
        "seed": number,
        "extra_body": {"ignore_eos": True},
    }


async def test_rolling_restarts_fail_no_request(site: Deployment) -> None:
    """Every request is answered, every answer is whole and the expected one, and every process ends with 0."""
    load = Load(site.url, site.key)
    await load.learn()
    loop = asyncio.get_running_loop()

    def outlast_in_long_rounds(port: int) -> None:
        if load.is_long:
            asyncio.run_coroutine_threadsafe(load.outlast(port), loop).result(SECONDS)

    async with load.running():
        for round_ in range(NUM_ROUNDS):
            load.round, load.is_long = round_, round_ % LONG_EVERY == 0
            before = load.counts.total()
            await asyncio.to_thread(site.restart, round_, outlast_in_long_rounds)
            assert load.counts.total() > before, "the load has come to a stand"
    await load.aclose()
    print(f"\n{NUM_ROUNDS} restarts of two workers and the engine: {dict(load.counts)}; {len(load.failures)} failures")
    print(*Counter(load.failures).most_common(20), sep="\n")
    assert load.failures == []
    assert load.counts["resumed"] > 0, "no answer outlasted a drain: nothing was tried of that"
