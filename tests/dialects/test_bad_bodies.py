"""Every body of the corpus gets exactly its error, and no JSON causes an exception outside the tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects import native
from streamserve.dialects.generate import request_fields, sampling_fields
from streamserve.dialects.openai import request as openai_request
from streamserve.dialects.openai.request import body_fields
from streamserve.protocol.errors import PromptTooLong, StreamserveError
from streamserve.protocol.json_body import decode_json
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest
from tests.support.bodies.bad_bodies import bad_bodies
from tests.support.bodies.bad_fields import NATIVE, OPENAI, BadBody

LIMITS = Limits()
PARSE: dict[str, Callable[..., Any]] = {NATIVE: native.parse, OPENAI: openai_request.parse}
CORPUS = bad_bodies()


def parse(dialect: str, body: bytes) -> GenerateRequest:
    """Return the request that `body` becomes."""
    return PARSE[dialect](decode_json(body, LIMITS), LIMITS, default_model="echo").generate


def wrong_in(dialect: str, bad: BadBody) -> str | None:
    """Return what is wrong with the error that a body earns."""
    try:
        parse(dialect, bad.body)
    except StreamserveError as error:
        if (error.http_status, error.code, error.param) != (bad.status, bad.code, bad.param):
            return f"{error.http_status} {error.code} {error.param}, not {bad.status} {bad.code} {bad.param}"
        if not (10 < len(error.message) < 500 and error.message.endswith(".")):
            return f"the message is no short sentence: {error.message[:600]}"
        if (bad.code == "context_length_exceeded") != isinstance(error, PromptTooLong):
            return f"it is a {type(error).__name__}"
        return None
    return "it is accepted"


@pytest.mark.parametrize("dialect", PARSE)
def test_a_bad_body_earns_its_error(dialect: str):
    """Status, code and param are the corpus's; the message is a short sentence."""
    bodies = [bad for bad in CORPUS if bad.is_for(dialect) and not bad.by_server]
    wrong = {bad.name: fault for bad in bodies if (fault := wrong_in(dialect, bad)) is not None}
    assert wrong == {}


def test_the_corpus_is_large_and_names_are_unique():
    """At least 250 distinct bodies for either dialect."""
    names = [bad.name for bad in CORPUS]
    assert sorted(set(names)) == sorted(names)
    for dialect in PARSE:
        bodies = [(bad.body, bad.content_type) for bad in CORPUS if bad.is_for(dialect)]
        assert len(bodies) == len(set(bodies)) >= 250


@pytest.mark.parametrize("bad", [bad for bad in CORPUS if bad.by_server], ids=lambda bad: bad.name)
def test_what_the_server_judges_is_otherwise_right(bad: BadBody):
    """The dialects accept these bodies; only the model, or the content type, is wrong."""
    for dialect in PARSE:
        assert parse(dialect, bad.body).messages


FIELDS = sorted({*body_fields(LIMITS), "format", "on_disconnect"})
WORDS = st.sampled_from(["user", "text", "low", "auto", "none"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | WORDS
KEYS = st.text() | st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
        optional={"content": VALUES, "tool_calls": VALUES, "name": VALUES, "reasoning_content": VALUES},
    ),
    max_size=4,
)


@pytest.mark.parametrize("dialect", PARSE)
@given(body=st.dictionaries(st.sampled_from(FIELDS) | st.text(), VALUES), messages=st.none() | MESSAGES)
def test_no_object_raises_anything_but_ours(dialect: str, body: dict[str, Any], messages: list[Any] | None):
    """Whatever the fields are, the result is a request or a `StreamserveError`."""
    if messages is not None:
        body["messages"] = messages
    try:
        asked = PARSE[dialect](body, LIMITS, default_model="echo")
    except StreamserveError:
        return
    given = [asked.generate.messages is not None, asked.generate.prompt is not None]
    assert sum(given) == 1 or ("input" in body and not any(given))  # a pipeline may be asked with an object alone


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(), st.text()))
def test_no_query_raises_anything_but_ours(query: dict[str, str]):
    """Whatever a query of `GET /streams/new` is, the result is a request or a `StreamserveError`."""
    with contextlib.suppress(StreamserveError):
        native.parse_query(query, LIMITS, default_model="echo")


def test_every_field_is_in_the_corpus():
    """The corpus has a body for each field of the tables."""
    params = {bad.param for bad in CORPUS}
    exempt = {"cache_control", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort"}
    missing = {*sampling_fields(LIMITS), *request_fields(LIMITS), *body_fields(LIMITS)} - params - exempt
    assert not missing
