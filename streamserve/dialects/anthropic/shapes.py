"""Errors and models in the Messages API's shapes (anthropic 2.12, `types/shared/error_response.py`, `model_info.py`).

Beside the fields of the public API an error has our `code` and `param`; `details.error_code` is the code again, where
the official client looks for it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from streamserve.dialects.openai.chat import DescribesModel
from streamserve.protocol.errors import BadRequest, ErrorBody

VERSION_HEADER = "anthropic-version"
# By status; any other below 500 is the request's fault, any above the server's.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MOST_ON_A_PAGE, _ON_A_PAGE = 1000, 20


def error_json(body: ErrorBody) -> dict[str, Any]:
    """Return the body of an error response, or the data of an `error` event."""
    kind = _ERROR_TYPES.get(body.http_status, "invalid_request_error" if body.http_status < 500 else "api_error")
    error = {
        "type": kind,
        "message": body.message,
        "code": body.code,
        "param": body.param,
        "details": {"error_code": body.code},
    }
    return {"type": "error", "error": error, "request_id": body.request_id or None}


def model_json(model: DescribesModel) -> dict[str, Any]:
    """Return the body of `GET /v1/models/{id}`. A model that is not loaded yet is of 1970, as there."""
    return {
        "type": "model",
        "id": model.alias,
        "display_name": model.alias,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len or None,
    }


def models_json(models: Sequence[DescribesModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of `GET /v1/models`: `limit` of them, after `after_id` or before `before_id`."""
    return page_json([model_json(model) for model in models], query)


def page_json(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of `items` that the query names; an id that is not there is refused."""
    limit = limit_of(query)
    ids = [item["id"] for item in items]
    if "before_id" in query:
        end = _place(query["before_id"], ids, "before_id")
        begin = max(0, end - limit)
        has_more = begin > 0
    else:
        begin = _place(query["after_id"], ids, "after_id") + 1 if "after_id" in query else 0
        end = min(begin + limit, len(items))
        has_more = end < len(items)
    shown = list(items[begin:end])
    edges = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"data": shown, "has_more": has_more, **edges}


def limit_of(query: Mapping[str, str]) -> int:
    """Return how many items a query asks for."""
    text = query.get("limit", str(_ON_A_PAGE))
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= _MOST_ON_A_PAGE):
        message = f"'limit' is a number from 1 to {_MOST_ON_A_PAGE:,}."
        raise BadRequest(message, code="invalid_value", param="limit")
    return int(text)


def _place(id_: str, ids: Sequence[str], param: str) -> int:
    if id_ not in ids:
        raise BadRequest(f"'{param}' is the id of nothing in this list.", code="invalid_value", param=param)
    return ids.index(id_)
