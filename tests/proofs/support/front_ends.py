"""How a client of each front end asks, resumes after a cut, and puts what it read together.

A `FrontEnd` knows one dialect's requests and frames; `FrontEndReader` reads one answer with it, at any web process, and
resumes only where its client would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.proofs.support.workers import SECONDS, client
from tests.support.checks.stream_checks import Frame, parse_sse


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a client."""

    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)


class FrontEnd:
    """One dialect, from its client's side."""

    name = ""
    model = "echo"
    needs_preparation = False
    most_frames = 40  # of an answer, about

    async def prepare(self, http: httpx.AsyncClient, number: int) -> dict[str, str]:
        """Return what later requests of that answer need."""
        return {}

    def ask(self, number: int, kept: Mapping[str, str]) -> Request:
        """Return the request that starts the answer."""
        raise NotImplementedError

    def resume(self, reader: FrontEndReader) -> Request:
        """Return the request for the rest; by default with the id of the last frame."""
        raise NotImplementedError

    def text_of(self, frames: list[Frame]) -> str:
        """Return the text of the frames."""
        raise NotImplementedError

    def is_end(self, frame: Frame) -> bool:
        """Return whether a frame is the answer's end."""
        raise NotImplementedError

    def read(self, frames: list[Frame]) -> list[Frame]:
        """Return what a client has of the frames of a connection that may have broken."""
        return frames

    def place_of(self, frame: Frame) -> tuple[int, int] | None:
        """Return where a frame stands in the answer, None for a frame without a place: places rise."""
        return frame.place if frame.id else None


class Mcp(FrontEnd):
    """`tools/call` in a session of MCP 2025-11-25."""

    name, model, needs_preparation, most_frames = "mcp", "audit", True, 4

    async def prepare(self, http: httpx.AsyncClient, number: int) -> dict[str, str]:
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        response = (await http.post("/mcp", json=body)).raise_for_status()
        return {"mcp-session-id": response.headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}

    def ask(self, number: int, kept: Mapping[str, str]) -> Request:
        params = {
            "name": self.model,
            "arguments": {"question": f"question {number}"},
            "_meta": {"progressToken": number},
        }
        body = {"jsonrpc": "2.0", "id": f"call {number}", "method": "tools/call", "params": params}
        headers = {**kept, "accept": "application/json, text/event-stream"}
        return Request(method="POST", path="/mcp", body=body, headers=headers)

    def resume(self, reader: FrontEndReader) -> Request:
        headers = {**reader.kept, "accept": "text/event-stream", "last-event-id": reader.last_id}
        return Request(method="GET", path="/mcp", headers=headers)

    def text_of(self, frames: list[Frame]) -> str:
        return str(json.loads(frames[-1].data)["result"]["content"][0]["text"])

    def is_end(self, frame: Frame) -> bool:
        return '"result"' in frame.data

    def place_of(self, frame: Frame) -> tuple[int, int] | None:
        number = frame.id.partition(":")[0].rpartition("-")[2]
        return (int(number), 0) if number else None


class AiSdk(FrontEnd):
    """`useChat` of the AI SDK, with `resumeStreamIsReplay: false`."""

    name = "ai-sdk"

    def ask(self, number: int, kept: Mapping[str, str]) -> Request:
        question = {"id": "q", "role": "user", "parts": [{"type": "text", "text": f"question {number}"}]}
        body = {"id": f"chat-{number}", "messages": [question], "trigger": "submit-message", **LONG}
        return Request(method="POST", path="/ai/chat", body=body, headers=key_of(self, number))

    def resume(self, reader: FrontEndReader) -> Request:
        headers = {"last-event-id": reader.last_id}
        return Request(method="GET", path=f"/ai/chat/chat-{reader.number}/stream", headers=headers)

    def text_of(self, frames: list[Frame]) -> str:
        chunks = [frame.json for frame in frames if frame.data != "[DONE]"]
        assert [one["type"] for one in chunks].count("start") == 1
        assert chunks[-1]["type"] == "finish", chunks[-1]
        return "".join(one["delta"] for one in chunks if one["type"] == "text-delta")

    def is_end(self, frame: Frame) -> bool:
        return frame.data == "[DONE]"


class AgUi(FrontEnd):
    """AG-UI: the same run is asked for again, with the id of the last event."""

    name = "ag-ui"

    def ask(self, number: int, kept: Mapping[str, str]) -> Request:
        fields = {name: value for name, value in LONG.items() if name != "model"}
        body = {
            "threadId": f"thread-{number}",
            "runId": "run",
            "messages": [{"id": "q", "role": "user", "content": f"question {number}"}],
            "forwardedProps": fields,
        }
        return Request(method="POST", path=f"/ag-ui/{self.model}", body=body)

    def resume(self, reader: FrontEndReader) -> Request:
        return replace(self.ask(reader.number, reader.kept), headers={"last-event-id": reader.last_id})

    def text_of(self, frames: list[Frame]) -> str:
        events = [frame.json for frame in frames]
        assert [one["type"] for one in events].count("RUN_STARTED") == 1
        assert events[-1]["type"] == "RUN_FINISHED", events[-1]
        return "".join(one["delta"] for one in events if one["type"] == "TEXT_MESSAGE_CONTENT")

    def is_end(self, frame: Frame) -> bool:
        return frame.json["type"] in ("RUN_FINISHED", "RUN_ERROR")


class Responses(FrontEnd):
    """OpenAI's Responses: a client resumes by `starting_after`."""

    name = "responses"

    def ask(self, number: int, kept: Mapping[str, str]) -> Request:
        fields = {"seed": 3, "ignore_eos": True, "max_output_tokens": LONG["max_tokens"], "stream": True}
        body = {"model": self.model, "input": f"question {number}", **fields}
        return Request(method="POST", path="/v1/responses", body=body, headers=key_of(self, number))

    def resume(self, reader: FrontEndReader) -> Request:
        query = {"stream": "true", "starting_after": str(reader.last_place[0])}
        return Request(method="GET", path=f"/v1/responses/resp_{reader.id}", query=query)

    def text_of(self, frames: list[Frame]) -> str:
        events = [frame.json for frame in frames if frame.data != "[DONE]"]
        assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
        text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
        (whole,) = [one["text"] for one in events if one["type"] == "response.output_text.done"]
        assert whole == text
        return text

    def is_end(self, frame: Frame) -> bool:
        return frame.data == "[DONE]"

    def place_of(self, frame: Frame) -> tuple[int, int] | None:
        return None if frame.data == "[DONE]" else (frame.json["sequence_number"], 0)


class DurableStreams(FrontEnd):
    """A reader of `/streams/{id}/log` by SSE: it has what stands before a `control`, and resumes at its offset."""

    name, needs_preparation = "durable-streams", True

    async def prepare(self, http: httpx.AsyncClient, number: int) -> dict[str, str]:
        """Start the answer; its own events are left."""
        body = {"prompt": f"question {number}", "on_disconnect": "park", **LONG}
        async with http.stream("POST", "/streams", json=body, headers=key_of(self, number)) as response:
            return {"id": response.headers["x-stream-id"]} if response.status_code == 200 else {}

    def ask(self, number: int, kept: Mapping[str, str]) -> Request:
        return Request(method="GET", path=f"/streams/{kept['id']}/log", query={"live": "sse", "offset": "-1"})

    def resume(self, reader: FrontEndReader) -> Request:
        offset = next(one for one in reversed(reader.frames) if one.event == "control").json["streamNextOffset"]
        return Request(method="GET", path=f"/streams/{reader.id}/log", query={"live": "sse", "offset": offset})

    def read(self, frames: list[Frame]) -> list[Frame]:
        while frames and frames[-1].event != "control":
            frames = frames[:-1]
        return frames

    def text_of(self, frames: list[Frame]) -> str:
        items = [item for frame in frames if frame.event == "data" for item in json.loads(frame.data)]
        assert [item["seq"] for item in items] == list(range(1, len(items) + 1))
        assert items[-1]["type"] == "done", items[-1]
        return "".join(item["data"]["text"] for item in items if item["type"] == "token")

    def is_end(self, frame: Frame) -> bool:
        return frame.event == "control" and bool(frame.json.get("streamClosed"))

    def place_of(self, frame: Frame) -> tuple[int, int] | None:
        return (json.loads(frame.data)[-1]["seq"], 0) if frame.event == "data" else None


LONG = {"model": "echo", "max_tokens": 60, "ignore_eos": True, "seed": 3}


def key_of(front_end: FrontEnd, number: int) -> dict[str, str]:
    """Return the header by which a request that was cut before its response is sent again."""
    return {"idempotency-key": f"{front_end.name}-{number}"}


class FrontEndReader:
    """Reads one answer, at any address, and has each frame once."""

    def __init__(self, front_end: FrontEnd, number: int) -> None:
        self.front_end, self.number = front_end, number
        self.id = self.last_id = ""
        self.last_place: tuple[int, int] | None = None
        self.kept: dict[str, str] = {}
        self.frames: list[Frame] = []
        self.num_frames = self.num_cuts = 0  # frames: so far, also of the present connection

    @property
    def is_over(self) -> bool:
        return any(map(self.front_end.is_end, self.frames))

    async def begin(self, url: str) -> None:
        """Ask, and read until the end, or until the connection breaks."""
        with contextlib.suppress(httpx.TransportError):
            async with client(url) as http:
                self.kept = await self.front_end.prepare(http, self.number)
        self.id = self.kept.get("id", self.id)
        if self.kept or not self.front_end.needs_preparation:
            await self._read(url, self.front_end.ask(self.number, self.kept))

    async def to_the_end(self, url: str) -> None:
        """Resume as often as needed."""
        async with asyncio.timeout(SECONDS):
            while not self.is_over:
                if self.last_id or self.last_place is not None:
                    await self._read(url, self.front_end.resume(self))
                else:
                    await self.begin(url)

    async def seen(self, num_frames: int) -> None:
        """Wait until so many frames have come, or the answer is over."""
        async with asyncio.timeout(SECONDS):
            while self.num_frames < num_frames and not self.is_over:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def _read(self, url: str, request: Request) -> None:
        data = bytearray()
        with contextlib.suppress(httpx.TransportError):
            asked = {"json": request.body} if request.body is not None else {}
            async with (
                client(url) as http,
                http.stream(
                    request.method, request.path, headers=dict(request.headers), params=dict(request.query), **asked
                ) as response,
            ):
                if response.status_code in (409, 503):  # the log, or the engine, is away for a moment
                    await asyncio.sleep(0.2)
                    return
                assert response.status_code == 200, (response.status_code, await response.aread(), request)
                self.id = response.headers.get("x-stream-id", self.id)
                async for piece in response.aiter_bytes():
                    data += piece
                    self.num_frames += piece.count(b"\ndata: ")
        got = self.front_end.read(parse_sse(bytes(data)))
        self.frames += got
        self.last_id = next((one.id for one in reversed(got) if one.id), self.last_id)
        for frame in got:
            self.last_place = self.front_end.place_of(frame) or self.last_place
        self.num_cuts += not self.is_over


FRONT_ENDS: tuple[FrontEnd, ...] = (AiSdk(), AgUi(), Responses(), DurableStreams(), Mcp())
