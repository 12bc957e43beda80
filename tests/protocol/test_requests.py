"""Laws of stored requests: they come back equal, an older release can read them, or they are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from streamserve.protocol.errors import Refused, UnmetNeeds, headers_of, to_body
from streamserve.protocol.requests import (
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
    output_token_ids=((1,), (2, 3)),
    reader_tokens=(0, 0),
)
# A row that 0.1.0 writes: every field of its GenerateRequest, and no other.
FIELDS_OF_0_1_0 = {
    "model", "messages", "prompt", "prompt_token_ids", "sampling", "unset", "n", "chat_template_kwargs",
    "timeout_seconds", "latency_class", "tenant", "salt", "stream_id", "arrived_at", "output_token_ids",
    "first_token_at", "reader_tokens",
}  # fmt: skip


def kept(request: GenerateRequest = REQUEST, **changes: object) -> dict[str, Any]:
    """Return the request as a row has it, with other fields."""
    row: dict[str, Any] = json.loads(json.dumps(encode_request(request)))
    return {**row, **changes}


def test_a_request_comes_back_as_it_was_kept() -> None:
    """decode(encode(r)) == r, through JSON."""
    assert decode_request(kept()) == REQUEST


def test_a_request_without_needs_has_the_fields_of_0_1_0() -> None:
    """0.1.0 refuses a row with any other field, so during a rolling restart no row may have one."""
    assert set(kept()) == FIELDS_OF_0_1_0


def test_a_need_is_kept() -> None:
    """A request that needs something names it in its row, which 0.1.0 then refuses."""
    assert kept(GenerateRequest(model="m", prompt="a", needs=("grammar",)))["needs"] == ["grammar"]


def test_a_public_system_prompt_is_kept() -> None:
    """An answer that is continued elsewhere finds the blocks that it shares."""
    request = GenerateRequest(model="m", messages=(Message(role="user", content="a"),))
    assert decode_request(kept(with_system(request, "Be kind."))) == with_system(request, "Be kind.")


GUARDED = [
    ("tools", {"tools": (Tool(name="look_up", parameters={"type": "object"}),)}),
    ("tools", {"tool_choice": ToolChoice(mode="none")}),
    ("tools", {"parallel_tool_calls": False}),
    ("grammar", {"grammar": Grammar(kind="regex", value="[0-9]+")}),
    ("sampling", {"continue_final_message": True}),
    ("sampling", {"echo": True}),
    ("sampling", {"sampling": SamplingParams(logit_bias=((7, -2.5),))}),
    ("sampling", {"sampling": SamplingParams(allowed_token_ids=(1, 2))}),
    ("sampling", {"sampling": SamplingParams(bad_words=("no",))}),
    ("sampling", {"sampling": SamplingParams(include_stop=True)}),
    ("sampling", {"sampling": SamplingParams(prompt_logprobs=0)}),
]


@pytest.mark.parametrize(("need", "changes"), GUARDED)
def test_a_field_that_0_1_0_lacks_is_a_need(need: str, changes: dict[str, Any]) -> None:
    """0.1.0 must refuse the row, and this release gets back what was kept."""
    request = replace(GenerateRequest(model="m", prompt="a"), **changes)
    row = kept(request)
    assert row["needs"] == [need]
    assert decode_request(row) == replace(request, needs=(need,))


@pytest.mark.parametrize("changes", [{"needs": ["canvas"]}, {"needs": ["canvas", "brush"], "canvas": {"root": "x"}}])
def test_an_unknown_need_is_refused(changes: dict[str, object]) -> None:
    """The need is not dropped, with or without the field that it is about; a newer worker may serve the request."""
    with pytest.raises(UnmetNeeds, match=r"needs (brush, )?canvas") as caught:
        decode_request(kept(**changes))
    body = to_body(caught.value)
    assert (body.code, body.param, body.http_status) == ("unmet_needs", "needs", 503)
    assert headers_of(caught.value) == {"Retry-After": "1"}


def test_acceptance_refuses_an_unknown_need() -> None:
    """A request that crosses the engine's socket is checked too: it may come from a newer worker."""
    check_needs(REQUEST.needs)
    with pytest.raises(Refused, match="brush"):
        check_needs(("brush",))


@pytest.mark.parametrize(
    "value",
    [kept(n="2"), kept(mood="good"), kept(needs="canvas"), kept(needs=[1]), kept(needs=7), {"n": 1}, [], "x", None],
)
def test_what_is_no_request_is_a_value_error(value: object) -> None:
    """A wrong type, a missing field, or an unknown field that no need explains is no request."""
    with pytest.raises(ValueError, match=r".") as caught:
        decode_request(value)
    assert not isinstance(caught.value, UnmetNeeds)
