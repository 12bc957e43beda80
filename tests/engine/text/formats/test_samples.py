"""Answers of real models as blocks, whole and cut at every place; tests/data/formats names their sources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.engine.text.formats.markup import choose_format
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.protocol.events import Done, Event, Meta, Token, Usage
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Tool
from tests.support.models.tagged import (
    EOS,
    Answer,
    answer_of,
    blocks_of,
    events_of,
    ids_of,
    resumed,
    tagged_tokenizer,
    update,
)

DATA = Path(__file__).resolve().parents[3] / "data" / "formats"
FORMATS = {path.stem: json.loads(path.read_text()) for path in sorted(DATA.glob("*.json"))}
SAMPLES = [(name, sample) for name, family in FORMATS.items() for sample in family["samples"]]
IDS = [f"{name}-{sample['name']}" for name, sample in SAMPLES]
# How a tokenizer may have the tags: as special tokens, as tokens that are text, and not at all.
TAGS = ("special", "added", "text")
# Every cut is tried in `make proofs`.
CUTS = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.proof)])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], HFTokenizer]:
    made = {}
    for name, family in FORMATS.items():
        for how in TAGS:
            tags = {how: family["tags"]} if how != "text" else {}
            made[name, how] = tagged_tokenizer(tmp_path_factory.mktemp(name), **tags)
    return made


def answer_to(tokenizers: dict[tuple[str, str], HFTokenizer], name: str, how: str, sample: dict[str, Any]) -> Answer:
    tokenizer = tokenizers[name, how]
    names = sample.get("tools") or [block["name"] for block in sample["blocks"] if "name" in block] or ["get_weather"]
    named = [one if isinstance(one, dict) else {"name": one} for one in names]
    tools = tuple(Tool(**one) for number, one in enumerate(named) if one not in named[:number])
    prompt = sample.get("prompt", "<|im_start|>assistant\n")
    return answer_of(tokenizer, choose_format(tokenizer, name), prompt, tools=tools)


def with_ends(events: list[Event]) -> Iterator[Event]:
    yield Meta(model="m", stream_id="s", created=0)
    yield from events
    num_ids = sum(len(event.token_ids) for event in events if isinstance(event, Token))
    yield Done(finish_reason="stop", usage=Usage(completion_tokens=num_ids))


@pytest.mark.parametrize("how", TAGS)
@pytest.mark.parametrize(("name", "sample"), SAMPLES, ids=IDS)
def test_blocks_of_a_sample(
    tokenizers: dict[tuple[str, str], HFTokenizer], name: str, sample: dict[str, Any], how: str
) -> None:
    """A sample's blocks are the same whatever its tags are; each id stands once, in order; the log's laws hold."""
    answer = answer_to(tokenizers, name, how, sample)
    token_ids = ids_of(answer.tokenizer, sample["output"] + EOS)
    events = events_of(answer.choice(), token_ids, "stop")
    assert blocks_of(events) == sample["blocks"]
    assert [one for event in events if isinstance(event, Token) for one in event.token_ids] == list(token_ids)
    check_events(with_ends(events))
    whole = answer.choice()
    assert blocks_of(whole.push(update(*token_ids, finish_reason="stop"))) == sample["blocks"]
    calls = [block for block in sample["blocks"] if block["kind"] == "tool_use"]
    are_whole = [is_object(block["text"]) for block in calls]
    assert whole.finish_reason == ("tool_calls" if any(are_whole) else "stop")


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@CUTS
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize(("name", "sample"), SAMPLES, ids=IDS)
def test_resumed_anywhere_is_the_same(
    tokenizers: dict[tuple[str, str], HFTokenizer], name: str, sample: dict[str, Any], finish_reason: str, every: int
) -> None:
    """An answer that is cut after any event of its log continues with the events that it would have had."""
    for how, step in (("special", every), ("text", 7 * every)):
        answer = answer_to(tokenizers, name, how, sample)
        token_ids = ids_of(answer.tokenizer, sample["output"] + (EOS if finish_reason == "stop" else ""))
        events = events_of(answer.choice(), token_ids, finish_reason)
        for cut in range(0, len(events) + 1, step):
            assert resumed(answer, events[:cut], token_ids, finish_reason) == events, (how, cut)


@CUTS
@pytest.mark.parametrize(("name", "sample"), SAMPLES, ids=IDS)
def test_a_cut_answer_loses_nothing(
    tokenizers: dict[tuple[str, str], HFTokenizer], name: str, sample: dict[str, Any], every: int
) -> None:
    """An answer that ends anywhere keeps the laws of the log, its ids, and the blocks that were whole."""
    answer = answer_to(tokenizers, name, "special", sample)
    token_ids = ids_of(answer.tokenizer, sample["output"])
    for cut in range(1, len(token_ids), every):
        events = events_of(answer.choice(), token_ids[:cut], "length")
        check_events(with_ends(events))
        assert sum(len(event.token_ids) for event in events if isinstance(event, Token)) == cut
