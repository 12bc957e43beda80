"""Images, audio and files of a message: passed on as they came where the operator says so, else refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from streamserve.clients.remote.body import body_of, check_parts
from streamserve.clients.remote.config import SERVERS, RemoteConfig
from streamserve.dialects.native import parse
from streamserve.protocol.errors import BadRequest, UnmetNeeds
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import NO_CALLER, START, Admission, GenerateRequest, decode_request, encode_request
from tests.support.engines.clients import serving

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
FILE = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="}}
TEXT = {"type": "text", "text": "What is this?"}
TAKES = RemoteConfig(alias="m", url="http://x/v1", content_parts=("image_url", "file"))


def asked(*parts: dict[str, Any]) -> GenerateRequest:
    body = {"messages": [{"role": "user", "content": [*parts]}]}
    return parse(body, Limits(), default_model="echo").generate


def test_parts_are_passed_on_as_they_came() -> None:
    """In their order, with the text between them."""
    request = asked(TEXT, IMAGE, FILE)
    check_parts(request, TAKES)
    _, out = body_of(request, START, "m", "vllm", SERVERS["vllm"])
    assert out["messages"] == [{"role": "user", "content": [TEXT, IMAGE, FILE]}]
    assert request.messages is not None
    assert request.messages[0].content == "What is this?"


def test_text_in_parts_stays_text() -> None:
    """No server need know parts for it."""
    _, out = body_of(asked(TEXT, TEXT), START, "m", "vllm", SERVERS["vllm"])
    assert out["messages"] == [{"role": "user", "content": "What is this?\nWhat is this?"}]


@pytest.mark.parametrize(
    ("part", "config", "param"),
    [
        (IMAGE, replace(TAKES, content_parts=()), ""),
        (FILE, replace(TAKES, content_parts=("image_url",)), ""),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, TAKES, ""),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}, TAKES, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, replace(TAKES, part_addresses=True),
         ".image_url.url"),
        ({"type": "file", "file": {"file_id": "file-1"}}, TAKES, ".file.file_id"),
        ({"type": "file", "file": {"filename": "a.pdf"}}, TAKES, ".file.file_data"),
        ({"type": "image_url"}, TAKES, ".image_url"),
        ({"type": "image_url", "image_url": "data:,"}, TAKES, ".image_url"),
        ({"type": "image_url", "image_url": {"url": 1}}, TAKES, ".image_url"),
    ],
)  # fmt: skip
def test_what_a_model_does_not_take_is_refused(part: dict[str, Any], config: RemoteConfig, param: str) -> None:
    """By its place: a kind that is not named in the settings, an address, another's file, a part that is malformed."""
    with pytest.raises(BadRequest) as refused:
        check_parts(asked(TEXT, part), config)
    assert refused.value.param == f"messages[0].content[1]{param}"


def test_addresses_pass_where_the_operator_says_so() -> None:
    """The model's server fetches them; this site does not."""
    part = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    check_parts(asked(part), replace(TAKES, part_addresses=True))


async def test_a_local_model_takes_text_only() -> None:
    """Refused at the door, by the part's place."""
    async with serving() as client:
        with pytest.raises(BadRequest, match="image_url") as refused:
            await client.generate(asked(TEXT, IMAGE))
    assert (refused.value.code, refused.value.param) == ("unsupported_content", "messages[0].content[1]")


def test_a_release_without_parts_does_not_continue_such_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the answer to another question."""
    admission = Admission(owner="a", tenant="a")
    kept = json.loads(json.dumps(encode_request(asked(TEXT, IMAGE), admission)))
    found, _ = decode_request(kept, NO_CALLER)
    assert found.messages is not None
    assert found.messages[0].parts == (TEXT, IMAGE)
    monkeypatch.setattr("streamserve.protocol.requests.KNOWN_NEEDS", frozenset())
    with pytest.raises(UnmetNeeds):
        decode_request(kept, NO_CALLER)
