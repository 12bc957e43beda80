"""Bodies that a correct server refuses: `tests/dialects` parses them and the wire test posts them.

They are made from tables: every field of the API with values at and beyond its bounds and of every wrong type
(`bad_fields`); then bodies that are no JSON, and bodies with wrong content. Each names its dialects and the
error that it must get.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.support.bodies.bad_fields import BOTH, NATIVE, OPENAI, BadBody, numbers, one_field, with_field, wrong_types
from tests.support.bodies.wrong_messages import WRONG_MESSAGES
from tests.support.bodies.wrong_tools import WRONG_TOOLS


def bad_bodies() -> list[BadBody]:
    """Return the whole corpus; names are unique, and so are bodies within a dialect."""
    makers = (
        _not_json,
        numbers,
        wrong_types,
        _texts,
        _grammars,
        _prompts,
        _messages,
        _unknown,
        _rules,
        _conflicts,
        _openai,
        _server,
    )
    return [bad for maker in makers for bad in maker()]


def _not_json() -> Iterator[BadBody]:
    """Yield bodies that are not one bounded JSON object."""
    bodies = {
        "empty": b"",
        "blank": b" \r\n\t ",
        "cut short": b'{"messages": [{"role": "user", "con',
        "trailing comma": b'{"prompt": "Hi",}',
        "single quotes": b"{'prompt': 'Hi'}",
        "comment": b'{"prompt": "Hi"} // please',
        "two objects": b'{"prompt": "Hi"}{"prompt": "Hi"}',
        "an array": b'[{"prompt": "Hi"}]',
        "a string": b'"Hi"',
        "a number": b"42",
        "null": b"null",
        "true": b"true",
        "NaN": b"NaN",
        "form fields": b"prompt=Hi&model=echo",
        "XML": b"<prompt>Hi</prompt>",
        "UTF-16": '{"prompt": "Hi"}'.encode("utf-16"),
        "UTF-32": '{"prompt": "Hi"}'.encode("utf-32-le"),
        "Latin-1": '{"prompt": "Größe"}'.encode("latin-1"),
        "overlong UTF-8": b'{"prompt": "\xc0\xaf"}',
        "UTF-8 cut short": b'{"prompt": "\xf0\x9f\x8e"}',
        "surrogate as UTF-8": b'{"prompt": "\xed\xa0\x80"}',
        "code point too high": b'{"prompt": "\xf4\x90\x80\x80"}',
        "random bytes": bytes(range(128, 256)),
        "NUL bytes": b"\0\0\0\0",
        "NUL after the object": b'{"prompt": "Hi"}\0',
        "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
        "raw newline in a string": b'{"prompt": "a\nb"}',
        "bad escape": b'{"prompt": "\\x41"}',
        "high surrogate": b'{"prompt": "\\ud800"}',
        "low surrogate": b'{"prompt": "\\udc00 Hi"}',
        "swapped surrogates": b'{"prompt": "\\ude00\\ud83d"}',
        "surrogate in a key": b'{"prompt": "Hi", "\\ud800": 1}',
        "surrogate in a message": b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        "duplicate prompt": b'{"prompt": "Hi", "prompt": "Ho"}',
        "duplicate key below": b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        "deep arrays": b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}",
        "deep objects": b'{"prompt": ' + b'{"a":' * 70 + b"1" + b"}" * 71,
        "depth bomb": b"[" * 20_000,
        "closed depth bomb": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        "long int": b'{"seed": ' + b"9" * 4_301 + b"}",
        "very long int": b'{"seed": ' + b"9" * 100_000 + b"}",
        "long negative int": b'{"seed": -' + b"9" * 4_301 + b"}",
        "huge exponent": b'{"temperature": 1e400}',
        "plus sign": b'{"temperature": +1}',
        "leading zero": b'{"max_tokens": 007}',
        "hex": b'{"max_tokens": 0x10}',
    }
    for name, body in bodies.items():
        yield BadBody(name=f"not JSON: {name}", body=body, code="invalid_json")
    bombs = {"broken": b"[" * 200_000, "closed": b'{"a":' * 50_000 + b"1" + b"}" * 50_000}
    bombs |= {"flat": b'{"zz":[' + b"[]," * 300_000 + b"0]}"}
    for name, body in bombs.items():
        yield BadBody(name=f"too many containers: {name}", body=body, code="too_many_containers")
    huge = b'{"prompt": "' + b"a" * 1024 * 1024 + b'"}'
    yield BadBody(name="body too large", body=huge, status=413, code="body_too_large")


def _texts() -> Iterator[BadBody]:
    """Yield texts, lists and objects out of their bounds."""
    yield one_field("model empty", "model", "")
    yield one_field("model too long", "model", "m" * 257)
    yield one_field("nothing kept", "truncate_prompt_tokens", 0)
    yield one_field("stop too long", "stop", "s" * 65)
    yield one_field("stop too many", "stop", [str(number) for number in range(17)])
    items: tuple[tuple[object, str], ...] = (
        ("s" * 65, "invalid_value"),
        (1, "invalid_type"),
        (None, "invalid_type"),
    )
    for item, code in items:
        yield one_field(f"stop item {str(item)[:4]}", "stop", ["a", item], code=code, param="stop[1]")
    ids = "stop_token_ids"
    yield one_field("stop_token_ids too many", ids, list(range(65)))
    items = ((-1, "invalid_value"), (2**31, "invalid_value"), (1.0, "invalid_type"), (True, "invalid_type"))
    for item, code in items:
        yield one_field(f"stop_token_ids item {item}", ids, [1, item], code=code, param=f"{ids}[1]")
    yield one_field("metadata too many keys", "metadata", {f"k{i}": "v" for i in range(17)})
    yield one_field("metadata long key", "metadata", {"k" * 65: "v"})
    yield one_field("metadata long value", "metadata", {"k": "v" * 513})
    yield one_field("metadata of numbers", "metadata", {"k": 1}, code="invalid_type")
    yield one_field("format unknown", "format", "xml", dialect=NATIVE)
    yield one_field("on_disconnect unknown", "on_disconnect", "finish")
    yield one_field("keepalive unknown", "keepalive", "both")
    template = "chat_template_kwargs"
    for kwargs, code in (
        ({"tokenize": True}, "unknown_field"),
        ({"chat_template": "{{ 1 }}"}, "unknown_field"),
        ({"messages": []}, "unknown_field"),
        ({"tools": []}, "unknown_field"),
        ({"bos_token": "<s>"}, "unknown_field"),
        ({"no name": 1}, "unknown_field"),
        ({"indent": 10**9}, "invalid_value"),
        ({"indents": [{"a": -(10**9)}]}, "invalid_value"),
        ({"enable_thinking": 1}, "invalid_type"),
        ({"thinking": "yes"}, "invalid_type"),
        ({"reasoning_effort": "enormous"}, "invalid_value"),
        ({"reasoning_effort": 3}, "invalid_type"),
    ):
        (name,) = kwargs
        yield one_field(f"{template} {json.dumps(kwargs)}", template, kwargs, code=code, param=f"{template}.{name}")
    yield one_field(f"{template} too many", template, {f"a{number}": 1 for number in range(17)})
    yield one_field(f"{template} too long", template, {"documents": "a" * 400_000})


def _grammars() -> Iterator[BadBody]:
    """Yield grammars that are none by their fields; what only a compiler finds is in tests/engine/grammar."""
    cases: tuple[tuple[dict[str, object], str, str], ...] = (
        ({}, "missing_field", ".type"),
        ({"type": "xml"}, "invalid_value", ".type"),
        ({"type": "json_schema"}, "missing_field", ".schema"),
        ({"type": "json_schema", "schema": "{}"}, "invalid_type", ".schema"),
        ({"type": "json_schema", "schema": {"description": "a" * 65_536}}, "invalid_value", ".schema"),
        ({"type": "json_schema", "schema": {}, "strict": True}, "unknown_field", ".strict"),
        ({"type": "json_object", "schema": {}}, "conflicting_fields", ".schema"),
        ({"type": "regex"}, "missing_field", ".pattern"),
        ({"type": "regex", "pattern": ""}, "invalid_value", ".pattern"),
        ({"type": "regex", "pattern": "a" * 65_537}, "invalid_value", ".pattern"),
        ({"type": "choice", "choices": []}, "invalid_value", ".choices"),
        ({"type": "choice", "choices": ["a", ""]}, "invalid_value", ".choices[1]"),
        ({"type": "choice", "choices": ["a", 1]}, "invalid_type", ".choices[1]"),
        ({"type": "lark", "pattern": "a"}, "conflicting_fields", ".pattern"),
    )
    for grammar, code, where in cases:
        name = f"grammar {json.dumps(grammar)[:60]}"
        yield one_field(name, "grammar", grammar, code=code, param="grammar" + where)


def _prompts() -> Iterator[BadBody]:
    """Yield no prompt, an empty one, one too long, and two kinds at once."""
    yield BadBody(name="neither messages nor prompt", body=b"{}", code="missing_field", param="messages")
    yield BadBody(name="prompt null", body=b'{"prompt": null}', code="missing_field", param="messages")
    yield BadBody(name="messages null", body=b'{"messages": null}', code="missing_field", param="messages")
    yield one_field("prompt empty", "prompt", "", code="empty_prompt")
    yield one_field("prompt of ids", "prompt", [1, 2, 3], code="invalid_type")
    yield one_field("prompt too long", "prompt", "a" * 400_001, code="context_length_exceeded")
    yield one_field("messages empty", "messages", [])
    too_long = [{"role": "user", "content": "a" * 200_001}] * 2
    yield one_field("messages too long", "messages", too_long, code="context_length_exceeded")
    yield one_field("messages too many", "messages", [{"role": "user", "content": "a"}] * 513)
    tool_calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "a" * 400_001}}]
    call = [{"role": "assistant", "tool_calls": tool_calls}]
    yield one_field("tool call too long", "messages", call, code="context_length_exceeded")


def _messages() -> Iterator[BadBody]:
    """Yield one wrong message after a right one."""
    right = {"role": "user", "content": "Hi"}
    for name, wrong, code, param in WRONG_MESSAGES:
        where = "messages[1]" + param
        yield one_field(f"message {name}", "messages", [right, wrong], code=code, param=where)


def _unknown() -> Iterator[BadBody]:
    """Yield undocumented names, near misses, and names of another dialect."""
    shared = ("temprature", "max_new_tokens", "topk", "Messages", "", "__class__", "stop_sequences")
    for name in (*shared, "prompt_token_ids", "salt", "tenant", "output_token_ids"):
        yield one_field(f"unknown field {name!r}", name, 1, code="unknown_field")
    yield one_field("unknown long field", "x" * 100_000, 1, code="unknown_field", param="x" * 48 + "…")
    yield one_field("unknown field of control characters", "\0\r\ndata: x", 1, code="unknown_field")
    for name in ("stream", "response_format", "max_completion_tokens", "user", "top_logprobs"):
        yield one_field(f"native: no field {name}", name, None, dialect=NATIVE, code="unknown_field")
    yield one_field("openai: no field format", "format", None, dialect=OPENAI, code="unknown_field")


def _rules() -> Iterator[BadBody]:
    """Yield wrong biases, allowed ids and bad words."""
    for bias, where, code in (
        ({"x": 1}, ".x", "invalid_value"),
        ({"-1": 1}, ".-1", "invalid_value"),
        ({"1.5": 1}, ".1.5", "invalid_value"),
        ({"٣": 1}, ".٣", "invalid_value"),
        ({"": 1}, ".", "invalid_value"),
        ({"2147483648": 1}, ".2147483648", "invalid_value"),
        ({"5": 1, "05": 1}, ".05", "invalid_value"),
        ({"5": 100.5}, ".5", "invalid_value"),
        ({"5": "1"}, ".5", "invalid_type"),
        ({"5": None}, ".5", "invalid_type"),
        ({str(number): 1 for number in range(1025)}, "", "invalid_value"),
    ):
        yield one_field(f"logit_bias {str(bias)[:40]}", "logit_bias", bias, code=code, param="logit_bias" + where)
    yield one_field("no allowed id", "allowed_token_ids", [])
    yield one_field("a negative allowed id", "allowed_token_ids", [3, -1], param="allowed_token_ids[1]")
    yield one_field("too many allowed ids", "allowed_token_ids", [1] * 4097)
    yield one_field("an empty bad word", "bad_words", ["a", ""], param="bad_words[1]")
    yield one_field("a long bad word", "bad_words", "x" * 65)
    yield one_field("too many bad words", "bad_words", ["a"] * 65)


def _conflicts() -> Iterator[BadBody]:
    """Yield fields that are valid alone and not together."""
    code = "conflicting_fields"
    hi = [{"role": "user", "content": "Hi"}]
    cases: tuple[tuple[str, dict[str, object], str], ...] = (
        (BOTH, {"messages": hi, "prompt": "Hi"}, "prompt"),
        (BOTH, {"messages": hi, "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (BOTH, {"prompt": "Hi", "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        (BOTH, {"messages": hi, "echo": True}, "echo"),
        (BOTH, {"messages": hi, "continue_final_message": True}, "continue_final_message"),
        (BOTH, {"prompt": "Hi", "continue_final_message": True}, "continue_final_message"),
        (NATIVE, {"prompt": "Hi", "n": 2, "format": "text"}, "n"),
        (NATIVE, {"prompt": "Hi", "n": 2, "format": "tokens"}, "n"),
        (NATIVE, {"prompt": "Hi", "logprobs": 0, "format": "tokens"}, "logprobs"),
        (NATIVE, {"prompt": "Hi", "prompt_logprobs": 0, "format": "text"}, "prompt_logprobs"),
        (NATIVE, {"messages": hi, "prompt_logprobs": 0}, "prompt_logprobs"),
        (OPENAI, {"messages": hi, "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (OPENAI, {"messages": hi, "guided_regex": "a", "grammar": {"type": "json_object"}}, "grammar"),
        (OPENAI, {"messages": hi, "guided_regex": "a", "guided_json": {}}, "guided_regex"),
        (OPENAI, {"messages": hi, "max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        (OPENAI, {"messages": hi, "top_logprobs": 2}, "top_logprobs"),
        (OPENAI, {"messages": hi, "top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        (OPENAI, {"messages": hi, "stream_options": {"include_usage": True}}, "stream_options"),
        (OPENAI, {"messages": hi, "stream": False, "stream_options": {}}, "stream_options"),
    )
    for dialect, body, param in cases:
        name = f"conflict {dialect}: {json.dumps(body)}"
        yield BadBody(name=name, body=json.dumps(body).encode(), dialect=dialect, code=code, param=param)


def _openai() -> Iterator[BadBody]:
    """Yield features of the OpenAI API that this server lacks."""
    unsupported: tuple[tuple[str, object], ...] = (
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("moderation", {"model": "m"}),
        ("web_search_options", {}),
        ("add_generation_prompt", False),
        ("add_special_tokens", True),
        ("best_of", 2),
        ("dry_multiplier", 0.8),
        ("length_penalty", 1.5),
        ("mirostat", 2),
        ("reasoning_format", "none"),
        ("repeat_penalty", 1.1),
        ("return_tokens_as_token_ids", True),
        ("safe_prompt", True),
        ("separate_reasoning", False),
        ("spaces_between_special_tokens", False),
        ("stream_reasoning", False),
        ("transforms", ["middle-out"]),
        ("typical_p", 0.5),
        ("use_beam_search", True),
        ("use_beam_search", 0),
        ("xtc_probability", 0.5),
    )
    for field, value in unsupported:
        name = f"unsupported {field} {json.dumps(value)}"
        yield one_field(name, field, value, dialect=OPENAI, code="unsupported_parameter")
    hi = [{"role": "user", "content": "Hi"}]
    for number, (fields, code, param) in enumerate(WRONG_TOOLS):
        body = json.dumps({"messages": hi, **fields}).encode()
        yield BadBody(name=f"tools {number}: {param} {code}", body=body, dialect=OPENAI, code=code, param=param)
    yield one_field("reasoning_effort unknown", "reasoning_effort", "enormous", dialect=OPENAI)
    yield one_field("user too long", "user", "u" * 513, dialect=OPENAI)
    options = "stream_options"
    wrong, code = {"include_usage": 1}, "invalid_type"
    yield one_field("include_usage number", options, wrong, dialect=OPENAI, code=code, param=f"{options}.include_usage")
    wrong, code = {"usage": 1}, "unknown_field"
    yield one_field("stream option unknown", options, wrong, dialect=OPENAI, code=code, param=f"{options}.usage")


def _server() -> Iterator[BadBody]:
    """Yield valid bodies for a model, or of a content type, that the server does not take."""
    missing = {"status": 404, "code": "model_not_found", "param": "model", "by_server": True}
    for model in ("gpt-4o", "../../../etc/passwd", "/etc/passwd", "helpdesk\0", "HELPDESK", "' OR 1=1 --", "a\r\nb"):
        yield one_field(f"no model {model!r}", "model", model, **missing)
    body, code = with_field("max_tokens", "4"), "unsupported_media_type"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/xml"):
        name = f"content type {kind}"
        yield BadBody(
            name=name, body=body, status=415, code=code, param="Content-Type", content_type=kind, by_server=True
        )
