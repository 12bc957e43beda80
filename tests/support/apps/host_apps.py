"""A Starlette and a FastAPI app that use engine and streams, for real servers: mounted, by an endpoint, handed over.

/ai/…                       `streamserve.asgi.app`, mounted; its lifespan is the host's
GET /ask?prompt=…           an endpoint of the host's own, which returns a StreamResponse
GET /handed?prompt=…        the same by hand-over, where StreamMiddleware is outside (`starlette_wrapped`)
GET /broken                 a stream of the host's own that fails in the middle
GET /control?allow=3 | ?open=1, /state    the gate of the engine, what there is as JSON
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from streamserve.asgi import Caller, anyone, app
from streamserve.asgi.for_starlette import StreamResponse, error_response
from streamserve.asgi.handover import hand_over
from streamserve.asgi.middleware import StreamMiddleware
from streamserve.clients.factory import echo_client
from streamserve.dialects.native import NativeEncoder
from streamserve.engine.config import EngineConfig
from streamserve.protocol.errors import BadRequest, StreamserveError
from streamserve.protocol.requests import GenerateRequest, SamplingParams
from streamserve.streams.reader.delivery import Delivery
from tests.support.streams.hand_made import Gate

GATE = Gate()
CLIENT = echo_client(config=EngineConfig(check_integrity=True), on_plan=GATE)
ai = app(models={"echo": CLIENT}, authenticate=anyone, prompt_in_url=True)


@asynccontextmanager
async def lifespan(host: Any) -> AsyncIterator[None]:
    async with ai:
        yield
    print(f"CLOSED {CLIENT.describe().state} {len(ai_tasks())}", flush=True)


def ai_tasks() -> list[str]:
    """Return the names of the library's tasks."""
    ours = ("delivery", "stream ", "whole", "event stream")
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(ours)]


async def answer(prompt: str) -> Delivery:
    if not prompt:
        raise BadRequest("Ask something.", param="prompt")
    asked = GenerateRequest(
        model="echo", prompt=prompt, sampling=SamplingParams(max_tokens=90, seed=1, ignore_eos=True)
    )
    stream = await ai.start_stream(Caller("anon:anyone"), asked)
    return Delivery(ai.streams, stream, NativeEncoder(stream.log_id))


async def ask(request: Request) -> Response:
    return StreamResponse(await answer(request.query_params.get("prompt", "")), headers={"set-cookie": "a=1"})


async def handed(request: Request) -> Response:
    return Response(headers=hand_over(await answer(request.query_params["prompt"])))


async def broken(request: Request) -> Response:
    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            raise RuntimeError("failed on purpose")
        finally:
            print("FINALLY broken", flush=True)

    return StreamingResponse(events(), media_type="text/event-stream")


async def control(request: Request) -> Response:
    if "open" in request.query_params:
        GATE.open()
    else:
        GATE.allow(int(request.query_params["allow"]))
    return JSONResponse({})


async def state(request: Request) -> Response:
    return JSONResponse(
        {
            "is_holding": GATE.is_holding,
            "plans": [[chunk.seq_id for chunk in plan.chunks] for plan in GATE.plans],
            "stats": asdict(CLIENT.stats()),
            "streams": [{"id": one.id, "state": one.state} for one in ai.streams.all()],
            "tasks": ai_tasks(),
        }
    )


ROUTES = {"/ask": ask, "/handed": handed, "/broken": broken, "/control": control, "/state": state}

starlette = Starlette(
    routes=[*(Route(path, endpoint) for path, endpoint in ROUTES.items()), Mount("/ai", ai)],
    exception_handlers={StreamserveError: error_response},
    lifespan=lifespan,
)
starlette_wrapped = StreamMiddleware(starlette, harden=True)

fastapi = FastAPI(lifespan=lifespan, exception_handlers={StreamserveError: error_response})
fastapi.mount("/ai", ai)


@fastapi.get("/ask")
async def fastapi_ask(prompt: str = "") -> Response:
    return StreamResponse(await answer(prompt), headers={"set-cookie": "a=1"})


for path, endpoint in ROUTES.items():
    if path != "/ask":
        fastapi.add_route(path, endpoint)
