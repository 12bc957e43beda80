"""Laws of the events of a response: their grammar, their numbers, and that they make the whole response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from streamserve.dialects.encoder import coalesce
from streamserve.dialects.openai.responses import output
from streamserve.protocol.events import BlockStart, BlockStop, Citation, LoggedEvent, Token
from tests.support.bodies.event_logs import block, failure, success, tok
from tests.support.bodies.random_logs import RandomAnswer, named, random_answer
from tests.support.checks.response_checks import ResponseGrammar, check_response, events_of
from tests.support.checks.sse_reader import read_events

SEEDS = range(150)
HEAD = {
    "model": "helpdesk",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [{"type": "custom", "name": "shell"}],
}
every_answer = pytest.mark.parametrize("joined", [1, 3, 1000])


def answers() -> Iterator[RandomAnswer]:
    return (random_answer(seed, succeeds=True) for seed in SEEDS)


def wire(answer: RandomAnswer, joined: int = 1, **options: Any) -> bytes:
    encoder = output.encoder_for(answer, HEAD, **options)
    return b"".join(encoder.encode(logged) for logged in coalesce(answer.log, max_tokens=joined))


def shown(answer: RandomAnswer, joined: int = 1, **options: Any) -> list[dict[str, Any]]:
    return events_of(read_events(wire(answer, joined, **options)))


def of(*events: Any, **end: Any) -> RandomAnswer:
    return named(success(*events, **end))


@every_answer
def test_the_events_of_a_response_make_the_whole_response(joined: int) -> None:
    """By the grammar of its events, whatever its blocks are."""
    for answer in answers():
        whole = output.response_json(answer.log, answer, HEAD)
        Response.model_validate(whole)
        assert check_response(wire(answer, joined)) == whole


def test_an_answer_that_fails_keeps_the_grammar() -> None:
    """With what was shown of it."""
    for seed in SEEDS:
        answer = random_answer(seed)
        grammar = ResponseGrammar()
        for event in shown(answer):
            grammar.feed(event)
        if grammar.response is not None:
            assert grammar.response == output.response_json(answer.log, answer, HEAD)


@every_answer
def test_the_clients_own_fold_of_a_response_is_the_whole_response(joined: int) -> None:
    """The accumulator of the official client's `responses.stream`."""
    parse: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for answer in answers():
        state: Any = ResponseStreamState(input_tools=[], text_format=omit)
        for event in shown(answer, joined):
            state.handle_event(parse.validate_python(event))
        snapshot = state._ResponseStreamState__current_snapshot
        texts = [one["content"][0]["text"] for one in event["response"]["output"] if one["type"] == "message"]
        assert [one.content[0].text for one in snapshot.output if one.type == "message"] == texts
        assert [one.type for one in snapshot.output] == [one["type"] for one in event["response"]["output"]]


def test_a_number_has_the_same_place_however_tokens_are_joined() -> None:
    """What opens or closes has the same number for every reader, and each delta ends at the same text."""
    for answer in answers():
        alone, together = shown(answer), shown(answer, 1000)
        assert structure(alone) == structure(together)
        by_number = texts_at(alone)
        for number, text in texts_at(together).items():
            assert text == by_number[max(one for one in by_number if one <= number)]


def structure(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(one["sequence_number"], one["type"]) for one in events if not is_delta(one)]


def is_delta(event: dict[str, Any]) -> bool:
    return bool(event["type"].endswith(".delta"))


def texts_at(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return the text of a delta's item up to it, by its number."""
    texts: dict[str, str] = {}
    found: dict[int, str] = {}
    for one in filter(is_delta, events):
        found[one["sequence_number"]] = texts[one["item_id"]] = texts.get(one["item_id"], "") + one["delta"]
    return found


@pytest.mark.parametrize("before", [1, 1000])
@pytest.mark.parametrize("then", [1, 1000])
def test_a_reader_that_resumes_after_a_number_gets_the_rest(before: int, then: int) -> None:
    """After every number that it may have, whichever way tokens were joined before the cut and are joined after it."""
    for answer in (random_answer(seed, succeeds=True) for seed in range(25)):
        whole = output.response_json(answer.log, answer, HEAD)
        events = shown(answer, before)
        for cut in range(1, len(events)):
            number = events[cut - 1]["sequence_number"]
            seq = output.seq_before(answer.log, answer, HEAD, number)
            assert seq is not None
            grammar = ResponseGrammar()
            for event in [*events[:cut], *resumed(answer, seq, number, then)]:
                grammar.feed(event)
            assert grammar.response == whole


def resumed(answer: RandomAnswer, seq: int, number: int, joined: int) -> list[dict[str, Any]]:
    """Return the events for a reader that has those up to `number`, as a delivery feeds an encoder."""
    encoder = output.encoder_for(answer, HEAD, starting_after=number)
    for logged in answer.log[:seq]:
        encoder.encode(logged)
    rest = b"".join(encoder.encode(logged) for logged in coalesce(answer.log[seq:], max_tokens=joined))
    return events_of(read_events(rest))


def test_a_number_that_a_response_has_not_reached_is_none() -> None:
    """The reader has something that this log never said."""
    answer = of(tok("Hé"))
    last = shown(answer)[-1]["sequence_number"]
    assert output.seq_before(answer.log, answer, HEAD, last) == len(answer.log)
    assert output.seq_before(answer.log, answer, HEAD, last + 1) is None
    assert output.seq_before(answer.log, answer, HEAD, 0) == 0


def test_a_plain_text_is_a_message() -> None:
    """An item, its part, its text, and the usage."""
    events = shown(of(tok("Hé"), tok("llo")))
    assert [one["type"].removeprefix("response.") for one in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [one["sequence_number"] for one in events] == list(range(10))
    whole = events[-1]["response"]
    (item,) = whole["output"]
    assert item["content"] == [{"type": "output_text", "text": "Héllo", "annotations": [], "logprobs": []}]
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]


def test_thoughts_are_a_summary_and_calls_are_function_calls() -> None:
    """With the id and the name of the call; a call without arguments is shown too."""
    call = BlockStart(choice=0, index=1, kind="tool_use", id="call_1", name="look_up")
    stop = BlockStop(choice=0, index=1)
    whole = check_response(wire(of(*block(0, "thinking", "Hm."), call, stop, reason="tool_calls")))
    thought, called = whole["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "Hm."}]
    shown_call = {"call_id": "call_1", "name": "look_up", "arguments": "", "status": "completed"}
    assert called == {"id": f"fc_{'f' * 32}_1", "type": "function_call", **shown_call}
    assert whole["status"] == "completed"


def test_a_call_of_a_custom_tool_has_its_free_text() -> None:
    """The text is within the arguments that the model writes."""
    call = BlockStart(choice=0, index=0, kind="tool_use", id="call_1", name="shell")
    tokens = [Token(text=text, token_ids=(1,)) for text in ('{"input": "ls', ' -l"}')]
    whole = check_response(wire(of(call, *tokens, BlockStop(choice=0, index=0))))
    (item,) = whole["output"]
    assert (item["type"], item["input"], item["call_id"]) == ("custom_tool_call", "ls -l", "call_1")


def test_a_call_that_the_server_answers_has_its_output() -> None:
    """It is open until its result comes, also beside another; one without a result is incomplete."""
    events = [
        BlockStart(choice=0, index=0, kind="server_tool_use", id="a", name="look_up"),
        Token(text="{}", token_ids=(1,)),
        BlockStop(choice=0, index=0),
        BlockStart(choice=0, index=1, kind="server_tool_use", id="b", name="look_up"),
        BlockStop(choice=0, index=1),
        BlockStart(choice=0, index=2, kind="tool_result", id="a"),
        Token(text="found", token_ids=(), index=2),
        BlockStop(choice=0, index=2),
        *block(3, "text", "So."),
    ]
    whole = check_response(wire(of(*events)))
    assert [(one["type"], one["status"]) for one in whole["output"]] == [
        ("mcp_call", "completed"),
        ("mcp_call", "incomplete"),
        ("message", "completed"),
    ]
    assert whole["output"][0]["output"] == "found"


def test_sources_are_annotations_of_the_text_that_is_open() -> None:
    """At their place in that text; what is cited before any text waits for it, what comes after all is not lost."""
    cited = Citation(source="help", id="1", title="Late fees", url="https://x/1", choice=0, index=0, start=0, end=2)
    early = Citation(source="help", id="2", url="https://x/2")
    whole = check_response(wire(of(early, tok("Hé"), cited, tok("llo"))))
    (item,) = whole["output"]
    first, second = item["content"][0]["annotations"]
    assert (first["url"], first["title"], first["start_index"], first["end_index"]) == ("https://x/2", "help", 0, 0)
    assert (second["title"], second["start_index"], second["end_index"]) == ("Late fees", 0, 2)
    alone = check_response(wire(of(early)))
    assert alone["output"][0]["content"][0]["annotations"][0]["url"] == "https://x/2"


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
        ("cancelled", "cancelled", None),
        ("abandoned", "failed", None),
    ],
)
def test_the_status_says_how_the_answer_ended(reason: str, status: str, details: Any) -> None:
    """The last item says it too."""
    whole = check_response(wire(of(tok("Hé"), reason=reason)))
    assert (whole["status"], whole["incomplete_details"]) == (status, details)
    assert whole["output"][-1]["status"] == ("completed" if status == "completed" else "incomplete")
    assert (whole["completed_at"] is not None) == (status == "completed")


def test_a_failure_is_the_responses_error() -> None:
    """With our code beside the code that the API knows, and nothing after it."""
    answer = named(failure(tok("Hé")))
    whole = check_response(wire(answer))
    assert whole["status"] == "failed"
    assert whole["error"]["code"] == "server_error"
    assert b"[DONE]" not in wire(answer)


def test_done_follows_a_success_and_nothing_else() -> None:
    """As the Open Responses specification has it."""
    assert wire(of(tok("Hé"))).endswith(b"data: [DONE]\n\n")
    assert b"[DONE]" not in wire(of(tok("Hé"), reason="cancelled"))


def test_obfuscated_deltas_hide_the_length_of_their_text() -> None:
    """Their JSON is filled up to a multiple of 64 bytes."""
    for one in read_events(wire(of(tok("Hé"), tok("llo wor")), include_obfuscation=True)):
        if one.event.endswith(".delta"):
            assert len(one.data.encode()) % 64 == 0


def test_a_server_that_stops_says_so_and_the_response_goes_on() -> None:
    """The notice is an error of the connection, with a number after those that were shown."""
    answer = of(tok("Hé"))
    encoder = output.encoder_for(answer, HEAD)
    begun = b"".join(encoder.encode(logged) for logged in answer.log[:2])
    (event,) = events_of(read_events(encoder.going_away(None)))  # type: ignore[arg-type]
    assert (event["type"], event["code"]) == ("error", "engine_unavailable")
    assert event["sequence_number"] == events_of(read_events(begun))[-1]["sequence_number"] + 1


def test_an_event_id_resumes_too() -> None:
    """By `Last-Event-ID`, as in this server's other dialects."""
    for answer in (random_answer(seed, succeeds=True) for seed in range(25)):
        whole = output.encoder_for(answer, HEAD)
        read = [one for one in read_events(b"".join(map(whole.encode, answer.log))) if one.data != "[DONE]"]
        for cut, last in enumerate(read[:-1], start=1):
            log_seq, _, _ = last.id.rpartition("-")[2].partition(":")
            encoder = output.encoder_for(answer, HEAD, last_id=last.id)
            seq = int(log_seq)
            for logged in answer.log[:seq]:
                encoder.encode(logged)
            later = [encoder.encode(logged) for logged in answer.log[seq:]]
            assert events_of(read_events(b"".join(later))) == events_of(read)[cut:]


def test_a_log_so_far_is_a_response_in_progress() -> None:
    """With what there is of it."""
    log: list[LoggedEvent] = success(tok("Hé"), tok("llo"))[:-1]
    whole = output.response_json(log, named(log), HEAD)
    assert whole["status"] == "in_progress"
    assert whole["output"][0]["status"] == "in_progress"
    assert output.response_json((), named(log), HEAD, status="queued")["status"] == "queued"
