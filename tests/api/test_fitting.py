"""What fits of a question's files is decided when it is asked, by the tokens of its model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from streamserve.api.fitting import fit
from streamserve.protocol.attached import TextFile, files_of, message_of
from streamserve.protocol.requests import NO_CALLER, Admission, GenerateRequest, Question, SamplingParams, Turn
from tests.support.engines.clients import serving

BOUNDS: dict[str, Any] = {"loading_seconds": 1, "most_chars": 400_000}
PAGES = "\n\n".join(f"Page {number}: " + "word " * 8 for number in range(40))


def asked(*texts: str, max_tokens: int | None = None) -> tuple[GenerateRequest, Admission]:
    files = [TextFile(name=f"{number}.txt", type="text/plain", text=text) for number, text in enumerate(texts)]
    names = tuple(file.name for file in files)
    question = Question(id="q", content='{"blocks": []}', text="Which page?", attachment_ids=names)
    admission = replace(NO_CALLER, turn=Turn(conversation_id="c", answer_id="a", question=question))
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(model="echo", messages=(message_of("Which page?", files),), sampling=sampling), admission


async def test_what_fits_is_left_as_it_is() -> None:
    """Nothing is cut, nothing is said."""
    request, admission = asked("One line.")
    async with serving() as client:
        assert await fit(client, request, admission, **BOUNDS) == (request, admission)


@pytest.mark.parametrize("texts", [(PAGES,), ("First of all.", PAGES), (PAGES, "Last.")])
async def test_whole_pages_from_the_front_are_kept(texts: tuple[str, ...]) -> None:
    """As many as the model has room for beside its answer; the question keeps how many, and the reader is told."""
    request, admission = asked(*texts)
    async with serving() as client:
        fitted, said = await fit(client, request, admission, **BOUNDS)
        num_tokens = len(await client.tokenize(fitted))
    assert fitted.messages is not None
    kept = files_of(fitted.messages[-1])
    assert 200 < num_tokens <= 512 * 3 // 4
    joined, whole = "".join(file.text for file in kept), "".join(texts)
    assert joined
    assert whole.startswith(joined)
    assert all(
        file.text == text or file.text == "" or file.text.endswith("\n\n")
        for file, text in zip(kept, texts, strict=True)
    )
    assert said.trimmed is not None
    assert said.trimmed.status == "trimmed"
    assert said.turn is not None
    assert said.turn.question is not None
    assert json.loads(said.turn.question.content)["kept"] == {file.name: len(file.text) for file in kept}
    assert fitted.messages[-1].words == "Which page?"


async def test_the_answer_keeps_the_room_that_it_asks_for() -> None:
    """`max_tokens` of the request is left free."""
    request, admission = asked(PAGES, max_tokens=300)
    async with serving() as client:
        fitted, _ = await fit(client, request, admission, **BOUNDS)
        assert len(await client.tokenize(fitted)) <= 512 - 300


async def test_a_prompt_is_bounded_in_characters_too() -> None:
    """Whatever a model takes: its server may not say how long its prompts may be."""
    request, admission = asked("One.\n\nTwo.\n\n" + "word " * 20, "Three.")
    async with serving() as client:
        fitted, said = await fit(client, request, admission, loading_seconds=1, most_chars=30)
    assert fitted.messages is not None
    assert [file.text for file in files_of(fitted.messages[-1])] == ["One.\n\nTwo.\n\n", ""]
    assert said.trimmed is not None
    assert "12 of" in (said.trimmed.message or "")
