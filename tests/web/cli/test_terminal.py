"""The terminal chat's pieces: thoughts dim, calls named, and only text in a pipe or in the conversation."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

from django.conf import settings
from django.test import override_settings

from streamserve.conf import get_settings
from streamserve.web.cli.terminal import AnswerText, Chat, LocalChat, Piece, RemoteChat
from tests.support.docs.demo_site import end_engines
from tests.support.plugins.migrated import Migrate
from tests.support.servers.web_servers import daphne, wait_until_ready
from tests.support.sites.pages.blocks_site import ANSWERS, THOUGHT

ANSWER = [
    Piece("Hm", "thinking"),
    Piece(".", "thinking"),
    Piece("", "tool_use", "look_up"),
    Piece('{"a": 1}', "tool_use", "look_up"),
    Piece("", "tool_use", "look_up"),
    Piece("{}", "tool_use", "look_up"),
    Piece("Four."),
]


def printed(pieces: list[Piece], *, is_terminal: bool) -> str:
    shown = AnswerText(is_terminal=is_terminal)
    return "".join(shown.add(piece) for piece in pieces) + shown.end()


def test_a_terminal_shows_thoughts_dim_and_names_calls() -> None:
    assert printed(ANSWER, is_terminal=True) == (
        '\x1b[2mHm.\x1b[0m\n\x1b[2mlook_up {"a": 1}\x1b[0m\n\x1b[2mlook_up {}\x1b[0m\nFour.'
    )


def test_a_pipe_gets_the_text_only() -> None:
    assert printed(ANSWER, is_terminal=False) == "Four."


def test_an_answer_that_ends_in_a_thought_leaves_no_dim_terminal() -> None:
    assert printed([Piece("Hm\x1b[0m", "thinking")], is_terminal=True) == "\x1b[2mHm[0m\x1b[0m"


def blocks_of(chat: Chat) -> dict[str, str]:
    """Ask for a thought; return the text of each kind of block, and the conversation's last message."""

    async def talk() -> dict[str, str]:
        texts: dict[str, str] = {}
        try:
            await chat.open(lambda model: None)
            async with aclosing(chat.ask("think")) as answer:
                async for piece in answer:
                    texts[piece.kind] = texts.get(piece.kind, "") + piece.text
        finally:
            await chat.aclose()
        return {**texts, "message": str(chat.messages[-1]["content"])}

    return {name: text.strip() for name, text in asyncio.run(talk()).items()}


EXPECTED = {"thinking": THOUGHT, "text": "Two and two make four.", "message": "Two and two make four."}


def test_the_engines_thought_is_no_part_of_the_conversation() -> None:
    model = {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": ANSWERS}
    with override_settings(STREAMSERVE={**settings.STREAMSERVE, "MODELS": {"echo": model}}):
        assert blocks_of(LocalChat(get_settings(), "echo", {}, [])) == EXPECTED


def test_a_sites_thought_is_no_part_of_the_conversation(tmp_path: Path, migrated: Migrate) -> None:
    site = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.blocks_site", "STREAMSERVE_STATE_DIR": str(tmp_path)}
    migrated(tmp_path)
    with daphne("project.asgi:application", env=site) as server:
        wait_until_ready(server.url)
        assert blocks_of(RemoteChat(server.url, None, None, {}, [])) == EXPECTED
    end_engines(tmp_path)
