"""Laws of a branch as a prompt, and of what a message keeps of its log."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from streamserve.api.history import first_kept
from streamserve.protocol.events import (
    BlockStart,
    BlockStop,
    Citation,
    Done,
    Error,
    LoggedEvent,
    Meta,
    Status,
    Token,
    Usage,
)
from streamserve.protocol.requests import Message as Turn
from streamserve.rows.branch import answer_columns, prompt_of, question_content
from streamserve.rows.conversations import Message


def asked(text: str) -> Message:
    return Message(id=text, role="user", content=question_content(text), text=text)


def answered(*blocks: dict[str, Any]) -> Message:
    return Message(role="assistant", content=json.dumps({"blocks": list(blocks)}))


def said(text: str) -> Message:
    return answered({"index": 0, "kind": "text", "text": text})


def prompt(branch: list[Message]) -> list[Turn]:
    questions = {row.pk: Turn(role="user", content=row.text) for row in branch if row.role == "user"}
    return prompt_of(branch, questions)


def words(turns: list[Turn]) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in turns]


def test_a_branch_is_its_questions_and_answers() -> None:
    """A prompt has the messages of its branch word for word."""
    branch = [asked("Hi\nthere"), said(" Hello, "), asked("And?")]
    assert words(prompt(branch)) == [("user", "Hi\nthere"), ("assistant", " Hello, "), ("user", "And?")]


def test_a_later_turn_begins_with_the_prompt_of_the_turn_before() -> None:
    """Each prompt begins with the prompt before it and the answer that it got."""
    branch = [one for number in range(5) for one in (asked(f"q{number}"), said(f"a{number}"))]
    for end in range(3, len(branch), 2):
        before, now = prompt(branch[: end - 2]), prompt(branch[:end])
        assert now[: len(before)] == before


def test_an_answer_and_its_continuation_are_one_turn() -> None:
    """Templates want roles to alternate, and the engine has computed them as one text."""
    assert words(prompt([asked("q"), said("One, "), said("two."), asked("r")]))[1] == ("assistant", "One, two.")


def test_thoughts_are_left_out_and_whole_calls_kept() -> None:
    """A prompt has no thoughts of earlier answers, and no call that was cut."""
    branch = [
        asked("q"),
        answered(
            {"index": 0, "kind": "thinking", "text": "hm"},
            {"index": 1, "kind": "text", "text": "Let me look."},
            {"index": 2, "kind": "tool_use", "text": '{"a":1}', "id": "c1", "name": "f"},
            {"index": 3, "kind": "tool_use", "text": '{"a":', "id": "c2", "name": "f"},
        ),
        asked("r"),
    ]
    turn = prompt(branch)[1]
    assert turn.content == "Let me look."
    function = {"name": "f", "arguments": '{"a":1}'}
    assert turn.extra == {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def test_a_question_without_an_answer_is_left_out_with_it() -> None:
    """An answer that has shown nothing, and its question, are not in a later prompt; the last question is."""
    failed = Message(role="assistant", content="")
    assert words(prompt([asked("q"), failed, asked("r"), said("a"), asked("s")])) == [
        ("user", "r"),
        ("assistant", "a"),
        ("user", "s"),
    ]
    assert words(prompt([asked("q")])) == [("user", "q")]


def test_what_does_not_fit_goes_in_jumps() -> None:
    """A prompt is within its bounds, begins with a question, and begins alike for several turns."""
    rng = random.Random(7)
    sizes: list[int] = []
    begins: list[int] = []
    for _ in range(200):
        sizes += [rng.randint(1, 30), rng.randint(1, 60)]
        asked_now = [*sizes, rng.randint(1, 30)]
        are_questions = [index % 2 == 0 for index in range(len(asked_now))]
        first = first_kept(asked_now, are_questions, most_chars=1000, most_messages=40)
        assert sum(asked_now[first:]) <= 1000
        assert len(asked_now) - first <= 40
        assert are_questions[first]
        begins.append(first)
    assert begins == sorted(begins)
    assert len(set(begins)) < len(begins) / 3


def test_all_of_a_short_branch_is_kept() -> None:
    """Nothing is left out within the bounds, and the last question always stays."""
    assert first_kept([10, 10, 10], [True, False, True], most_chars=30, most_messages=3) == 0
    assert first_kept([10, 10, 5000], [True, False, True], most_chars=30, most_messages=3) == 2
    assert first_kept([], [], most_chars=30, most_messages=3) == 0


META = Meta(model="m", stream_id="s", created=1, prompt_tokens=9, cached_tokens=8)
STEP = Status(status="step", step=1, message="Looking")
SOURCE = Citation(source="help", id="1")
USAGE = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=8)


def logged(*events: Any) -> list[LoggedEvent]:
    return [LoggedEvent(seq=seq, event=event) for seq, event in enumerate(events, 1)]


def token(text: str, index: int = 0) -> Token:
    return Token(text=text, token_ids=(1,), index=index)


def test_a_message_has_blocks_citations_steps_and_counts() -> None:
    """What readers saw is in the message; NUL, which PostgreSQL refuses, only in its JSON."""
    events = logged(
        META,
        STEP,
        BlockStart(choice=0, index=0, kind="thinking"),
        token("hm"),
        BlockStop(choice=0, index=0),
        BlockStart(choice=0, index=1, kind="text"),
        token("A\0b", 1),
        SOURCE,
        BlockStop(choice=0, index=1),
        Done(finish_reason="stop", usage=USAGE),
    )
    columns = answer_columns(events, "producer_lost")
    content = json.loads(columns.pop("content"))
    assert [(one["kind"], one["text"]) for one in content["blocks"]] == [("thinking", "hm"), ("text", "A\0b")]
    assert (content["citations"], content["steps"]) == ([SOURCE.payload()], [STEP.payload()])
    assert columns == {
        "state": "done",
        "text": "A\N{REPLACEMENT CHARACTER}b",
        "finish_reason": "stop",
        "error_code": "",
        "prompt_tokens": 9,
        "cached_tokens": 8,
        "completion_tokens": 2,
    }


def test_a_stopped_answer_is_cut_where_its_reader_was() -> None:
    """Events after `kept_seq` are not in the message."""
    events = logged(META, token("one"), token("two"), token("three"), Done(finish_reason="cancelled", kept_seq=3))
    columns = answer_columns(events, "")
    assert (columns["text"], columns["state"], columns["finish_reason"]) == ("onetwo", "done", "cancelled")


@pytest.mark.parametrize(
    ("end", "code"), [(Error(code="timeout", message="Too long."), "timeout"), (None, "producer_lost")]
)
def test_a_failed_answer_keeps_what_was_shown(end: Error | None, code: str) -> None:
    """An answer that ended in an error, or whose end is lost, has its text, its counts and its error."""
    events = logged(META, token("one"), token("two"), *([] if end is None else [end]))
    columns = answer_columns(events, "producer_lost")
    assert (columns["state"], columns["text"], columns["error_code"]) == ("failed", "onetwo", code)
    assert (columns["prompt_tokens"], columns["completion_tokens"]) == (9, 2)
    assert answer_columns([], code)["error_code"] == code
