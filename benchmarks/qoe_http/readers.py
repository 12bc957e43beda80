"""Readers over HTTP: each asks at its time, reads at its pace, and is scored as in the simulation.

acks    WebSocket with credit; acknowledges what it has read, every `ACK_SECONDS`
taken   SSE; takes all that comes at once, so that its position is all that was sent
vllm    the same at vLLM's /v1/completions
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from benchmarks.qoe_http.servers import MODEL, Server
from benchmarks.support.machine import progress
from streamserve.loadtest.reading import Reading
from streamserve.loadtest.site_http import Address, Broken, Refused, SiteHTTP
from streamserve.loadtest.visits import Visit

ACKS, TAKEN, VLLM = "acks", "taken", "vllm"
ACK_SECONDS = 0.25
_MAX_CREDIT = 1000


class ServerFault(Exception):
    """A server answered something else than 200, or a refusal by 429 or 503."""


class Prompts:
    """Prompts of an exact number of tokens: words that are one token each, drawn anew for every visit."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        words = [tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())]
        self._words = [
            word for word in words if word[:1] == " " and word[1:].isalpha() and len(tokenizer.encode(word).ids) == 1
        ]

    def text(self, visit: Visit, run: int) -> str:
        """Return the visit's prompt; another run has other words, so that no cache knows them."""
        return self.draw(visit.prompt_len, f"{run} {visit.number}")

    def draw(self, num_tokens: int, seed: str) -> str:
        """Return a prompt of so many tokens, the same for the same seed."""
        return "".join(random.Random(seed).choices(self._words, k=num_tokens))


@dataclass(frozen=True, slots=True)
class Run:
    """A workload under way: its beginning on the clock, its server and its prompts."""

    server: Server
    started_at: float
    prompts: Prompts
    number: int

    @property
    def now(self) -> float:
        """Seconds since the workload began."""
        return time.monotonic() - self.started_at

    def body(self, visit: Visit) -> dict[str, Any]:
        """Return the fields that every server knows."""
        return {
            "model": MODEL,
            "prompt": self.prompts.text(visit, self.number),
            "max_tokens": visit.answer_len,
            "temperature": 0.8,
            "seed": visit.number,
            "ignore_eos": True,
        }


async def read_all(
    server: Server, visits: Sequence[Visit], kind: str, prompts: Prompts, number: int, give_up_seconds: float
) -> list[Reading]:
    """Let every reader come at its time; return the readings when all have ended, or after `give_up_seconds`."""
    run = Run(server, time.monotonic() + 0.5, prompts, number)
    readings = [Reading(visit) for visit in visits]
    tasks = [asyncio.create_task(_read(run, reading, kind)) for reading in readings]
    _, late = await asyncio.wait(tasks, timeout=give_up_seconds)
    for task in late:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception) and not isinstance(result, OSError):
            raise result
    return readings


async def _read(run: Run, reading: Reading, kind: str) -> None:
    await asyncio.sleep(reading.visit.arrives_at - run.now)
    if kind == ACKS:
        await _read_websocket(run, reading)
        return
    try:
        if kind == VLLM:
            await _read_vllm(run, reading)
        else:
            async for data in post(run.server, "/streams", run.body(reading.visit) | _own_fields(reading.visit)):
                reading.take(run.now, len(data.get("token_ids", ())))
    except ServerFault as fault:  # another server's: its reader is not served. One of ours ends the benchmark
        if kind != VLLM or run.server.process.poll() is not None:
            raise
        progress(f"  {fault}")
    reading.is_whole = len(reading.came_at) == reading.visit.answer_len


async def _read_vllm(run: Run, reading: Reading) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async for data in post(run.server, "/v1/completions", run.body(reading.visit) | body):
        if "usage" not in data:  # each chunk has the usage so far; an error has none
            return
        reading.take(run.now, data["usage"]["completion_tokens"] - len(reading.came_at))


def _own_fields(visit: Visit) -> dict[str, Any]:
    """Return the fields of a request that only our site knows."""
    return {"latency_class": visit.latency_class, "on_disconnect": "abort"}


async def post(server: Server, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of each event that has an object; nothing after a refusal by 429 or 503.

    Raises ServerFault for another refusal, ConnectionError where there is no connection, or it breaks off.
    """
    site, rest = SiteHTTP(Address.parse(f"http://127.0.0.1:{server.port}")), b""
    try:
        async with site.open("POST", path, server.key, body) as answer:
            async for chunk in answer.chunks():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield json.loads(line[6:])
    except Refused as refused:
        if refused.status not in (429, 503):
            raise ServerFault(f"{path}: {refused.status} {refused}") from refused
    except Broken as broken:
        raise ConnectionError(str(broken)) from broken


async def _read_websocket(run: Run, reading: Reading) -> None:
    """Start over a WebSocket, and acknowledge what is read."""
    url, key = f"ws://127.0.0.1:{run.server.port}/ws/streams", {"Authorization": f"Bearer {run.server.key}"}
    request = run.body(reading.visit) | _own_fields(reading.visit)
    async with connect(url, additional_headers=key, compression=None, proxy=None, max_queue=None) as socket:
        await socket.send(json.dumps({"type": "start", "request": request, "credit": _MAX_CREDIT}))
        started = json.loads(await socket.recv())
        if started["type"] == "error":
            if started["error"]["code"] != "overloaded":
                raise RuntimeError(f"{started}")
            return
        seqs: list[tuple[int, int]] = []  # (event, tokens up to its end)
        acks = asyncio.create_task(_acknowledge(socket, started["id"], run, reading, seqs))
        try:
            async for frame in socket:
                message = json.loads(frame)
                if message.get("event") == "token":
                    reading.take(run.now, len(message["data"]["token_ids"]))
                    seqs.append((message["seq"], len(reading.came_at)))
                elif message.get("event") in ("done", "error"):
                    break
        finally:
            acks.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acks
    reading.is_whole = len(reading.came_at) == reading.visit.answer_len


async def _acknowledge(
    socket: ClientConnection, stream_id: str, run: Run, reading: Reading, seqs: list[tuple[int, int]]
) -> None:
    """Acknowledge the events that are read to their end, until cancelled."""
    num_acked = 0
    while True:
        await asyncio.sleep(ACK_SECONDS)
        num_read, num_before = reading.num_read(run.now), num_acked
        while num_acked < len(seqs) and seqs[num_acked][1] <= num_read:
            num_acked += 1
        if num_acked > num_before:
            await socket.send(json.dumps({"type": "ack", "id": stream_id, "seq": seqs[num_acked - 1][0]}))
