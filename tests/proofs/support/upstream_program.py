"""A server of an OpenAI-compatible model, as a process that starts at once: `python upstream_program.py PORT`.

The question "50 12 x" is answered by twelve thoughts and fifty words, the words numbered from 0. A partial answer in
the last message is continued after its last whole word. Standard library only; it prints its port when it listens.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]}
WORD_SECONDS = 0.002


def words_of(question: str) -> tuple[list[str], list[str]]:
    """Return the thoughts and the words of the answer to a question."""
    num_words, num_thoughts, _ = question.split(" ", 2)
    thoughts = [f"t{number} " for number in range(int(num_thoughts))]
    return thoughts, [f"w{number} " for number in range(int(num_words))]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(value: Any) -> bytes:
    return _chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = next((line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length")), "0")
            body = await reader.readexactly(int(length))
            if head.startswith("get"):
                writer.write(HEAD % b"application/json" + _chunk(json.dumps(MODELS).encode()) + b"0\r\n\r\n")
            else:
                await _answer(json.loads(body), writer)
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    thoughts, words = words_of(body["messages"][0]["content"])
    last = body["messages"][-1]
    num_shown = len(last["content"].split()) if last["role"] == "assistant" else 0
    writer.write(HEAD % b"text/event-stream")
    deltas = [] if num_shown else [{"reasoning_content": one} for one in thoughts]
    for delta in (*deltas, *({"content": word} for word in words[num_shown:])):
        writer.write(_event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
        await writer.drain()
        await asyncio.sleep(WORD_SECONDS)
    writer.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    usage = {"prompt_tokens": 5, "completion_tokens": len(words) - num_shown}
    writer.write(_event({"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def _main(port: int) -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
