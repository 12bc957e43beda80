"""Laws of webhooks: each job's end reaches its receiver, signed, over any failure; only targets of the settings do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from streamserve.conf import Webhook, read
from streamserve.models import Job, WebhookDelivery
from streamserve.rows import orm
from streamserve.streams.lease.liveness import Liveness
from streamserve.work.queue import RetryPolicy
from streamserve.work.webhooks import webhook_kind
from streamserve.work.worker import Worker
from tests.conftest import until

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = bytes(range(32))
JOB = "a" * 32
TRACEPARENT = f"00-{'b' * 32}-{'c' * 16}-01"


class Receiver:
    """A real HTTP server on loopback, which answers with the next of `statuses`, then 204."""

    def __init__(self, statuses: list[int]) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(statuses.pop(0) if statuses else 204)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?a=1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def statuses() -> list[int]:
    return []


@pytest.fixture
def receiver(statuses: list[int]) -> Iterator[Receiver]:
    receiver = Receiver(statuses)
    yield receiver
    receiver.close()
    orm.close()


def ended(webhook: str = "billing") -> None:
    Job.objects.create(
        id=JOB, stream_id=JOB, pipeline="p", owner="o", tenant="t", webhook=webhook, traceparent=TRACEPARENT
    )
    assert Job.objects.end(JOB, "done", fence=0, result=json.dumps({"text": "Hi"}))


async def delivered(url: str, folder: Path, *, timeout_seconds: float = 5.0) -> WebhookDelivery:
    """Run a worker until the message has come to its end; return its row."""
    target = Webhook(name="billing", url=url, secret=SECRET, timeout_seconds=timeout_seconds)
    kind = webhook_kind({"billing": target}, retry=RetryPolicy(max_attempts=3, first_seconds=0.0))
    worker = Worker([kind], Liveness(folder))
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        while not (row := await orm.call(WebhookDelivery.objects.get)).is_finished:
            worker.wake()
            await asyncio.sleep(0.01)
    worker.stop()
    await running
    return row


async def test_a_jobs_end_is_posted_and_signed(receiver: Receiver, tmp_path: Path) -> None:
    """Id, timestamp and body are under the signature, as Standard Webhooks has it."""
    await orm.call(ended)
    row = await delivered(receiver.url, tmp_path)
    ((headers, body),) = receiver.got
    message = json.loads(body)
    assert (message["type"], message["data"]["job_id"], message["data"]["result"]) == ("job.done", JOB, {"text": "Hi"})
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    wanted = base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{wanted}"
    assert headers["traceparent"] == TRACEPARENT
    assert (row.state, row.attempts, row.pk) == ("done", 1, headers["webhook-id"])


async def test_a_failing_receiver_gets_it_again(receiver: Receiver, statuses: list[int], tmp_path: Path) -> None:
    """An error and a redirect are no success: the same message comes until one is, under its own id."""
    statuses += [500, 302]
    await orm.call(ended)
    row = await delivered(receiver.url, tmp_path)
    assert (row.state, row.attempts) == ("done", 3)
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len({body for _, body in receiver.got}) == 1
    assert len(receiver.got) == 3


@pytest.mark.parametrize(("given", "attempts"), [([500] * 9, 3), ([410], 1)])
async def test_it_ends_as_a_dead_letter(
    receiver: Receiver, statuses: list[int], tmp_path: Path, given: list[int], attempts: int
) -> None:
    """After the last attempt; at once where the receiver says that it is gone."""
    statuses += given
    await orm.call(ended)
    row = await delivered(receiver.url, tmp_path)
    assert (row.state, row.attempts, row.error_code) == ("failed", attempts, "webhook_refused")


async def test_a_receiver_that_is_away_is_tried_again(receiver: Receiver, tmp_path: Path) -> None:
    """A refused connection counts as a failed attempt."""
    await orm.call(ended)
    row = await delivered("http://127.0.0.1:9/", tmp_path)
    assert (row.state, row.attempts, row.error_code) == ("failed", 3, "webhook_unreachable")


class Dripper:
    """Sends its headers byte by byte and comes to no end, until the other side hangs up."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self.num_left = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
                    while not self._is_closed.wait(0.02):
                        connection.sendall(b"x")
            except (BrokenPipeError, ConnectionResetError):
                self.num_left += 1
            except OSError:
                return

    def close(self) -> None:
        self._is_closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


async def test_a_receiver_that_never_ends_its_answer_is_left(tmp_path: Path) -> None:
    """TIMEOUT_SECONDS is that of the whole answer, not of each byte; no thread stays behind."""
    await orm.call(ended)
    dripper = Dripper()
    try:
        row = await delivered(dripper.url, tmp_path, timeout_seconds=0.2)
        await until(lambda: dripper.num_left == 3)
        await until(lambda: not any(one.name == "webhook billing" for one in threading.enumerate()))
    finally:
        dripper.close()
    assert (row.state, row.attempts, row.error_code) == ("failed", 3, "webhook_unreachable")


async def test_a_target_that_left_the_settings_gets_nothing(receiver: Receiver, tmp_path: Path) -> None:
    """Its messages are dead letters."""
    await orm.call(ended, "other")
    row = await delivered(receiver.url, tmp_path)
    assert (row.state, row.attempts, row.error_code, receiver.got) == ("failed", 1, "webhook_not_found", [])


def test_one_message_for_one_end() -> None:
    """A second end of the job changes nothing, and a job without a webhook has no message."""
    ended()
    assert not Job.objects.end(JOB, "failed", fence=0)
    assert WebhookDelivery.objects.count() == 1
    Job.objects.create(id="b" * 32, stream_id="b" * 32, pipeline="p", owner="o", tenant="t")
    assert Job.objects.end("b" * 32, "done", fence=0)
    assert WebhookDelivery.objects.count() == 1


@pytest.mark.parametrize(
    "target",
    [
        {},
        {"URL": "ftp://x.org/", "SECRET": "whsec_" + base64.b64encode(SECRET).decode()},
        {"URL": "https://x.org:99999/", "SECRET": "whsec_" + base64.b64encode(SECRET).decode()},
        {"URL": "https://[::1/", "SECRET": "whsec_" + base64.b64encode(SECRET).decode()},
        {"URL": "https://x.org/", "SECRET": "whsec_" + base64.b64encode(SECRET).decode(), "TIMEOUT_SECONDS": 0},
        {"URL": "https://x.org/", "SECRET": "not-a-good-one"},
        {"URL": "https://x.org/", "SECRET": "whsec_c2hvcnQ="},
        {"URL": "https://x.org/", "SECRET": "whsec_" + base64.b64encode(SECRET).decode(), "RETRIES": 3},
    ],
)
def test_wrong_targets_are_found_by_check(target: dict[str, Any]) -> None:
    """Without an address, a secret of 24 bytes, or with an unknown key; the secret itself is in no message."""
    _, problems = read({"MODELS": {"echo": {"PATH": "echo"}}, "WEBHOOKS": {"billing": target}}, base_dir="/tmp")
    assert len(problems) == 1
    assert 'STREAMSERVE["WEBHOOKS"]["billing"]' in problems[0].message
    assert str(target.get("SECRET")) not in problems[0].message + problems[0].hint


def test_a_right_target_is_read() -> None:
    """Its secret is the bytes after the prefix, and it is not in its repr."""
    secret = "whsec_" + base64.b64encode(SECRET).decode()
    raw = {"MODELS": {"echo": {"PATH": "echo"}}, "WEBHOOKS": {"billing": {"URL": "https://x.org/a", "SECRET": secret}}}
    settings, problems = read(raw, base_dir="/tmp")
    assert problems == ()
    assert settings.webhooks["billing"].secret == SECRET
    assert repr(SECRET) not in repr(settings)
