"""Laws of RunAgentInput: what a model and a pipeline get of it."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.dialects.ag_ui.request import RunRequest, parse
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Approved

CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"q":"x"}'}}
STREAM_ID = "0" * 32


def parsed(*messages: dict[str, Any], is_pipeline: bool = False, **fields: Any) -> RunRequest:
    body = {"threadId": "t1", "runId": "r1", "messages": list(messages), **fields}
    return parse(body, Limits(), model="m", is_pipeline=is_pipeline)


def told(request: RunRequest) -> list[tuple[str, str, str]]:
    return [(one.id, one.message.role, one.message.content) for one in request.sent]


def test_messages_are_turns() -> None:
    """Thoughts, activities and answers that say nothing are left out; calls and results stay, in their order."""
    request = parsed(
        {"id": "s", "role": "developer", "content": "Be short."},
        {"id": "u1", "role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "is it?"}]},
        {"id": "r1", "role": "reasoning", "content": "hidden"},
        {"id": "p1", "role": "activity", "activityType": "plan", "content": {"steps": []}},
        {"id": "a1", "role": "assistant", "toolCalls": [CALL]},
        {"id": "x1", "role": "tool", "toolCallId": "c1", "content": "", "error": "no such page"},
        {"id": "a2", "role": "assistant", "content": ""},
        {"id": "a3", "role": "assistant", "content": "It is x.", "encryptedValue": "later", "metadata": {}},
    )
    assert told(request) == [
        ("s", "developer", "Be short."),
        ("u1", "user", "What\nis it?"),
        ("a1", "assistant", ""),
        ("x1", "tool", "Error: no such page"),
        ("a3", "assistant", "It is x."),
    ]
    assert request.sent[2].message.extra == {"tool_calls": [CALL]}
    assert request.sent[3].message.extra == {"tool_call_id": "c1"}


def test_what_a_page_knows_is_a_system_message() -> None:
    """It stands first, and has no id; unknown fields are left out."""
    context = [{"description": "the page", "value": "prices"}, {"description": "", "value": "dark"}]
    request = parsed({"id": "u", "role": "user", "content": "Hi"}, context=context, later="x", protocolVersion="2.0")
    assert told(request) == [("", "system", "the page: prices\n\ndark"), ("u", "user", "Hi")]


def test_images_and_files_are_parts_as_models_elsewhere_take_them() -> None:
    """Inline, by address, or by a provider's handle."""
    parts = [
        {"type": "image", "source": {"type": "data", "value": "QQ==", "mimeType": "image/png"}},
        {"type": "image", "source": {"type": "url", "value": "https://a/b.png"}},
        {"type": "document", "source": {"type": "data", "value": "QQ==", "mimeType": "application/pdf"}},
        {"type": "document", "source": {"type": "file", "value": "file-1"}},
        {"type": "audio", "source": {"type": "data", "value": "QQ==", "mimeType": "audio/mp3"}},
    ]
    request = parsed({"id": "u", "role": "user", "content": [{"type": "text", "text": "See"}, *parts]})
    assert list(request.sent[0].message.parts) == [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}},
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,QQ=="}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "mp3"}},
    ]


def test_a_model_gets_tools_and_sampling_and_a_pipeline_its_input_and_state() -> None:
    """A pipeline has tools of its own: those of the page are not offered. A model has no state."""
    fields: dict[str, Any] = {
        "tools": [{"name": "go", "description": "Go."}],
        "state": {"a": 1},
        "forwardedProps": {"temperature": 0.5, "page": 3, "on_disconnect": "abort"},
    }
    model = parsed({"id": "u", "role": "user", "content": "Hi"}, **fields)
    assert [(tool.name, tool.parameters) for tool in model.generate.tools] == [("go", {})]
    assert (model.generate.sampling.temperature, model.on_disconnect) == (0.5, "abort")
    assert (model.generate.input, model.generate.state) == ({}, {})
    pipeline = parsed({"id": "u", "role": "user", "content": "Hi"}, is_pipeline=True, **fields)
    assert pipeline.generate.tools == ()
    assert (pipeline.generate.input, pipeline.generate.state) == (fields["forwardedProps"], {"a": 1})


@pytest.mark.parametrize(
    ("answer", "approved"),
    [
        ({"status": "resolved", "payload": True}, Approved(id="c:1", allow=True)),
        (
            {"status": "resolved", "payload": {"approved": False, "message": "Not now."}},
            Approved(id="c:1", allow=False, message="Not now."),
        ),
        ({"status": "cancelled"}, Approved(id="c:1", allow=False)),
    ],
)
def test_an_answer_to_an_interrupt(answer: dict[str, Any], approved: Approved) -> None:
    """Its id names the stream that was interrupted, and the call."""
    request = parsed(resume=[{"interruptId": f"{STREAM_ID}:c:1", **answer}])
    assert request.resume is not None
    assert (request.resume.stream_id, request.resume.approvals) == (STREAM_ID, (approved,))


def test_answers_are_to_one_run() -> None:
    """Answers to two runs have no run that goes on."""
    entries = [{"interruptId": f"{digit * 32}:c", "status": "cancelled"} for digit in "01"]
    with pytest.raises(BadRequest, match="another run") as caught:
        parsed(resume=entries)
    assert caught.value.param == "resume[1].interruptId"
