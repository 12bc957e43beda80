"""A model of safetensors that quotes by itself: its inline markers become citations. The whole way, engine included."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from project import settings as demo
from project.help.questions.dev import ANSWERED
from project.help.search import Hit, candidates, choose
from streamserve.clients.factory import make_client
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.events import Citation, Token
from tests.support.models.reciting_model import save_reciting_model
from tests.support.sites.help_desk import Ask, assistant_over
from tests.support.streams.hand_made import until

pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
pytestmark = pytest.mark.usefixtures("shared_knowledge")

# As tokens; a marker is cut at every place, is there twice, and one names no passage.
PIECES = [
    "It is on the second page",
    " [",
    "2",
    "], and",
    " on the first",
    " [1",
    "].",
    " Again",
    " [2].",
    " Never",
    " [9] so.",
]
SHOWN = "It is on the second page [1], and on the first [2]. Again [1]. Never so."


@pytest.fixture
async def ask(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ask]:
    """The assistant over that model, as `make run MODEL=<folder>` has it."""
    folder = save_reciting_model(tmp_path / "quoter", PIECES)
    monkeypatch.setenv("MODEL", str(folder))
    ((alias, entry),) = demo._models().items()
    assert (alias, entry["PATH"]) == ("quoter", str(folder))
    settings.HELP_ANSWERS = "slots" if demo._SMALL & {alias} else "quotes"
    client = make_client(ModelConfig(alias=alias, path=entry["PATH"], num_threads=1), EngineConfig(num_blocks=512))
    client.start()
    await until(lambda: client.describe().state != "loading", "it is loaded")
    assert client.describe().state == "ready", client.describe()
    async with assistant_over(client) as asking:
        yield asking
    await client.aclose()


def question_of_two() -> tuple[str, list[Hit]]:
    """Return a question for which two passages at least are selected, with them."""
    for _, question in ANSWERED:
        hits = choose(candidates(question))
        if len(hits) >= 2:
            return question, hits
    raise AssertionError("there is none")


async def test_a_real_models_markers_become_citations(ask: Ask) -> None:
    """Numbered in the order of their first use, each cited once and before its marker is shown."""
    question, hits = await sync_to_async(question_of_two)()
    answer = await ask(question)
    assert answer.text == SHOWN
    assert answer.cited == [hits[1]["slug"], hits[0]["slug"]]
    before = ""
    for event in answer.events:
        if isinstance(event, Token):
            before += event.text
        if isinstance(event, Citation):
            assert f"[{answer.cited.index(event.id) + 1}]" not in before
    assert answer.events[-1].usage.prompt_tokens > 60  # type: ignore[union-attr]  # the passages are in the prompt
