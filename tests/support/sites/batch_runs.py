"""Batches in tests: input files, a tenant's client, and a worker that runs what is queued."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import AsyncClient

from streamserve.web import site

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """Return a request as a line of an input file has it; without a body, a short chat."""
    body = body or {"messages": [{"role": "user", "content": f"say {custom_id}"}], "max_tokens": 4, "seed": 7}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    """Return lines as a file."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def without_worker() -> None:
    """Stop the worker that a site with a log in memory has in its process, for good."""
    site.get_site().work.ensure_worker().stop()


class Tenant:
    """A caller of the files and batches API, without a server."""

    def __init__(self, key: str) -> None:
        self.client = AsyncClient(raise_request_exception=True)
        self.headers = {"authorization": f"Bearer {key}"}

    async def upload(self, content: bytes, **fields: str) -> Any:
        """Return the response to an upload."""
        form = {"purpose": "batch", **fields, "file": SimpleUploadedFile("in.jsonl", content)}
        return await self.client.post("/v1/files", form, headers=self.headers)

    async def file(self, content: bytes) -> str:
        """Upload a file; return its id."""
        response = await self.upload(content)
        assert response.status_code == 200, response.content
        return str(response.json()["id"])

    async def get(self, path: str) -> Any:
        """Return the response to a GET."""
        return await self.client.get(path, headers=self.headers)

    async def delete(self, path: str) -> Any:
        """Return the response to a DELETE."""
        return await self.client.delete(path, headers=self.headers)

    async def post(self, path: str, body: Any) -> Any:
        """Return the response to a POST of JSON."""
        return await self.client.post(path, body, content_type="application/json", headers=self.headers)

    async def create(self, content: bytes, endpoint: str = CHAT, **fields: Any) -> Any:
        """Upload a file and create a batch of it, which waits for a worker of the test; return the response."""
        await without_worker()
        body = {"input_file_id": await self.file(content), "endpoint": endpoint, "completion_window": "24h", **fields}
        return await self.post("/v1/batches", body)

    async def run(self, content: bytes, endpoint: str = CHAT, **fields: Any) -> dict[str, Any]:
        """Create a batch, run it to its end, and return it."""
        created = await self.create(content, endpoint, **fields)
        assert created.status_code == 200, created.content
        return await self.until_ended(created.json()["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """Return the batch."""
        return dict((await self.get(f"/v1/batches/{batch_id}")).json())

    async def until_ended(self, batch_id: str) -> dict[str, Any]:
        """Have a worker run what is queued until the batch has ended; return the batch."""
        worker = site.get_site().work.new_worker(["batch"])
        running = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(60):
                while (found := await self.batch(batch_id))["status"] not in ENDED:
                    worker.wake()
                    await asyncio.sleep(0.01)
        finally:
            worker.stop()
            await running
        return found

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a file; none for None."""
        if file_id is None:
            return []
        response = await self.get(f"/v1/files/{file_id}/content")
        assert response.status_code == 200, response.content
        whole = b"".join([piece async for piece in response.streaming_content])
        return [json.loads(one) for one in whole.splitlines()]
