"""`GET /openapi.json`. asyncio; framework-free.

The document is for anyone, as the docs are; what names the site's own pipelines is shown to the callers that may use
them. It is as long as a chat page's script, and made once for what a site serves and a caller may use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import ANONYMOUS, Call, Endpoint, Reply
from streamserve.api.openapi.document import Described, document, text_of
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.protocol.errors import Refused
from streamserve.protocol.limits import Limits

_CACHED = {"Cache-Control": "private, no-cache", "Vary": "Authorization, Cookie, X-Api-Key"}
_MOST_KEPT = 8  # documents: of callers who may use different pipelines


def endpoint_of(routes: Callable[[], Sequence[Described]], converters: Mapping[str, str]) -> Endpoint:
    """Return the endpoint that shows a table of routes, of which it is a row itself."""

    @lru_cache(maxsize=_MOST_KEPT)
    def encoded(
        served: frozenset[str], limits: Limits, root: str, pipelines: tuple[PipelineClient, ...]
    ) -> tuple[bytes, str]:
        """Return the document's bytes, and their ETag."""
        shown = document(
            routes(),
            converters=converters,
            served=served,
            limits=limits,
            root=root,
            pipelines={one.alias: one.pipeline for one in pipelines},
        )
        body = text_of(shown).encode()
        return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'

    async def openapi_json(
        call: Call,
        answers: Answers,
        attachments: Any = None,
        batches: Any = None,
        chats: Any = None,
        conversations: Any = None,
        files: Any = None,
        jobs: Any = None,
        mcp_endpoint: Any = None,
        moderator: Any = None,
        ops: Any = None,
        responses: Any = None,
        shares: Any = None,
        threads: Any = None,
        usage: Any = None,
        watches: Any = None,
    ) -> Reply:
        """GET /openapi.json: what this site serves, as an OpenAPI document, with the pipelines that the caller may use.

        With its ETag in If-None-Match: 304 while the document is the same.
        """
        given = locals()
        served = frozenset(name for name, one in given.items() if one is not None)
        pipelines = () if call.caller is ANONYMOUS else tuple((await _pipelines_of(call, answers)).values())
        root = call.path.removesuffix("openapi.json")
        body, etag = encoded(served, answers.limits, root, pipelines)
        if etag in [one.strip().removeprefix("W/") for one in call.headers.get("if-none-match", "").split(",")]:
            return Reply(status=304, headers={"ETag": etag, **_CACHED})
        return Reply(body=body, headers={"Content-Type": "application/json", "ETag": etag, **_CACHED})

    return openapi_json


async def _pipelines_of(call: Call, answers: Answers) -> Mapping[str, PipelineClient]:
    """Return the pipelines that the caller may use; none where the site cannot say."""
    try:
        return await answers.pipelines_of(call.caller)
    except Refused:
        return {}
