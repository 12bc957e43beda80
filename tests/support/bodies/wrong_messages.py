"""Messages that a correct server refuses: a name, the message, the code of the error, and the `param` it names."""

from __future__ import annotations

_CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


def _user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def _calls(**changes: object) -> dict[str, object]:
    call = {name: value for name, value in {**_CALL, **changes}.items() if value is not None}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


WRONG_MESSAGES: tuple[tuple[str, object, str, str], ...] = (
    ("null", None, "invalid_type", ""),
    ("a string", "Hi", "invalid_type", ""),
    ("a list", ["user", "Hi"], "invalid_type", ""),
    ("empty", {}, "missing_field", ".role"),
    ("without role", {"content": "Hi"}, "missing_field", ".role"),
    ("role null", {"role": None, "content": "Hi"}, "missing_field", ".role"),
    ("role number", {"role": 1, "content": "Hi"}, "invalid_type", ".role"),
    ("role unknown", {"role": "wizard", "content": "Hi"}, "invalid_value", ".role"),
    ("role in capitals", {"role": "User", "content": "Hi"}, "invalid_value", ".role"),
    ("role empty", {"role": "", "content": "Hi"}, "invalid_value", ".role"),
    ("without content", {"role": "user"}, "missing_field", ".content"),
    ("content null", _user(None), "missing_field", ".content"),
    ("content number", _user(1), "invalid_type", ".content"),
    ("content object", _user({"text": "Hi"}), "invalid_type", ".content"),
    ("content true", _user(True), "invalid_type", ".content"),
    ("too many parts", _user([{"type": "text", "text": "a"}] * 1_025), "invalid_value", ".content"),
    ("part null", _user([None]), "invalid_type", ".content[0]"),
    ("part string", _user(["Hi"]), "invalid_type", ".content[0]"),
    ("part without type", _user([{"text": "Hi"}]), "missing_field", ".content[0].type"),
    ("part type null", _user([{"type": None}]), "invalid_type", ".content[0].type"),
    ("part without text", _user([{"type": "text"}]), "missing_field", ".content[0].text"),
    ("part text number", _user([{"type": "text", "text": 1}]), "invalid_type", ".content[0].text"),
    ("video", _user([{"type": "video_url", "video_url": {"url": "http://169.254.169.254/"}}]), "unsupported_content",
     ".content[0]"),
    ("image of an answer", {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
     "unsupported_content", ".content[0]"),
    ("name number", {"role": "user", "content": "Hi", "name": 1}, "invalid_type", ".name"),
    ("user with calls", {"role": "user", "content": "Hi", "tool_calls": [_CALL]}, "invalid_value", ".tool_calls"),
    ("user with call id", {"role": "user", "content": "Hi", "tool_call_id": "a"}, "invalid_value", ".tool_call_id"),
    ("tool id number", {"role": "tool", "content": "1", "tool_call_id": 1}, "invalid_type", ".tool_call_id"),
    ("calls object", {"role": "assistant", "tool_calls": {}}, "invalid_type", ".tool_calls"),
    ("too many calls", {"role": "assistant", "tool_calls": [_CALL] * 1_025}, "invalid_value", ".tool_calls"),
    ("call null", {"role": "assistant", "tool_calls": [None]}, "invalid_type", ".tool_calls[0]"),
    ("call custom", _calls(type="custom"), "invalid_value", ".tool_calls[0].type"),
    ("call without function", _calls(function=None), "missing_field", ".tool_calls[0].function"),
    ("call of a string", _calls(function="f"), "invalid_type", ".tool_calls[0].function"),
    ("call without name", _calls(function={"arguments": "{}"}), "missing_field", ".tool_calls[0].function.name"),
    ("call of a list", _calls(function={"name": "f", "arguments": [1]}), "invalid_type",
     ".tool_calls[0].function.arguments"),
    ("call id number", _calls(id=1), "invalid_type", ".tool_calls[0].id"),
    ("reasoning number", {"role": "assistant", "content": "a", "reasoning_content": 1}, "invalid_type",
     ".reasoning_content"),
    ("old function call", {"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": ""}},
     "unsupported_content", ".function_call"),
    ("images", {"role": "user", "content": "Hi", "images": ["AA=="]}, "unsupported_content", ".images"),
    ("old audio", {"role": "assistant", "content": "a", "audio": {"id": "a"}}, "unsupported_content", ".audio"),
)  # fmt: skip
