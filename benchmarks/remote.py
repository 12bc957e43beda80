"""The remote client beside direct calls of the same server, in turns: time to the first token, delay and CPU per token.

    python -m benchmarks.remote [--streams 1,16,64] [--tokens 200] [--rounds 5]

The server is a process of its own that computes nothing: it writes each token as one chunk of a chat completion, at
once ("flood") or 20 ms apart ("paced"), with the time of writing as its text. So the delay of a token is the client's
alone. Contenders: httpx with its own line decoder and `json`, the official openai client, and our `RemoteClient`. CPU
is this process's. Medians over the rounds, and the 95th percentile of the delays. Nothing here needs Django.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from benchmarks.support.machine import describe_machine, parser, progress
from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.protocol.events import Done, Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams

GAP_SECONDS = 0.02
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'{"data": [{"id": "paced", "owned_by": "vllm"}, {"id": "flood", "owned_by": "vllm"}]}'
_QUESTION = "What is the price?"


@dataclass(slots=True)
class Run:
    """One round of one contender. Seconds."""

    first: float
    delays: list[float]
    cpu_per_token: float
    tokens_per_second: float


Contender = Callable[[str, int], AsyncIterator[str]]


def main() -> None:
    options = _parser().parse_args()
    if options.serve:
        asyncio.run(_serve())
        return
    print(describe_machine())
    asyncio.run(_measure(options))


def _parser() -> argparse.ArgumentParser:
    out = parser(__doc__)
    out.add_argument("--streams", default="1,16,64", help="answers at a time")
    out.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    out.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    out.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return out


async def _measure(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "benchmarks.remote", "--serve"]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(await server.stdout.readline())}/v1"
    client = RemoteClient(RemoteConfig(alias="paced", url=url, max_concurrent=256))
    sdk = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    try:
        async with httpx.AsyncClient(timeout=60) as http:
            contenders: dict[str, Contender] = {
                "httpx and json": lambda mode, num: _by_httpx(http, url, mode, num),
                "openai client": lambda mode, num: _by_openai(sdk, mode, num),
                "RemoteClient": lambda mode, num: _by_us(client, mode, num),
            }
            print("\n| server | streams | client | first token | delay p50 | p95 | CPU a token | tokens/s |")
            print("|---|---|---|---|---|---|---|---|")
            for mode, num_streams in itertools.product(("paced", "flood"), map(int, options.streams.split(","))):
                await _compare(contenders, mode, num_streams, options)
    finally:
        await client.aclose()
        await sdk.close()
        server.terminate()
        await server.wait()


async def _compare(contenders: dict[str, Contender], mode: str, num_streams: int, options: argparse.Namespace) -> None:
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for number in range(options.rounds + 1):
        for name, contender in contenders.items():
            progress(f"{mode}, {num_streams} streams, round {number}, {name}")
            run = await _run(contender, mode, num_streams, options.tokens)
            if number:  # the first warms up
                runs[name].append(run)
    for name, rounds in runs.items():
        delays = sorted(delay for run in rounds for delay in run.delays)
        p50, p95 = delays[len(delays) // 2], delays[len(delays) * 95 // 100]
        first = statistics.median(run.first for run in rounds)
        cpu = statistics.median(run.cpu_per_token for run in rounds)
        speed = statistics.median(run.tokens_per_second for run in rounds)
        print(
            f"| {mode} | {num_streams} | {name} | {1e3 * first:.1f} ms | {1e3 * p50:.2f} ms | {1e3 * p95:.2f} ms | "
            f"{1e6 * cpu:.0f} us | {speed:,.0f} |"
        )


async def _run(contender: Contender, mode: str, num_streams: int, num_tokens: int) -> Run:
    began, cpu = time.monotonic(), time.process_time()
    answers = await asyncio.gather(*(_read(contender, mode, num_tokens) for _ in range(num_streams)))
    cpu, seconds = time.process_time() - cpu, time.monotonic() - began
    total = sum(len(delays) for _, delays in answers)
    assert total == num_streams * num_tokens, total
    return Run(
        first=statistics.median(first for first, _ in answers),
        delays=[delay for _, delays in answers for delay in delays],
        cpu_per_token=cpu / total,
        tokens_per_second=total / seconds,
    )


async def _read(contender: Contender, mode: str, num_tokens: int) -> tuple[float, list[float]]:
    """Return the time to the first token, and the delay of each after it was written."""
    began, first, delays = time.monotonic(), 0.0, []
    async for text in contender(mode, num_tokens):
        now = time.monotonic()
        first = first or now - began
        delays.append(now - float(text))
    return first, delays


async def _by_httpx(http: httpx.AsyncClient, url: str, mode: str, num_tokens: int) -> AsyncIterator[str]:
    async with http.stream("POST", f"{url}/chat/completions", json=_body(mode, num_tokens)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]


async def _by_openai(sdk: openai.AsyncOpenAI, mode: str, num_tokens: int) -> AsyncIterator[str]:
    async for chunk in await sdk.chat.completions.create(**_body(mode, num_tokens)):
        for choice in chunk.choices:
            if choice.delta.content:
                yield choice.delta.content


async def _by_us(client: RemoteClient, mode: str, num_tokens: int) -> AsyncIterator[str]:
    sampling = SamplingParams(max_tokens=num_tokens, stop=(mode,))
    request = GenerateRequest(model="paced", messages=(Message(role="user", content=_QUESTION),), sampling=sampling)
    async for event in await client.generate(request):
        if isinstance(event, Token):
            yield event.text
        elif not isinstance(event, Done):
            raise RuntimeError(event)


def _body(mode: str, num_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": _QUESTION}]
    return {"model": "paced", "messages": messages, "stream": True, "max_tokens": num_tokens, "stop": [mode]}


async def _serve() -> None:
    """Be the server, and print its port. `stop` names the mode, as every contender can send it."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0])) if lengths else b""
            if head.startswith(b"GET"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS)
                )
            else:
                await _stream(json.loads(body), writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _stream(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(_HEAD)
    for _ in range(body["max_tokens"]):
        _write(writer, {"index": 0, "delta": {"content": f"{time.monotonic():.6f}"}, "finish_reason": None})
        await writer.drain()
        await asyncio.sleep(GAP_SECONDS if body["stop"] == ["paced"] else 0)
    _write(writer, {"index": 0, "delta": {}, "finish_reason": "length"})
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await writer.drain()


def _write(writer: asyncio.StreamWriter, choice: dict[str, Any]) -> None:
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


if __name__ == "__main__":
    main()
