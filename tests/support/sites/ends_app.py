"""The demo site with GET /held: the streams, readers, tasks, descriptors and threads of this process.

The first GET /held fills the thread pools, so that its numbers can be compared with later ones.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

from project.asgi import application
from streamserve.asgi.types import Receive, Scope, Send
from streamserve.clients.process.client import ProcessClient
from streamserve.web import site
from tests.proofs.support.gated_engine import held_by
from tests.support.streams.log_threads import begun

_POOL_THREADS = 64  # more than asyncio's own pool ever has


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer /held for the process, and pass every other request to the site."""
    if scope["type"] == "http" and scope["path"] == "/held":
        body = json.dumps(await _held()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return
    await application(scope, receive, send)


async def _held() -> dict[str, Any]:
    if site._site is None:
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(_POOL_THREADS)))
    await begun()
    streams = site.get_site().streams.all()
    links = [client._link for client in site.get_site().clients.values() if isinstance(client, ProcessClient)]
    sessions = [link.session for link in links if link.session is not None]
    tasks = (task.get_name().split(" ")[0].rstrip("0123456789") for task in asyncio.all_tasks())
    return {
        "readers": sum(stream.readers.num_attached for stream in streams),
        "streams": len(streams),
        "live": sum(stream.is_live for stream in streams),
        "generations": sum(len(session.sources) + len(session._questions) for session in sessions),
        "tasks": Counter(tasks),
        **held_by("self"),
    }
