"""Laws of stored requests: they come back equal, another release can read them, or they are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from streamserve.protocol.errors import Refused, UnmetNeeds, headers_of, to_body
from streamserve.protocol.requests import (
    NO_CALLER,
    Admission,
    GenerateRequest,
    Grammar,
    Message,
    SamplingParams,
    Tool,
    ToolChoice,
    check_needs,
    decode_request,
    encode_request,
    with_system,
)

REQUEST = GenerateRequest(
    model="m",
    messages=(Message(role="user", content="hi", extra={"tool_calls": [{"arguments": {"n": 10**23}}]}),),
    sampling=SamplingParams(stop=("a", "b"), seed=3),
    unset=("top_k",),
)
ADMISSION = Admission(owner="user:1", tenant="t", salt="s", stream_id="i", arrived_at=5.5)


def kept(request: GenerateRequest = REQUEST, **changes: object) -> dict[str, Any]:
    """Return the request as a row has it, with other fields."""
    row: dict[str, Any] = json.loads(json.dumps(encode_request(request, ADMISSION)))
    return {**row, "request": {**row["request"], **changes}}


def decoded(row: object) -> GenerateRequest:
    return decode_request(row, NO_CALLER)[0]


def test_a_request_comes_back_as_it_was_kept() -> None:
    """decode(encode(r)) == r, through JSON, and so does what its row has no column for."""
    request, admission = decode_request(kept(), replace(ADMISSION, salt="", arrived_at=None))
    assert (request, admission) == (REQUEST, ADMISSION)


def test_a_row_keeps_no_field_at_its_default() -> None:
    """A release that does not know a field reads the rows of requests that do not use it."""
    assert kept(GenerateRequest(model="m", prompt="a")) == {
        "request": {"model": "m", "prompt": "a"},
        "salt": "s",
        "arrived_at": 5.5,
    }
    assert kept(GenerateRequest(model="m", prompt="a", sampling=SamplingParams(top_k=3)))["request"]["sampling"] == {
        "top_k": 3
    }


def test_a_need_is_kept() -> None:
    """A request that needs something names it in its row, which a release without it then refuses."""
    assert kept(GenerateRequest(model="m", prompt="a", needs=("blocks",)))["request"]["needs"] == ["blocks"]


def test_a_public_system_prompt_is_kept() -> None:
    """An answer that is continued elsewhere finds the blocks that it shares."""
    request = GenerateRequest(model="m", messages=(Message(role="user", content="a"),))
    assert decoded(kept(with_system(request, "Be kind."))) == with_system(request, "Be kind.")


FIELDS = [
    {"tools": (Tool(name="look_up", parameters={"type": "object"}),)},
    {"tool_choice": ToolChoice(mode="none")},
    {"parallel_tool_calls": False},
    {"grammar": Grammar(kind="regex", value="[0-9]+")},
    {"continue_final_message": True},
    {"echo": True},
    {"sampling": SamplingParams(logit_bias=((7, -2.5),))},
    {"sampling": SamplingParams(allowed_token_ids=(1, 2))},
    {"sampling": SamplingParams(bad_words=("no",))},
    {"sampling": SamplingParams(include_stop=True)},
    {"sampling": SamplingParams(prompt_logprobs=0)},
]


@pytest.mark.parametrize("changes", FIELDS)
def test_a_field_that_is_used_comes_back(changes: dict[str, Any]) -> None:
    """Each field beyond a plain prompt's is kept and read."""
    request = replace(GenerateRequest(model="m", prompt="a"), **changes)
    row = kept(request)
    assert row["request"].keys() - {"model", "prompt"} == changes.keys()
    assert decoded(row) == request


@pytest.mark.parametrize(
    "changes",
    [
        {"needs": ["canvas"]},
        {"needs": ["canvas", "brush"], "canvas": {"root": "x"}},
        {"canvas": {"root": "x"}},
        {"sampling": {"canvas": 0.5}},
    ],
)
def test_an_unknown_need_is_refused(changes: dict[str, object]) -> None:
    """The need is not dropped, with or without the field that it is about; a newer process may serve the request."""
    with pytest.raises(UnmetNeeds, match=r"needs (brush, )?canvas") as caught:
        decoded(kept(**changes))
    body = to_body(caught.value)
    assert (body.code, body.param, body.http_status) == ("unmet_needs", "needs", 503)
    assert headers_of(caught.value) == {"Retry-After": "1"}


def test_acceptance_refuses_an_unknown_need() -> None:
    """A request that crosses the engine's socket is checked too: it may come from a newer process."""
    check_needs(REQUEST.needs)
    with pytest.raises(Refused, match="brush"):
        check_needs(("brush",))


@pytest.mark.parametrize(
    "value",
    [kept(n="2"), kept(needs="canvas"), kept(needs=[1]), kept(needs=7), {"request": {"n": 1}}, {"n": 1}, [], "x", None],
)
def test_what_is_no_request_is_a_value_error(value: object) -> None:
    """A wrong type or a missing field is no request."""
    with pytest.raises(ValueError, match=r".") as caught:
        decoded(value)
    assert not isinstance(caught.value, UnmetNeeds)
