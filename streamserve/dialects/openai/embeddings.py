"""The OpenAI embeddings dialect: `POST /v1/embeddings` bodies in, a list of vectors out. Pure.

Shapes as the official client's types have them (openai 3.52, `types/create_embedding_response.py`). That client asks
for `encoding_format: "base64"` unless it is told otherwise.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from streamserve.dialects.fields import Fields, Table, integer, one_of, read
from streamserve.dialects.generate import MODEL, prompts
from streamserve.dialects.openai.body import IGNORED
from streamserve.protocol.embeddings import Embedded, EmbedRequest, numbers_of
from streamserve.protocol.limits import Limits

_MOST_DIMENSIONS = 65_536
FLOAT, BASE64 = "float", "base64"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsBody:
    """A checked body."""

    request: EmbedRequest
    encoding_format: str


def parse(body: Mapping[str, Any], limits: Limits, *, default_model: str) -> EmbeddingsBody:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, body_fields(limits))
    request = EmbedRequest(
        model=values.get("model", default_model),
        inputs=values["input"],
        dimensions=values.get("dimensions"),
    )
    return EmbeddingsBody(request=request, encoding_format=values.get("encoding_format", FLOAT))


def body_fields(limits: Limits) -> Table:
    """Return the readers of a body's fields."""
    own = {
        "model": MODEL,
        "input": prompts(limits, most=limits.max_embedding_inputs),
        "dimensions": integer(1, _MOST_DIMENSIONS),
        "encoding_format": one_of(FLOAT, BASE64),
    }
    return Fields({**own, **IGNORED}, "input")


def embeddings_json(embedded: Embedded, *, model: str, encoding_format: str) -> bytes:
    """Return the response's JSON. Of many vectors this takes a while: not on the event loop."""
    show = _as_base64 if encoding_format == BASE64 else numbers_of
    data = [
        {"object": "embedding", "index": index, "embedding": show(vector)}
        for index, vector in enumerate(embedded.vectors)
    ]
    usage = {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
