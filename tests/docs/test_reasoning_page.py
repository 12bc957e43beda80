"""docs/reasoning-and-tools.md: its settings give the events that it shows, and its table has every format."""

from __future__ import annotations

import json
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("regex", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.clients.factory import echo_client
from streamserve.dialects.encoder import coalesce
from streamserve.engine.config import EngineConfig
from streamserve.engine.echo import EchoTokenizer
from streamserve.engine.text.formats.markup import NAMES
from streamserve.protocol.events import LoggedEvent, Token
from streamserve.protocol.requests import Message, Tool
from tests.support.engines.clients import collect, ready
from tests.support.models.tagged import blocks_of
from tests.support.streams.hand_made import ask

PAGE = (Path(__file__).parents[2] / "docs" / "reasoning-and-tools.md").read_text()
SETTINGS, OWN_FORMAT, OWN_CALLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHOWN = [json.loads(line) for line in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()]


def settings() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(SETTINGS, names)  # noqa: S102  # the page's own code
    model: dict[str, Any] = names["STREAMSERVE"]["MODELS"]["echo"]
    return model


def test_the_table_has_every_format() -> None:
    """Each name that the setting takes stands in the page."""
    assert {name for name in NAMES if f"`{name}`" not in PAGE} == set()


async def test_the_settings_give_the_events() -> None:
    """The answer of the page's settings is the page's events."""
    model = settings()
    request = ask(
        prompt=None,
        messages=(Message(role="user", content="How is the weather?"),),
        tools=(Tool(name="get_weather"),),
        max_tokens=400,
    )
    client = echo_client("echo", EngineConfig(), answers=model["ANSWERS"], format_name=model["FORMAT"])
    async with aclosing(await ready(client)):
        events = await collect(await client.generate(request))
    joined = coalesce([LoggedEvent(seq, event) for seq, event in enumerate(events, 1)])
    given = [{"type": event.type, **event.payload()} for _, event in joined]
    assert [{name: one.get(name) for name in shown} for shown, one in zip(SHOWN, given, strict=True)] == [
        {**shown, **({"id": one["id"]} if "id" in shown else {})} for shown, one in zip(SHOWN, given, strict=True)
    ]
    assert not any(isinstance(event, Token) and not event.token_ids for _, event in joined)


def test_the_own_format_works() -> None:
    """The page's example makes a format."""
    names: dict[str, Any] = {}
    exec(OWN_FORMAT, names)  # noqa: S102  # the page's own code
    made = names["mine"](EchoTokenizer())
    assert made.name == "mine"


async def test_the_own_calls_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's XML syntax, by its dotted path: the echo engine makes a call with it, and text of what is none."""
    (tmp_path / "invoke_of_the_page.py").write_text(OWN_CALLS)
    monkeypatch.syspath_prepend(tmp_path)
    answers = {
        "call": 'So: <invoke name="look"><arg name="x">1</arg></invoke>',
        "none": '<invoke name="look">x</invoke>',
    }
    client = echo_client("echo", EngineConfig(), answers=answers, format_name="invoke_of_the_page.invoke")
    async with aclosing(await ready(client)):
        found = []
        for asked in ("Please call.", "Please none."):
            messages = (Message(role="user", content=asked),)
            request = ask(prompt=None, messages=messages, tools=(Tool(name="look"),), max_tokens=200)
            found.append(blocks_of(await collect(await client.generate(request))))
    assert [[(one["kind"], one["text"]) for one in blocks] for blocks in found] == [
        [("text", "So: "), ("tool_use", '{"x": "1"}')],
        [("text", '<invoke name="look">x</invoke>')],
    ]
