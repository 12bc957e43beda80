"""A branch of a conversation as Markdown, for its owner's export; and as others may read it, for a share link. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from streamserve.api.conversations import ConversationView, MessageView
from streamserve.protocol.events import TEXT

_MAX_NAME_CHARS = 60
_ASKER = "You"
# What a share link shows of a citation and of a block: not what else a pipeline has put there.
_CITED = ("source", "id", "title", "url", "index", "start", "end")


def markdown(conversation: ConversationView, path: Sequence[MessageView]) -> str:
    """Return a branch as Markdown: questions and answers as they were written, and the sources of each answer."""
    begun = f"{conversation.created_at:%Y-%m-%d %H:%M} UTC"
    parts = [f"# {conversation.title or 'Conversation'}", f"*{begun}*", *(_section(one) for one in path)]
    return "\n\n".join(parts) + "\n"


def file_name(title: str) -> str:
    """Return a title as the name of a file, in ASCII and without an ending."""
    return re.sub(r"[^A-Za-z0-9]+", "-", title)[:_MAX_NAME_CHARS].strip("-") or "conversation"


def shared_json(conversation: ConversationView, path: Sequence[MessageView]) -> dict[str, Any]:
    """Return what a share link shows: questions, the text of answers, and their sources. No ids, no thoughts."""
    messages = [
        {
            "role": one.role,
            "state": one.state,
            "text": text_of(one),
            "citations": [_cited(citation) for citation in one.citations],
            "attachments": [attachment.name for attachment in one.attachments],
            "model": one.model if one.role == "assistant" else None,
            "created": int(one.created_at.timestamp()),
        }
        for one in path
    ]
    return {"title": conversation.title, "created": int(conversation.created_at.timestamp()), "messages": messages}


def text_of(message: MessageView) -> str:
    """Return a message's text, without thoughts and calls of tools."""
    return "".join(str(block.get("text", "")) for block in message.blocks if block.get("kind") == TEXT)


def sources_of(message: MessageView) -> list[dict[str, str]]:
    """Return the sources of an answer once each, in order: `name` and `url` ("" for a source without an address)."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for citation in message.citations:
        name = str(citation.get("title") or citation.get("source") or "")
        url = str(citation.get("url") or "")
        found.setdefault((name, url), {"name": name, "url": url})
    return list(found.values())


def _section(message: MessageView) -> str:
    who = _ASKER if message.role == "user" else message.model or "Answer"
    parts = [f"## {who}", *(f"*Attached: {one.name}*" for one in message.attachments)]
    if message.state == "running":
        parts.append("*This answer is still being written.*")
    parts.append(text_of(message))
    if message.error_code:
        parts.append(f"*The answer ended in an error: {message.error_code}.*")
    if sources := sources_of(message):
        parts.append("\n".join(_source_line(number, source) for number, source in enumerate(sources, 1)))
    return "\n\n".join(part for part in parts if part)


def _source_line(number: int, source: Mapping[str, str]) -> str:
    name = re.sub(r"([\[\]\\])", r"\\\1", source["name"])
    return f"{number}. [{name}](<{source['url']}>)" if source["url"] else f"{number}. {name}"


def _cited(citation: Mapping[str, Any]) -> dict[str, Any]:
    return {name: citation[name] for name in _CITED if citation.get(name) is not None}
