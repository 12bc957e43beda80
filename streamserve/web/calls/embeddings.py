"""`embed` and `aembed` of the Python API, which `streamserve` exports: docs/embeddings.md shows them.

A call goes the way of requests to `/v1/embeddings`: the same limits of a caller, the same model. It is as many requests
as its texts need, one after the other. The synchronous form runs on the loop of calls/background.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from streamserve.api.call import Caller
from streamserve.dialects.openai.embeddings import parse
from streamserve.protocol.embeddings import numbers_of
from streamserve.protocol.limits import Limits
from streamserve.web.calls import background
from streamserve.web.calls.answers import LazyAnswer
from streamserve.web.site import get_site


def embed(
    texts: str | Sequence[str], *, model: str = "", dimensions: int | None = None, **owner: Any
) -> list[list[float]]:
    """Return a vector for each text, from synchronous code. Blocks until they are there.

    `model`: of EMBEDDING_MODELS, "" for the first; `dimensions`: fewer than it has, where it was trained so. `owner` as
    in `complete`: `request`, `user` or `tenant`. Raises StreamserveError.
    """
    caller = LazyAnswer(**owner).caller("await aembed()")
    return background.run(lambda: _embed(caller, texts, model, dimensions), "await aembed()")


async def aembed(
    texts: str | Sequence[str], *, model: str = "", dimensions: int | None = None, **owner: Any
) -> list[list[float]]:
    """Do what `embed` does, from async code."""
    return await _embed(await LazyAnswer(**owner).acaller(), texts, model, dimensions)


async def _embed(caller: Caller, texts: str | Sequence[str], model: str, dimensions: int | None) -> list[list[float]]:
    answers = get_site().services.answers
    default = await answers.default_embedder(caller)
    vectors: list[list[float]] = []
    for part in _parts([texts] if isinstance(texts, str) else list(texts), answers.limits):
        body = {"input": part, "dimensions": dimensions, "model": model or None}
        asked = parse(body, answers.limits, default_model=default)
        embedded = await answers.embed(caller, asked.request)
        vectors += map(numbers_of, embedded.vectors)
    return vectors


def _parts(texts: list[str], limits: Limits) -> Iterator[list[str]]:
    """Yield the texts in parts that each are within the limits of a request; a text that is not is alone."""
    part: list[str] = []
    num_chars = 0
    for text in texts:
        num_chars += len(text)
        if part and (len(part) == limits.max_embedding_inputs or num_chars > limits.max_prompt_chars):
            yield part
            part, num_chars = [], len(text)
        part.append(text)
    if part:
        yield part
