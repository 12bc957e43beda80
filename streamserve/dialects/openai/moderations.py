"""The OpenAI moderations dialect: `POST /v1/moderations` bodies in, a verdict on each text out. Pure.

Shapes as the official client's types have them (openai 3.52, `types/moderation.py`). That API's categories are always
there, with the site's own beside them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.fields import (
    Fields,
    Table,
    any_object,
    described,
    list_of,
    object_schema,
    one_of,
    read,
    schema_of,
    wrong_type,
    wrong_value,
)
from streamserve.dialects.generate import MODEL, prompt_text
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits

CATEGORIES = (
    "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm",
    "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic",
)  # fmt: skip
FLAGGED_FROM = 0.5  # of a category's score
_NAME = "site"  # of the model, where the caller names none

Scores = Mapping[str, float]  # of a text: category → 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModerationsBody:
    """A checked body: `texts` get a verdict each."""

    texts: tuple[str, ...]
    model: str


def parse(body: Mapping[str, Any], limits: Limits) -> ModerationsBody:
    """Check every field of a body; raise `BadRequest` naming the first wrong field."""
    values = read(body, body_fields(limits))
    return ModerationsBody(texts=values["input"], model=values.get("model", _NAME))


def body_fields(limits: Limits) -> Table:
    """Return the readers of a body's fields."""
    return Fields({"model": MODEL, "input": _input(limits)}, "input")


def _input(limits: Limits) -> Any:
    """Read a text, several, or the parts of one message, of which text is taken."""
    text = prompt_text(limits)
    table = Fields({"type": one_of("text"), "text": text}, "text")

    @described(lambda: object_schema(table))
    def part(value: Any, param: str) -> str:
        kind = any_object(value, param).get("type")
        if kind == "image_url":
            message = f"{param} is an image; texts are moderated here. Leave it out."
            raise BadRequest(message, code="unsupported_content", param=param)
        return str(read(value, table, prefix=f"{param}.")["text"])

    several, parts = (list_of(one, low=1, high=limits.max_embedding_inputs) for one in (text, part))

    @described(lambda: {"anyOf": [schema_of(text), schema_of(several), schema_of(parts)]})
    def reader(value: Any, param: str) -> tuple[str, ...]:
        if isinstance(value, str):
            return (text(value, param),)
        if not isinstance(value, list):
            wrong_type(value, param, "a string, an array of strings, or an array of parts")
        is_message = bool(value) and isinstance(value[0], dict)
        found: tuple[str, ...] = (parts if is_message else several)(value, param)
        if sum(map(len, found)) > limits.max_prompt_chars:
            wrong_value(param, f"has more than {limits.max_prompt_chars:,} characters in all")
        return ("\n".join(found),) if is_message else found

    return reader


def moderations_json(scores: Sequence[Scores], *, model: str) -> dict[str, Any]:
    """Return the body of a response."""
    return {"id": f"modr-{secrets.token_hex(12)}", "model": model, "results": [_result(one) for one in scores]}


def _result(scores: Scores) -> dict[str, Any]:
    whole = {**dict.fromkeys(CATEGORIES, 0.0), **scores}
    categories = {name: score >= FLAGGED_FROM for name, score in whole.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": whole,
        "category_applied_input_types": {name: ["text"] for name in whole},
    }
