"""`Grammar` → the fields of a server that holds an answer to it. Each kind of server has names of its own, or none.

    openai         response_format, of chats only
    vllm           response_format; structured_outputs{regex, choice, grammar}: vLLM 0.11 and later
    vllm-guided    response_format; guided_regex, guided_choice, guided_grammar: vLLM before 0.12
    sglang         response_format; regex, which choices are written as
    llama-server   response_format of chats, json_schema of prompts; choices as `grammar`, in its GBNF
    streamserve    grammar, of every kind, on both routes

Servers ignore fields that they do not know, and then the answer would be another one. So what a server is not known to
take is refused by name. Pure.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from streamserve.clients.remote.config import Dialect
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Grammar

_JSON_KINDS = ("json_object", "json_schema")
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_OF_NATIVE = {"json_schema": "schema", "regex": "pattern", "choice": "choices", "lark": "grammar"}


def refuse_grammar(grammar: Grammar, server: str, dialect: Dialect, *, is_chat: bool) -> None:
    """Raise BadRequest for a grammar that this server does not take on this route."""
    if grammar.kind not in dialect.grammars:
        raise BadRequest(
            f"grammar of the type {grammar.kind} is not supported by this model's server ({server}). "
            f"It takes: {', '.join(sorted(dialect.grammars))}. Send one of these, or leave it out.",
            code="unsupported_parameter",
            param="grammar",
        )
    if server == "openai" and not is_chat:
        raise BadRequest(
            "grammar is not supported by this model's server (openai) with prompt; send messages.",
            code="unsupported_parameter",
            param="grammar",
        )


def grammar_fields(grammar: Grammar | None, server: str, dialect: Dialect, *, is_chat: bool) -> dict[str, Any]:
    """Return the fields of a grammar that was not refused."""
    if grammar is None:
        return {}
    kind = grammar.kind
    value = msgspec.json.decode(grammar.value) if kind in ("choice", "json_schema") else grammar.value
    if server == "streamserve":
        return {"grammar": {"type": kind, **({_OF_NATIVE[kind]: value} if kind in _OF_NATIVE else {})}}
    if kind in _JSON_KINDS:
        if server == "llama-server" and not is_chat:
            return {"json_schema": value if kind == "json_schema" else {"type": "object"}}
        return {"response_format": _response_format(kind, value)}
    if server == "sglang" and kind == "choice":
        return {"regex": "|".join(f"({_regex_of(one)})" for one in value)}
    if server == "llama-server":
        return {"grammar": "root ::= " + " | ".join(_gbnf_string(one) for one in value)}
    field, _, inner = dialect.grammars[kind].partition(".")
    return {field: {inner: value} if inner else value}


def _response_format(kind: str, schema: Any) -> dict[str, Any]:
    if kind == "json_object":
        return {"type": kind}
    return {"type": kind, "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _regex_of(text: str) -> str:
    """Return a regular expression that is the text, in the syntax that all engines share."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def _gbnf_string(text: str) -> str:
    """Return a literal of GBNF, which knows fewer escapes than JSON: a control character stands by its number."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", escaped) + '"'
