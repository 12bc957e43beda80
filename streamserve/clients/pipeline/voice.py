"""`Voice`: what an agent of another framework shows in its run, as blocks: text, thoughts, calls and their results.

    text ─ thought ─ call ─ arguments ──► one block at a time ──► Speech: filters, turns ──► readers
    result                               a block of its own

An adapter (clients/agents/) puts its framework's events here in their order. A run that another process continues gives
the same blocks from the start, and readers get what they lack. An adapter waits here for slow readers: the
framework is not asked for more while they are `LEAD_TOKENS` behind. asyncio; knows no framework.
"""

from __future__ import annotations

import json
from typing import Any

from streamserve.clients.pipeline.speech import Speech
from streamserve.protocol.events import TEXT, BlockStart, Token, Usage

THINKING, CALL = "thinking", "tool_use"


class Voice:
    """See above. Every message of a model ends with `end`."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._open: tuple[str, str] | None = None  # the kind of the open block, and the id of its call
        self._has_turn = False
        self.has_text = False  # text was shown

    async def text(self, text: str) -> None:
        """Show text of the answer."""
        if text:
            self.has_text = True
            await self._write(TEXT, text)

    async def thought(self, text: str) -> None:
        """Show a thought."""
        if text:
            await self._write(THINKING, text)

    async def call(self, id: str, name: str, arguments: Any = None) -> None:
        """Show a call that the server answers itself; `arguments`, JSON text or a value, if they are known."""
        await self._begin(CALL, id, name)
        if arguments is not None:
            await self.arguments(arguments if isinstance(arguments, str) else json_text(arguments))

    async def arguments(self, text: str) -> None:
        """Show more of the arguments of the call that is open."""
        if text and self._open is not None and self._open[0] == CALL:
            await self._take(text)

    async def result(self, id: str, text: str) -> None:
        """Show what a call has returned."""
        await self.end()
        await self._speech.show_result(id, text)

    async def end(self) -> None:
        """End the open block, and with it the message."""
        self._speech.close_block()
        self._open = None
        if self._has_turn:
            self._has_turn = False
            self._speech.turn.release()

    def count(self, usage: Usage) -> None:
        """Note what the agent's models have used in all, those of this site among them."""
        self._speech.count_agent(usage)

    def finish(self, reason: str) -> None:
        """Name why the last answer ended: `stop`, `length` or `content_filter`."""
        self._speech.finish_reason = reason

    async def _write(self, kind: str, text: str) -> None:
        if self._open is None or self._open[0] != kind:
            await self._begin(kind)
        await self._take(text)

    async def _take(self, text: str) -> None:
        await self._speech.take(Token(text=text, token_ids=()))
        await self._speech.source.readers()

    async def _begin(self, kind: str, id: str = "", name: str = "") -> None:
        """Open a block. The first text of an answer needs no block of its own, as in a plain answer."""
        if not self._has_turn:
            await self._speech.turn.acquire()
            self._has_turn = True
        self._speech.close_block()
        if kind != TEXT or self._speech.has_text:
            await self._speech.take(BlockStart(choice=0, index=0, kind=kind, id=id or None, name=name or None))
        self._open = kind, id


def json_text(value: Any) -> str:
    """Return a value as JSON text; what JSON does not know as text."""
    return json.dumps(value, ensure_ascii=False, default=str)
