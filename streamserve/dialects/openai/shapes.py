"""Shapes that the OpenAI API's dialects share: errors, models, what names an answer, and `prompt_logprobs`. Pure.

    "prompt_logprobs": [null, {"464": {"logprob": -3.1, "rank": 2, "decoded_token": "The"}, "15": {…}}, …]

vLLM has added that field. One entry for each token of the prompt: the token itself, and the likeliest tokens at its
place. (Source: vLLM, `CompletionResponseChoice` and `Logprob`.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from streamserve import __version__
from streamserve.dialects.named import DescribedModel
from streamserve.protocol.errors import ErrorBody
from streamserve.protocol.events import INTERRUPT, PositionLogprobs

PROMPT_LOGPROBS = "prompt_logprobs"
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def head_json(completion_id: str, kind: str, created: int, model: str) -> dict[str, Any]:
    """Return the fields that every chunk and every whole answer begins with; `kind` is its `object`."""
    head = {"id": completion_id, "object": kind, "created": created, "model": model}
    return {**head, "system_fingerprint": fingerprint(model)}


def reason_of(finish_reason: str | None) -> str | None:
    """Return a finish reason in this API's words, which have none for a run that waits for its user."""
    return "stop" if finish_reason == INTERRUPT else finish_reason


@lru_cache(maxsize=64)
def fingerprint(model: str) -> str:
    """Return what names the software and the model of an answer: the same in every process of a release."""
    return "fp_" + hashlib.sha256(f"{__version__}/{model}".encode(errors="replace")).hexdigest()[:12]


def error_json(body: ErrorBody) -> dict[str, Any]:
    """Return the body of an error response, or of an error frame."""
    kind = _ERROR_TYPES.get(body.http_status, "invalid_request_error" if body.http_status < 500 else "server_error")
    return {"error": {"message": body.message, "type": kind, "param": body.param, "code": body.code}}


def models_json(models: Sequence[DescribedModel]) -> dict[str, Any]:
    """Return the body of `GET /v1/models`."""
    return {"object": "list", "data": [model_json(model) for model in models]}


def model_json(model: DescribedModel) -> dict[str, Any]:
    """Return the body of `GET /v1/models/{id}`."""
    out: dict[str, Any] = {
        "id": model.alias,
        "object": "model",
        "created": model.created,
        "owned_by": "streamserve",
    }
    if model.max_model_len:
        out["max_model_len"] = model.max_model_len
    if model.parent:
        out["parent"] = model.parent
    if model.dimensions:
        out |= {"kind": model.kind, "dimensions": model.dimensions}
    return out


def prompt_logprobs_json(positions: Iterable[PositionLogprobs]) -> list[dict[str, Any] | None]:
    """Return the entries. Nothing precedes the first token, which has none."""
    return [None if one.chosen.logprob is None else _entry(one) for one in positions]


def _entry(position: PositionLogprobs) -> dict[str, Any]:
    """Return the token of the prompt first. Its rank is known where it is among the likeliest, else it is null."""
    ranks = {candidate.token_id: rank for rank, candidate in enumerate(position.top, start=1)}
    found: dict[str, Any] = {}
    for one in (position.chosen, *position.top):
        known = {"logprob": one.as_json()["logprob"], "rank": ranks.get(one.token_id), "decoded_token": one.token}
        found.setdefault(str(one.token_id), known)
    return found
