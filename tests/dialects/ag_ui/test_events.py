"""Laws of AG-UI runs: every log gives a run in the protocol's order, whole or resumed after any frame."""

from __future__ import annotations

import random
from typing import Any

import pytest

from streamserve.dialects.ag_ui.events import CITATION, STATUS, RunIds, answer_messages, encoder_for
from streamserve.dialects.encoder import coalesce
from streamserve.dialects.fold import TOOL_USE, Answer
from streamserve.protocol.events import (
    BlockStart,
    BlockStop,
    Citation,
    Custom,
    Done,
    Error,
    GoingAway,
    LoggedEvent,
    State,
    Status,
    Token,
)
from streamserve.protocol.ids import parse_event_id
from tests.support.bodies.event_logs import META, USAGE, block, blocks, interrupted, numbered, tok
from tests.support.bodies.random_logs import RandomAnswer, named, random_answer
from tests.support.checks.run_checks import Page, check_run, events_of
from tests.support.checks.sse_reader import read_events

IDS = RunIds(thread_id="thread-1", run_id="run-1", message_id="m1")


def shown(answer: RandomAnswer, joined: int = 1, *, after: int = 0, last_id: str = "") -> bytes:
    """Return what a reader gets who has the events up to `after`, and the frame `last_id`."""
    encoder = encoder_for(answer, ids=IDS, last_id=last_id)
    for logged in answer.log[:after]:
        encoder.encode(logged)
    return b"".join(encoder.encode(logged) for logged in coalesce(answer.log[after:], max_tokens=joined))


def run_of_everything() -> list[LoggedEvent]:
    """Return a log of a pipeline's run with all that AG-UI shows."""
    return numbered(
        META,
        Status(status="queued", step=2),
        Status(status="step", step=1, of=2, message="Look"),
        State(snapshot='{"found":[]}'),
        Citation(source="help", id="7", title="Prices", url="/help/7/"),
        Custom(name="chart", value='{"points":[1,2]}'),
        *block(0, "thinking", "Hm", "", "."),
        BlockStart(choice=0, index=1, kind="text"),
        tok("I ", index=1),
        tok("look.", index=1),
        BlockStop(choice=0, index=1),
        BlockStart(choice=0, index=2, kind="server_tool_use", id="a1", name="find"),
        tok('{"q":', index=2),
        tok('"x"}', index=2),
        BlockStop(choice=0, index=2),
        BlockStart(choice=0, index=3, kind="server_tool_use", id="a2", name="find"),
        BlockStop(choice=0, index=3),
        BlockStart(choice=0, index=4, kind="tool_result", id="a1"),
        Token(text="Three ", token_ids=(), index=4),
        Token(text="pages.", token_ids=(), index=4),
        BlockStop(choice=0, index=4),
        BlockStart(choice=0, index=5, kind="tool_result", id="a2"),
        BlockStop(choice=0, index=5),
        State(delta='[{"op":"add","path":"/found/-","value":7}]'),
        Status(status="step", step=2, of=2, message="Write"),
        BlockStart(choice=0, index=6, kind="text"),
        tok("It costs ", index=6),
        tok("3 euros.", index=6),
        BlockStop(choice=0, index=6),
        Done(finish_reason="stop", usage=USAGE, latency=0.5),
    )


def test_a_run_shows_everything_in_its_place() -> None:
    """Messages with their calls and results, thoughts, steps, state, citations and events of the pipeline's own."""
    page = Page().read(events_of(shown(named(run_of_everything()))))
    call = {"name": "find", "arguments": '{"q":"x"}'}
    assert page.messages == [
        {"id": "m1:thought-1", "role": "reasoning", "content": "Hm."},
        {
            "id": "m1",
            "role": "assistant",
            "content": "I look.",
            "toolCalls": [{"id": "a1", **call}, {"id": "a2", "name": "find", "arguments": ""}],
        },
        {"id": "m1:result-1", "role": "tool", "toolCallId": "a1", "content": "Three pages."},
        {"id": "m1:result-2", "role": "tool", "toolCallId": "a2", "content": ""},
        {"id": "m1:1", "role": "assistant", "content": "It costs 3 euros."},
    ]
    assert page.steps == ["Look", "Write"]
    assert page.state == {"found": [7]}
    cited = {"source": "help", "id": "7", "title": "Prices", "url": "/help/7/"}
    assert page.customs == [
        (STATUS, {"status": "queued", "step": 2}),
        (CITATION, cited),
        ("chart", {"points": [1, 2]}),
    ]
    assert page.end == {
        "type": "RUN_FINISHED",
        "threadId": "thread-1",
        "runId": "run-1",
        "outcome": {"type": "success"},
        "usage": [
            {"model": "helpdesk", "inputTokens": 9, "outputTokens": 2, "totalTokens": 11, "cachedInputTokens": 4}
        ],
        "metadata": {"finishReason": "stop", "latency": 0.5},
    }


def test_an_answer_that_is_kept_has_the_messages_that_were_shown() -> None:
    """Of every log that has an end: the same messages, under the same ids."""
    for answer in logs():
        blocks_ = [one.as_json() for one in Answer.of(answer.log, answer.request.n).choices[0].block_texts()]
        page = Page().read(events_of(shown(answer)))
        kept = answer_messages("m1", blocks_)
        for one in kept:
            for call in one.get("toolCalls", ()):
                call |= call.pop("function")
                del call["type"]
        assert kept == page.messages


def logs() -> list[RandomAnswer]:
    made = [named(log) for log in (run_of_everything(), blocks(), interrupted())]
    return [*made, *(random_answer(seed, succeeds=bool(seed % 3)) for seed in range(80))]


@pytest.mark.parametrize("joined", [1, 3, 100])
def test_every_log_gives_a_run_in_order(joined: int) -> None:
    """The protocol's order and shapes, whatever the log has; the text is the answer's."""
    for answer in logs():
        events = events_of(shown(answer, joined))
        check_run(events, is_whole=isinstance(answer.log[-1].event, Done | Error))
        choice = Answer.of(answer.log, answer.request.n).choices[0]
        page = Page().read(events)
        assert page.text == choice.text
        pending = [call["id"] for one in page.messages for call in one.get("toolCalls", ())]
        wanted = [part.block.id for part in choice.blocks if part.kind == TOOL_USE]
        if wanted and page.end.get("outcome", {}).get("type") == "success":
            assert page.end["outcome"]["pendingToolCallIds"] == wanted == pending


def test_a_reader_resumes_after_any_frame() -> None:
    """What it has and what it gets are the whole run, however its tokens are joined the second time."""
    for answer in logs()[:25]:
        whole = shown(answer)
        frames = read_events(whole)
        events = events_of(whole)
        for index, frame in enumerate(frames):
            place = parse_event_id(frame.id)
            assert place is not None
            rest = shown(answer, random.Random(index).choice([1, 3, 100]), after=place[1], last_id=frame.id)
            check_run(events_of(rest), is_part=True, is_whole=False)
            assert folded(events[: index + 1], events_of(rest)) == folded(events, [])


def folded(had: list[dict[str, Any]], rest: list[dict[str, Any]]) -> tuple[Any, ...]:
    page = Page().read([*had, *rest])
    return page.messages, page.steps, page.state, page.customs, page.end


def test_an_interrupt_names_what_its_user_is_asked() -> None:
    """Its id has the stream and the call, so that the answer to it names the run that it continues."""
    page = Page().read(events_of(shown(named(interrupted()))))
    outcome = page.end["outcome"]
    assert outcome["type"] == "interrupt"
    (asked,) = outcome["interrupts"]
    assert asked["id"] == f"{'f' * 32}:call_2"
    assert (asked["toolCallId"], asked["reason"], asked["message"]) == ("call_2", "tool_call", "Cancel invoice 7?")
    assert asked["responseSchema"]["properties"]["approved"] == {"type": "boolean"}


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        (Done(finish_reason="cancelled", usage=USAGE), ("RUN_FINISHED", {"type": "cancelled"}, None)),
        (Done(finish_reason="abandoned", usage=USAGE), ("RUN_ERROR", None, "abandoned")),
        (Error(code="timeout", message="Time is up."), ("RUN_ERROR", None, "timeout")),
        (Done(finish_reason="length", usage=USAGE), ("RUN_FINISHED", {"type": "success"}, None)),
    ],
)
def test_each_end_has_its_event(end: Done | Error, wanted: tuple[Any, ...]) -> None:
    """A stop is an outcome; any other failure an error with our code. What was open is closed before."""
    log = numbered(
        META, Status(status="step", step=1, message="Look"), BlockStart(choice=0, index=0, kind="text"), tok("a")
    )
    if isinstance(end, Done) and end.finish_reason == "length":
        log = numbered(*(one.event for one in log), BlockStop(choice=0, index=0))
    events = events_of(shown(named([*log, LoggedEvent(len(log) + 1, end)])))
    check_run(events)
    last = events[-1]
    assert (last["type"], last.get("outcome"), last.get("code")) == wanted


def test_a_server_that_stops_ends_with_an_error_that_is_retryable() -> None:
    """A clean end would be taken for a whole answer."""
    answer = named(run_of_everything())
    encoder = encoder_for(answer, ids=IDS)
    head = b"".join(encoder.encode(logged) for logged in answer.log[:9])
    events = events_of(head + encoder.going_away(GoingAway(stream_id=answer.id, seq=9, retry_ms=5)))
    check_run(events)
    assert (events[-1]["type"], events[-1]["code"]) == ("RUN_ERROR", "engine_unavailable")
    assert events[-1]["metadata"] == {"retryable": True}
