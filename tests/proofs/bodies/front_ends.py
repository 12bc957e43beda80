"""Valid bodies of the routes for front ends and agents, which test_front_ends.py mutates. A route without a body here
gets those of `OTHERS`, so that a new route is asked too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Make = Callable[[random.Random], Any]

QUESTIONS = ("Why?", "think", "call", "é🙂\u2028", "a" * 300)
# Ids that clients send, right and wrong: put in the place of any part.
IDS: Sequence[Any] = (
    *("chat-1", "0" * 32, "f" * 32, "../..", "a b", "é", "x" * 201, "x" * 200, "", "call_1", "msg_" + "0" * 32),
    *("resp_" + "0" * 32, "conv_" + "0" * 32, "fc_1", "0" * 32 + ":text", "0" * 32 + ":" + "x" * 500, 7, None, [], {}),
)


CALL_ID = "call_that_waits"  # stands for the id of a call that waits for its user's approval


def _one(*values: Any) -> Make:
    return lambda rng: copy.deepcopy(rng.choice(values))


# AI SDK


def _ui_part(rng: random.Random) -> dict[str, Any]:
    call = {"toolCallId": "call_1", "input": {"city": "Oslo"}}
    return rng.choice(
        (
            {"type": "text", "text": rng.choice(QUESTIONS)},
            {"type": "reasoning", "text": "Hm.", "state": "done"},
            {"type": "step-start"},
            {"type": "tool-weather", "state": "output-available", "output": "Sunny.", **call},
            {"type": "dynamic-tool", "toolName": "weather", "state": "input-available", **call},
            {"type": "tool-weather", "state": "output-error", "errorText": "away", **call},
            {
                "type": "tool-weather",
                "state": "approval-responded",
                "approval": {"id": "call_1", "approved": True},
                **call,
            },
            {"type": "file", "mediaType": "text/plain", "url": "data:text/plain;base64,aGk="},
            {"type": "source-url", "sourceId": "1", "url": "https://example.org/"},
            {"type": "data-status", "data": {"a": 1}},
        )
    )


def ai_chat(rng: random.Random) -> dict[str, Any]:
    """The body of `useChat`."""
    roles = ("user", "assistant", "system")
    messages = [
        {"id": f"m{number}", "role": rng.choice(roles), "parts": [_ui_part(rng) for _ in range(rng.randrange(1, 3))]}
        for number in range(rng.randrange(3))
    ]
    question = {"id": "q", "role": "user", "parts": [{"type": "text", "text": rng.choice(QUESTIONS)}]}
    body = {"id": f"chat-{rng.randrange(400)}", "messages": [*messages, question], "trigger": "submit-message"}
    if rng.random() < 0.2:
        body |= {"trigger": "regenerate-message", "messageId": rng.choice(("m0", "q"))}
    if rng.random() < 0.3:
        body |= {"model": rng.choice(("echo", "retelling")), "max_tokens": 4}
    return body


# AG-UI


def ag_ui(rng: random.Random) -> dict[str, Any]:
    """A `RunAgentInput`."""
    calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
    earlier = rng.choice(
        (
            [],
            [{"id": "1", "role": "system", "content": "Be brief."}],
            [{"id": "2", "role": "user", "content": "Hi"}, {"id": "3", "role": "assistant", "content": "Hello"}],
            [
                {"id": "4", "role": "user", "content": "call"},
                {"id": "5", "role": "assistant", "toolCalls": calls},
                {"id": "6", "role": "tool", "toolCallId": "call_1", "content": "Sunny."},
            ],
            [{"id": "7", "role": "activity", "activityType": "a", "content": {}}],
        )
    )
    body: dict[str, Any] = {
        "threadId": f"t{rng.randrange(400)}",
        "runId": f"r{rng.randrange(100)}",
        "messages": [*earlier, {"id": "q", "role": "user", "content": rng.choice(QUESTIONS)}],
        "tools": rng.choice(([], [{"name": "weather", "description": "W", "parameters": {"type": "object"}}])),
        "context": rng.choice(([], [{"description": "where", "value": "Oslo"}])),
        "state": rng.choice(({}, None, {"count": 1})),
        "forwardedProps": rng.choice(({}, None, {"a": 1})),
    }
    if rng.random() < 0.15:
        body["resume"] = [{"interruptId": "call_1", "status": "resolved", "payload": {"approved": True}}]
    return body


# OpenAI Responses


def _item(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {"role": "user", "content": rng.choice(QUESTIONS)},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "item_reference", "id": "msg_1"},
        )
    )


def responses(rng: random.Random) -> dict[str, Any]:
    """The body of `/v1/responses`."""
    several = [*(_item(rng) for _ in range(rng.randrange(3))), {"role": "user", "content": "Why?"}]
    body: dict[str, Any] = {"model": "echo", "input": rng.choice((*QUESTIONS, several)), "max_output_tokens": 16}
    weather = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    more: dict[str, Any] = {
        "instructions": "Be brief.",
        "stream": rng.choice((True, False)),
        "background": rng.choice((True, False)),
        "store": rng.choice((True, False)),
        "temperature": 0.7,
        "tools": [weather],
        "tool_choice": rng.choice(("auto", "none", "required", {"type": "function", "name": "weather"})),
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "previous_response_id": "resp_" + "0" * 32,
        "conversation": rng.choice(("conv_" + "0" * 32, {"id": "conv_" + "0" * 32})),
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "top_logprobs": 2,
    }
    for name in rng.sample(sorted(more), rng.randrange(5)):
        body[name] = more[name]
    return body


def items(rng: random.Random) -> dict[str, Any]:
    """What a conversation of OpenAI's is made of."""
    return {"items": [_item(rng) for _ in range(rng.randrange(4))], "metadata": {"a": "b"}}


# Embeddings, moderations, tokens


def embeddings(rng: random.Random) -> dict[str, Any]:
    """The body of `/v1/embeddings`."""
    given = rng.choice(("Why?", ["a", "b"], [1, 2, 3], [[1, 2], [3]], [""], []))
    body: dict[str, Any] = {"model": rng.choice(("embedder", "embedder", "echo")), "input": given}
    more = {"dimensions": 8, "encoding_format": rng.choice(("float", "base64")), "user": "ann"}
    for name in rng.sample(sorted(more), rng.randrange(3)):
        body[name] = more[name]
    return body


# MCP


def mcp(rng: random.Random) -> dict[str, Any]:
    """A message of `/mcp`."""
    meta = {"progressToken": rng.choice(("p", 1))}
    question = {"name": "retelling", "arguments": {"question": rng.choice(QUESTIONS)}, "_meta": meta}
    method, params = rng.choice(
        (
            ("tools/call", question),
            ("tools/call", question),
            ("tools/call", {"name": "listing", "arguments": {"year": 2024, "of": ["a"]}}),
            ("tools/list", {}),
            ("ping", {}),
            ("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a"}}),
            ("notifications/cancelled", {"requestId": 1, "reason": "r"}),
        )
    )
    body = {"jsonrpc": "2.0", "method": method, "params": params}
    return body if method.startswith("notifications") else {**body, "id": rng.choice((1, "a", 2**40))}


BODIES: Mapping[str, Make] = {
    "ai_chat": ai_chat,
    "ag_ui": ag_ui,
    "responses": responses,
    "response_tokens": responses,
    "response_conversations": items,
    "response_conversation": _one({"metadata": {"a": "b"}}),
    "conversation_items": lambda rng: {"items": items(rng)["items"]},
    "embeddings": embeddings,
    "moderations": lambda rng: {
        "model": "echo",
        "input": rng.choice(("Why?", ["a", "b"], [{"type": "text", "text": "a"}])),
    },
    "tokenize": _one(
        {"model": "echo", "prompt": "Why?"}, {"model": "echo", "messages": [{"role": "user", "content": "a"}]}
    ),
    "detokenize": _one({"model": "echo", "tokens": [1, 2, 3]}, {"tokens": []}),
    "mcp": mcp,
    "approve_stream": _one(
        {"approvals": [{"id": CALL_ID, "allow": True, "message": "yes"}]},
        {"approvals": [{"id": CALL_ID, "allow": False}], "format": "text", "on_disconnect": "abort"},
    ),
}
OTHERS: Make = _one(
    {},
    {"model": "echo", "input": "Why?"},
    {"items": []},
    {"id": "chat-1", "messages": []},
)
