"""Random request bodies: a valid one for its route, of which a few places are changed to what a client gets wrong.

A body is made of pools of valid values, one pool a field; then a mutation replaces, removes, renames, repeats, nests or
exchanges parts of it, or damages its bytes. The same `rng` makes the same body.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NATIVE, CHAT, COMPLETIONS, PLAIN, PIPELINE, SOCKET = ROUTES = (
    "/streams",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/completions/stream",
    "/pipelines/retelling",
    "websocket",
)
MODELS = ("echo", "plain-tools", "scripted", "retelling")

_CALL_TEXT = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Bern"}}\n</tool_call>'
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Genf"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
_TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "Weather.", "parameters": _SCHEMA}},
    {"type": "function", "function": {"name": "book", "strict": True, "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "wait"}},
]
_CALLS = [{"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Bern"}'}}]
_MESSAGES = [
    [{"role": "user", "content": "Where is my bill?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "call"}]}],
    [{"role": "user", "content": "think"}, {"role": "assistant", "content": "So"}],
    [
        {"role": "user", "content": "call"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": _CALLS},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ],
    [{"role": "developer", "content": "x"}, {"role": "user", "content": "a", "name": "ann"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nHm.\n</think>\n" + _CALL_TEXT}],
]
_GRAMMARS = [
    {"type": "json_schema", "schema": _SCHEMA},
    {"type": "json_object"},
    {"type": "regex", "pattern": "[a-z]{1,3}(,[0-9]+)*"},
    {"type": "choice", "choices": ["yes", "no"]},
    {"type": "lark", "grammar": 'start: "a" | "b" start'},
]
_FORMATS = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "trip", "schema": _SCHEMA, "strict": True}},
    {"type": "json_schema", "json_schema": {"name": "trip"}},
]
_CHOICES = [
    "none",
    "auto",
    "required",
    {"type": "function", "function": {"name": "look_up"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "book"}}]},
    },
]
_SAMPLING: dict[str, Sequence[Any]] = {
    "temperature": (0, 0.7, 1.2, 2),
    "top_p": (0.5, 1),
    "top_k": (0, 1, 40),
    "min_p": (0, 0.1),
    "presence_penalty": (-2, 0.5),
    "frequency_penalty": (0, 2),
    "repetition_penalty": (0.5, 1.3),
    "seed": (0, 7, 2**63 - 1),
    "max_tokens": (1, 4, 12),
    "min_tokens": (0, 1, 3),
    "stop": ("the", ["\n", "ed"], []),
    "stop_token_ids": ([], [65, 300], [256]),
    "ignore_eos": (True, False),
    "logit_bias": ({"65": 5, "300": -100}, {}, {"256": 100}),
    "allowed_token_ids": ([65, 66, 256], [300]),
    "bad_words": (["river", "a"], "the"),
    "include_stop": (True, False),
}
_SHARED: dict[str, Sequence[Any]] = {
    **_SAMPLING,
    "model": MODELS,
    "n": (1, 2, 4),
    "timeout_seconds": (5, 60.5),
    "latency_class": ("chat", "batch"),
    "metadata": ({"a": "b"},),
    "grammar": _GRAMMARS,
    "echo": (True, False),
    "on_disconnect": ("park", "abort"),
    "interval_ms": (0, 5),
    "interval_tokens": (1, 20),
}
_TURNS: dict[str, Sequence[Any]] = {
    "chat_template_kwargs": ({"enable_thinking": True}, {"thinking": False, "reasoning_effort": "low"}),
    "continue_final_message": (True, False),
    "input": ({"question": "Why?"}, {}),
}
_FIELDS: dict[str, dict[str, Sequence[Any]]] = {
    NATIVE: {**_SHARED, **_TURNS, "logprobs": (0, 3, 20), "format": ("native", "text", "tokens")},
    CHAT: {
        **_SHARED,
        **_TURNS,
        "logprobs": (True, False),
        "top_logprobs": (0, 5),
        "max_completion_tokens": (1, 9),
        "stream": (True, True, False),
        "stream_options": ({"include_usage": True}, {"include_obfuscation": True}),
        "tools": (_TOOLS, _TOOLS[:1], []),
        "tool_choice": _CHOICES,
        "parallel_tool_calls": (True, False),
        "response_format": _FORMATS,
        "reasoning_effort": ("none", "low", "high"),
        "service_tier": ("auto", "flex"),
        "user": ("ann",),
        "store": (True,),
    },
    COMPLETIONS: {
        **_SHARED,
        "logprobs": (0, 3),
        "stream": (True, True, False),
        "best_of": (1, 2),
        "suffix": ("",),
        "stream_options": ({"include_usage": True},),
    },
    PLAIN: {**_SHARED, **_TURNS},
    PIPELINE: {**_SHARED, **_TURNS, "stream": (True, False)},
}
_FIELDS[SOCKET] = _FIELDS[NATIVE]
_PROMPTS = ("Where is my bill?", "think, then call", "a", "é🙂\u2028\u0000", "<|im_end|>")
_SEVERAL = (["a", "call"], [65, 66, 300], [[65], [66, 67]])

_JUNK: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 1.5, -0.0, 1e308, 5e-324, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**23),
    *("", " ", "\x00", "\r\ndata: x\n\n", "null", "1", "-1", "٣", "é" * 70, "a" * 5_000, "🙂", "\ud83d", "\udc00a"),
    *("<think>", "</think>", "<tool_call>", _CALL_TEXT, "<|im_start|>assistant\n", "{% raw %}", "{{ 7 * 7 }}", "%s%n"),
    *([], [[]], [None], [1, "a"], {}, {"": None}, {"type": None}, {"type": "function"}, {"$ref": "#"}, {"a": {}}),
    *({"type": ["object", "nul"]}, {"anyOf": []}, {"not": {}}, {"pattern": "(?=a)("}, {"enum": []}, {"const": []}),
    *("__proto__", "../../etc/passwd", "' OR 1=1 --", "$ref", "#/$defs/none", "file:///etc/passwd"),
)
_NAMES = (*_FIELDS[CHAT], *_FIELDS[PLAIN], *_FIELDS[NATIVE], "messages", "prompt", "type", "function", "__class__", "")


def random_body(rng: random.Random, route: str) -> bytes:
    """Return a body for that route; most are wrong somewhere, one in eight is valid."""
    return mutated(rng, valid_body(rng, route))


def mutated(rng: random.Random, body: Any, *, junk: Sequence[Any] = ()) -> bytes:
    """Return a body changed in some places, in one of eight cases in none. `junk`: what stands for a part at times."""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        if junk and rng.random() < 0.2:
            inner, key = _place(rng, body)
            inner[key] = copy.deepcopy(rng.choice(junk))
        else:
            body = rng.choice(_MUTATIONS)(rng, body)
    data = _text_of(body, rng).encode()
    return _damaged(rng, data) if rng.random() < 0.06 else data


def valid_body(rng: random.Random, route: str) -> dict[str, Any]:
    """Return a prompt and a few fields, each right alone."""
    fields = _FIELDS[route]
    body: dict[str, Any] = {"max_tokens": 6}
    if route == COMPLETIONS:
        body["prompt"] = rng.choice((*_PROMPTS, *_SEVERAL))
    elif rng.random() < 0.75:
        body["messages"] = rng.choice(_MESSAGES)
    else:
        body["prompt"] = rng.choice(_PROMPTS)
    for name in rng.sample(sorted(fields), rng.randrange(6)):
        body[name] = rng.choice(fields[name])
    if "tool_choice" in body:
        body.setdefault("tools", _TOOLS)
    return copy.deepcopy(body)


def _text_of(body: Any, rng: random.Random) -> str:
    """Return the JSON of a body, with lone surrogates as escapes."""
    return json.dumps(body, ensure_ascii=rng.random() < 0.5 or "\\ud" in json.dumps(body))


# Mutations: each takes a body and returns it, or another one.


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of every part of a JSON value, the whole of it too."""
    inner: Mapping[Any, Any] = {}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, list):
        inner = dict(enumerate(value[:50]))
    return [path, *(place for key, one in inner.items() for place in _places(one, (*path, key)))]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _place(rng: random.Random, body: Any) -> tuple[Any, Any]:
    """Return a container inside the body and a key of it; a body that is no container is put into a list."""
    paths = _places(body)[1:]
    if not paths:
        return [body], 0
    *outer, key = rng.choice(paths)
    return _at(body, tuple(outer)), key


def _replace(rng: random.Random, body: Any) -> Any:
    """Put junk in the place of a part."""
    inner, key = _place(rng, body)
    inner[key] = copy.deepcopy(rng.choice(_JUNK))
    return body


def _remove(rng: random.Random, body: Any) -> Any:
    inner, key = _place(rng, body)
    del inner[key]
    return body


def _add(rng: random.Random, body: Any) -> Any:
    """Add a field that is known somewhere, or junk to a list."""
    inners = [one for path in _places(body) if isinstance(one := _at(body, path), dict | list)]
    if not inners:
        return body
    inner = rng.choice(inners)
    value = copy.deepcopy(rng.choice((*_JUNK, *_GRAMMARS, *_FORMATS, *_CHOICES, _TOOLS, *_MESSAGES)))
    if isinstance(inner, dict):
        inner[rng.choice(_NAMES)] = value
    else:
        inner.insert(rng.randrange(len(inner) + 1), value)
    return body


def _repeat(rng: random.Random, body: Any) -> Any:
    """Make a list, a text or a number too long."""
    inner, key = _place(rng, body)
    one, times = inner[key], rng.choice((2, 3, 20, 600))
    if isinstance(one, list | str):
        inner[key] = one * times
    elif type(one) is int:
        inner[key] = one * 10**times if times < 20 else one
    return body


def _nest(rng: random.Random, body: Any) -> Any:
    """Wrap a part in lists or objects, sometimes deeper than any parser follows."""
    inner, key = _place(rng, body)
    wrap: Callable[[Any], Any] = rng.choice((lambda one: [one], lambda one: {"a": one}, lambda one: {"anyOf": [one]}))
    for _ in range(rng.choice((1, 1, 2, 30, 55, 80))):
        inner[key] = wrap(inner[key])
    return body


def _exchange(rng: random.Random, body: Any) -> Any:
    """Copy a part to another place."""
    paths = _places(body)
    value = copy.deepcopy(_at(body, rng.choice(paths)))
    inner, key = _place(rng, body)
    inner[key] = value
    return body


def _rename(rng: random.Random, body: Any) -> Any:
    inner, key = _place(rng, body)
    if isinstance(inner, dict):
        inner[rng.choice((*_NAMES, key + " ", key.upper()))] = inner.pop(key)
    return body


def _retell(rng: random.Random, body: Any) -> Any:
    """Change a text in its middle."""
    inner, key = _place(rng, body)
    if isinstance(inner[key], str):
        cut = rng.randrange(len(inner[key]) + 1)
        inner[key] = inner[key][:cut] + rng.choice([one for one in _JUNK if isinstance(one, str)]) + inner[key][cut:]
    return body


_MUTATIONS = (_replace, _replace, _remove, _add, _add, _repeat, _nest, _exchange, _rename, _retell)


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut, exchange, repeat or insert bytes."""
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + rng.choice((0, 1, 2, 30)))
    middle = rng.choice((b"", b"\x00", b"\xff", b"\xed\xa0\x80", b'"', b"}", b"9" * 30, b"1e999", b"NaN", b"\\u0000"))
    tail = rng.choice((data[end:], data[begin:], b""))
    return data[:begin] + middle + tail
