"""Laws of UI message streams: their order, what a page makes of them, and cuts after every frame."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from streamserve.dialects.ai_sdk import chunks
from streamserve.dialects.ai_sdk.message import CUT_OFF, UIMessage
from streamserve.dialects.encoder import coalesce
from streamserve.dialects.fold import Answer
from streamserve.protocol.events import (
    BlockStart,
    BlockStop,
    Citation,
    Done,
    Error,
    Event,
    GoingAway,
    LoggedEvent,
    Status,
    Token,
)
from tests.support.bodies.event_logs import LOG_ID, META, USAGE, block, failure, numbered, success, tok
from tests.support.bodies.random_logs import RandomAnswer, named, random_answer
from tests.support.checks.sse_reader import Read, read_events
from tests.support.checks.ui_message_checks import Page, check_chunks, read_chunks

SEEDS = range(150)


def call_of(index: int, id_: str, *texts: str) -> list[Event]:
    """Return a call of the run's own function."""
    start = BlockStart(choice=0, index=index, kind="server_tool_use", id=id_, name="look_up")
    return [start, *(tok(text, index=index) for text in texts), BlockStop(choice=0, index=index)]


def result_of(index: int, id_: str, *texts: str) -> list[Event]:
    """Return the result of such a call."""
    start = BlockStart(choice=0, index=index, kind="tool_result", id=id_)
    said = (Token(text=text, token_ids=(), index=index) for text in texts)
    return [start, *said, BlockStop(choice=0, index=index)]


def run() -> list[LoggedEvent]:
    """Return a run of everything: steps, sources, thoughts, calls with results of each kind, text of two steps."""
    return numbered(
        META,
        Status(status="step", step=1, of=2, message="Search"),
        Citation(source="help", id="7", title="Prices", url="/help/7/"),
        Citation(source="help", id="8"),
        *block(0, "thinking", "Hm", "."),
        *call_of(1, "call_a", '{"q":', '"x"}'),
        *call_of(2, "call_b"),
        *call_of(3, "call_c", "{}"),
        *result_of(4, "call_a", '{"found": [1, ', "2]}"),
        *result_of(5, "call_b", "Error: ", "Missing: q."),
        *block(6, "text", "He", "llo"),
        Citation(source="help", id="7", title="Prices", url="/help/7/", choice=0, index=6, start=0, end=2),
        *call_of(7, "call_d", "{}"),
        *result_of(8, "call_d"),
        *block(9, "text", "", "Bye"),
        Done(finish_reason="stop", usage=replace(USAGE, completion_tokens=11), latency=0.5, breakdown={"ttft": 0.125}),
    )


LOGS = {
    "run": run(),
    "plain": success(tok("He"), tok(""), tok("llo")),
    "empty": success(),
    "call": success(*block(0, "thinking", "So."), *block(1, "tool_use", '{"a":', "1}"), reason="tool_calls"),
    "failed": failure(*block(0, "text", "Hal", "f")[:-1]),
    "failed call": failure(BlockStart(choice=0, index=0, kind="tool_use", id="call_1", name="look_up")),
    "stopped": numbered(META, tok("Half"), Done(finish_reason="cancelled", usage=USAGE, kept_seq=2)),
}


def answers() -> Iterator[RandomAnswer]:
    yield from (named(log) for log in LOGS.values())
    yield from (random_answer(seed) for seed in SEEDS)


def wire(answer: RandomAnswer, joined: int = 1) -> bytes:
    encoder = chunks.encoder_for(answer)
    return b"".join(encoder.encode(logged) for logged in coalesce(answer.log, max_tokens=joined))


def page_of(name: str) -> Page:
    return check_chunks(wire(named(LOGS[name])))


def tools_of(page: Page) -> dict[str, Any]:
    return {part["toolCallId"]: part for part in page.message["parts"] if "toolCallId" in part}


def whole_of(answer: RandomAnswer) -> dict[str, Any]:
    """Return the message that a site would store of an answer."""
    folded = Answer.of(answer.log, answer.request.n)
    message, choice = UIMessage(answer.id), folded.choices[0]
    blocks = [one.as_json() for one in choice.block_texts()]
    cited = [one.payload() for one in folded.citations if one.choice in (None, 0)]
    message.add_answer(
        blocks,
        citations=cited,
        approvals=[one.payload() for one in folded.approvals],
        customs=[one.payload() for one in folded.customs],
        state=folded.state,
    )
    return message.as_json()


def in_order(parts: list[dict[str, Any]]) -> tuple[list[Any], list[str]]:
    """Return parts without sources, and the sources: what is stored does not say between which blocks they stood."""
    shown = [part for part in parts if not part["type"].startswith("source-")]
    return shown, sorted(json.dumps(part, sort_keys=True) for part in parts if part["type"].startswith("source-"))


@pytest.mark.parametrize("joined", [1, 3, 64])
def test_every_stream_keeps_the_order_and_makes_the_whole_message(joined: int) -> None:
    """However tokens are joined, a page that has read a stream has the message that a site stores."""
    for answer in answers():
        page = read_chunks(wire(answer, joined))
        is_whole = isinstance(answer.log[-1].event, Done | Error)
        assert page.is_over == is_whole
        if is_whole and not page.error and page.reason != "interrupted":
            shown, sources = in_order(page.message["parts"])
            places = {"index", "start", "end"}
            known, stored = in_order(whole_of(answer)["parts"])
            assert shown == known
            assert [without(one, places) for one in sources] == [without(one, places) for one in stored]


def without(source: str, names: set[str]) -> Any:
    """Return a source without what its first citation says: of several another may be stored first."""
    value = json.loads(source)
    value.pop("title", None)
    value.pop("url", None)
    value.pop("type")
    value.pop("mediaType", None)
    place = value["providerMetadata"]["streamserve"]
    return {**value, "providerMetadata": {name: place[name] for name in place.keys() - names}}


def frames_of(answer: RandomAnswer, log: list[LoggedEvent], after: int = 0, last_id: str = "") -> list[Read]:
    """Return what a reader gets who has the events up to `after`."""
    encoder = chunks.encoder_for(answer, last_id=last_id)
    return read_events([part for logged in log if (part := encoder.encode(logged)) and logged.seq > after])


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("most", [1, 64])
def test_a_cut_after_any_frame_loses_and_repeats_nothing(name: str, most: int) -> None:
    """Read up to a frame, then by its id the rest, its tokens joined in another way: the page has the same message."""
    answer, log = named(LOGS[name]), LOGS[name]
    whole = frames_of(answer, coalesce(log, max_tokens=most))
    expected = Page()
    for one in whole:
        expected.feed(one.data)
    assert expected.is_over
    assert len({one.id for one in whole}) == len(whole)
    for place, one in enumerate(whole):
        after = int(one.id.partition(":")[0].rpartition("-")[2])
        seen = [logged for logged in log if logged.seq <= after]
        rest = [logged for logged in log if logged.seq > after]
        for other in (1, 2, 64):
            page = Page()
            tail = frames_of(answer, [*seen, *coalesce(rest, max_tokens=other)], after, one.id)
            for read in [*whole[: place + 1], *tail]:
                page.feed(read.data)
            assert page == expected


def test_a_run_shows_what_its_functions_gave() -> None:
    """Results that are JSON as such, text as text, an error as an error; a result that is hidden ends its call."""
    page = page_of("run")
    tools = tools_of(page)
    assert all(part["type"] == "tool-look_up" and part["providerExecuted"] for part in tools.values())
    assert tools["call_a"]["input"] == {"q": "x"}
    assert tools["call_a"]["output"] == {"found": [1, 2]}
    assert (tools["call_b"]["state"], tools["call_b"]["errorText"]) == ("output-error", "Missing: q.")
    assert (tools["call_c"]["state"], tools["call_c"]["output"]) == ("output-available", None)
    assert (tools["call_d"]["state"], tools["call_d"]["output"]) == ("output-available", "")


def test_a_step_is_an_answer_with_its_results() -> None:
    """What comes after results is the next step's: pages look for open calls in the last step alone."""
    kinds = [part["type"] for part in page_of("run").message["parts"]]
    begins = [place for place, kind in enumerate(kinds) if kind == "step-start"]
    assert [kinds[begin + 1] for begin in begins] == ["source-url", "text", "text"]


def test_sources_have_an_address_or_are_documents() -> None:
    """Each source once, with the place of its first citation."""
    sources = [part for part in page_of("run").message["parts"] if part["type"].startswith("source-")]
    assert [(one["type"], one["sourceId"], one.get("title")) for one in sources] == [
        ("source-url", "help:7", "Prices"),
        ("source-document", "help:8", "help/8"),
    ]


def test_statuses_are_transient() -> None:
    """A page gets them in onData; none stays in the message."""
    page = page_of("run")
    (status,) = [one for one in page.data if one["type"] == "data-status"]
    assert status["data"] == {"status": "step", "step": 1, "of": 2, "message": "Search"}
    assert not [part for part in page.message["parts"] if part["type"].startswith("data-")]


def test_the_metadata_has_model_counts_and_figures() -> None:
    """Under the package's names."""
    metadata = page_of("plain").message["metadata"]
    assert metadata == {
        "model": "helpdesk",
        "streamId": "f" * 32,
        "created": 1_700_000_000,
        "usage": {
            "inputTokens": 9,
            "cachedInputTokens": 4,
            "outputTokens": 2,
            "reasoningTokens": 0,
            "totalTokens": 11,
        },
        "finishReason": "stop",
        "latency": 0.5,
        "ttft": 0.125,
    }


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("stop", "stop"), ("length", "length"), ("tool_calls", "tool-calls"), ("content_filter", "content-filter")],
)
def test_reasons_are_the_packages(reason: str, shown: str) -> None:
    """Of a whole answer."""
    assert check_chunks(wire(named(success(tok("a"), reason=reason)))).reason == shown


def test_a_stop_is_an_abort() -> None:
    """It keeps the text, closed, and ends as interrupted: a page then sends nothing by itself."""
    page = page_of("stopped")
    assert page.reason == "interrupted"
    assert page.message["parts"][-1] == {"type": "text", "text": "Half", "state": "done"}


def test_a_failure_is_an_error() -> None:
    """The text so far is closed; a call that was cut is an error, so that no page runs it."""
    page = page_of("failed")
    assert page.error == "The engine is gone."
    assert page.message["parts"][-1]["state"] == "done"
    (call,) = tools_of(page_of("failed call")).values()
    assert (call["state"], call["errorText"]) == ("output-error", CUT_OFF)


def test_a_server_that_stops_ends_in_an_error() -> None:
    """A clean end would be taken for a whole answer. `[DONE]` does not follow: the answer is not over."""
    encoder = chunks.encoder_for(named(LOGS["plain"]))
    (one,) = read_events(encoder.going_away(GoingAway(stream_id="s", seq=2, retry_ms=5)))
    assert json.loads(one.data)["type"] == "error"
    assert "resumeStream()" in json.loads(one.data)["errorText"]


def test_a_rebuilt_message_is_the_message() -> None:
    """The frames of its answers before, and then the next answer's, make one message."""
    before = whole_of(named(LOGS["call"]))
    before["metadata"] = {}
    encoder = chunks.encoder_for(named(LOGS["run"]), message_id=before["id"], before=chunks.replay_frames(before))
    body = encoder.first_bytes + b"".join(encoder.encode(logged) for logged in LOGS["run"])
    page = check_chunks(body)
    assert page.message["id"] == before["id"]
    assert page.message["parts"][: len(before["parts"])] == before["parts"]
    assert page.message["parts"][len(before["parts"]) :] == page_of("run").message["parts"]
    assert LOG_ID not in encoder.first_bytes.decode()
