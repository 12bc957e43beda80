"""The endpoint of `/v1/embeddings`. asyncio; framework-free.

It has no stream: a vector is computed anew in less time than it would take to read it from a log, and is the same.
"""

from __future__ import annotations

import asyncio
from functools import partial

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply
from streamserve.dialects.openai import embeddings as dialect


async def embeddings(call: Call, answers: Answers) -> Reply:
    """POST /v1/embeddings: a vector for each text."""
    body = await call.json(answers.limits)
    asked = dialect.parse(body, answers.limits, default_model=await answers.default_embedder(call.caller))
    embedded = await call.wait(
        answers.embed(call.caller, asked.request, received_at=call.received_at, trace=call.trace)
    )
    show = partial(dialect.embeddings_json, model=asked.request.model, encoding_format=asked.encoding_format)
    shown = await asyncio.to_thread(show, embedded)
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    return Reply(body=shown, headers=headers, rates=embedded.rates)
