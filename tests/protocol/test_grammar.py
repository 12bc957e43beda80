"""Laws of the grammar: right sequences pass, and each wrong one is refused under the law that it breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.events import (
    Approval,
    BlockStart,
    BlockStop,
    BlockText,
    ChoiceDone,
    ChoiceText,
    Citation,
    Custom,
    Done,
    Error,
    Event,
    Meta,
    Snapshot,
    State,
    Status,
    Token,
    Unknown,
    Usage,
)
from streamserve.protocol.grammar import GrammarError, Law, check_events

META = Meta(model="m", stream_id="s", created=1)
NO_IDS = Meta(model="m", stream_id="s", created=1, has_token_ids=False)
STATUS = Status(status="prefill")
ERROR = Error(code="timeout", message="Time is up.")
WHOLE = State(snapshot="{}")
UNKNOWN = Unknown(kind="mood", fields=b"\x80")


def tok(index: int = 0, choice: int = 0, *, num_ids: int = 1) -> Token:
    return Token(text="x", token_ids=tuple(range(num_ids)), index=index, choice=choice)


def start(index: int = 0, choice: int = 0, kind: str = "text") -> BlockStart:
    return BlockStart(choice=choice, index=index, kind=kind)


def stop(index: int = 0, choice: int = 0) -> BlockStop:
    return BlockStop(choice=choice, index=index)


def choice_done(choice: int = 0) -> ChoiceDone:
    return ChoiceDone(choice=choice, finish_reason="stop")


def done(num_ids: int = 0, reason: str = "stop") -> Done:
    return Done(finish_reason=reason, usage=Usage(completion_tokens=num_ids))


def cite(index: int | None = None, choice: int | None = 0) -> Citation:
    return Citation(source="docs", id="d1", choice=choice, index=index)


def call(index: int = 0, id: str = "call_1") -> BlockStart:
    return BlockStart(choice=0, index=index, kind="server_tool_use", id=id, name="pay")


def ask(id: str = "call_1") -> Approval:
    return Approval(id=id, name="pay", arguments="{}")


def snap(*choices: ChoiceText) -> Snapshot:
    return Snapshot(seq=5, choices=choices)


THINKING = BlockText(index=0, kind="thinking", text="Hm.")
CALLING = BlockText(index=1, kind="tool_use", text="{", is_open=True)

RIGHT: dict[str, list[Event]] = {
    "an answer of nothing": [META, done()],
    "a failure at once": [META, ERROR],
    "plain text": [META, STATUS, tok(), STATUS, tok(num_ids=3), done(4)],
    "two plain choices": [META, tok(), tok(choice=1), choice_done(1), tok(), choice_done(0), done(3)],
    "three blocks": [
        META, start(0, kind="thinking"), tok(0), stop(0), start(1), tok(1), stop(1), start(2, kind="tool_use"), tok(2),
        stop(2), done(3, "tool_calls"),
    ],
    "a block of nothing": [META, start(), stop(), done()],
    "a tool call after plain text": [META, tok(), start(1, kind="tool_use"), tok(1), stop(1), done(2)],
    "blocks of two choices interleaved": [
        META, start(0), start(0, 1), tok(0), tok(0, 1), stop(0), start(1), tok(1),
        stop(0, 1), stop(1), choice_done(0), choice_done(1), done(3),
    ],
    "a kind of a later release": [META, start(kind="image"), tok(), stop(), done(1)],
    "citations": [META, cite(None, None), tok(), cite(0), cite(), start(1), cite(0), cite(1), stop(1), cite(), done(1)],
    "an interrupt": [META, tok(), call(1), tok(1), stop(1), ask(), done(2, "interrupt")],
    "an interrupt for two calls": [
        META, call(), stop(), call(1, "call_2"), stop(1), ask(), STATUS, ask("call_2"), done(0, "interrupt"),
    ],
    "an interrupt after a snapshot": [META, snap(ChoiceText(text="x")), ask(), done(9, "interrupt")],
    "stopped while it asks": [META, call(), stop(), ask(), done(0, "cancelled")],
    "unknown events": [META, UNKNOWN, tok(), UNKNOWN, done(1)],
    "a state and events of its own": [
        META, WHOLE, Custom(name="a", value="1"), tok(), State(delta="[]"), WHOLE, Custom(name="a", value="1"), done(1),
    ],
    "a patch after a snapshot with a state": [META, Snapshot(seq=5, choices=(), state="{}"), State(delta="[]"), done()],
    "tokens without ids": [NO_IDS, tok(num_ids=0), tok(num_ids=0), done(5)],
    "cut short in a block": [META, start(), tok(), done(1, "cancelled")],
    "failed in a block": [META, start(), tok(), ERROR],
    "one choice done, then a stop": [META, tok(), tok(0, 1), choice_done(0), done(2, "abandoned")],
    "a snapshot": [META, tok(), snap(ChoiceText(text="xyz")), tok(), done(99)],
    "a snapshot of blocks": [META, snap(ChoiceText(text="", blocks=(THINKING, CALLING))), tok(1), stop(1), done()],
    "a snapshot between blocks": [META, snap(ChoiceText(text="", blocks=(THINKING,))), start(1), stop(1), done()],
    "a snapshot of a choice that is done": [
        META, snap(ChoiceText(text="a"), ChoiceText(text="b", finish_reason="stop")), tok(), choice_done(), done(),
    ],
}  # fmt: skip

WRONG: dict[str, tuple[Law, list[Event]]] = {
    "no meta": (Law.META_FIRST, [tok(), done(1)]),
    "a status before meta": (Law.META_FIRST, [STATUS, META, done()]),
    "an unknown event before meta": (Law.META_FIRST, [UNKNOWN, META, done()]),
    "meta twice": (Law.META_FIRST, [META, META, done()]),
    "an end and nothing else": (Law.META_FIRST, [done()]),
    "done twice": (Law.ONE_TERMINAL, [META, done(), done()]),
    "done after error": (Law.ONE_TERMINAL, [META, ERROR, done()]),
    "a token after done": (Law.ONE_TERMINAL, [META, done(), tok()]),
    "a status after error": (Law.ONE_TERMINAL, [META, ERROR, STATUS]),
    "an unknown event after done": (Law.ONE_TERMINAL, [META, done(), UNKNOWN]),
    "an approval of no call": (Law.APPROVAL_OF_WHOLE_CALL, [META, ask(), done(0, "interrupt")]),
    "an approval of a call that is open": (Law.APPROVAL_OF_WHOLE_CALL, [META, call(), ask(), stop()]),
    "an approval of the client's own call": (
        Law.APPROVAL_OF_WHOLE_CALL, [META, start(kind="tool_use"), stop(), ask(), done(0, "interrupt")],
    ),
    "an approval twice": (Law.APPROVAL_OF_WHOLE_CALL, [META, call(), stop(), ask(), ask()]),
    "an interrupt that asks nothing": (Law.INTERRUPT_ASKS, [META, call(), stop(), done(0, "interrupt")]),
    "an approval, and a whole answer": (Law.INTERRUPT_ASKS, [META, call(), stop(), ask(), done(0)]),
    "an approval after the end": (Law.ONE_TERMINAL, [META, done(), ask()]),
    "no end": (Law.HAS_TERMINAL, [META, tok()]),
    "nothing at all": (Law.HAS_TERMINAL, []),
    "a token of a block that never began": (Law.TOKEN_IN_OPEN_BLOCK, [META, tok(1), done(1)]),
    "a token of the next block": (Law.TOKEN_IN_OPEN_BLOCK, [META, tok(0), tok(1), done(2)]),
    "a token of the block before": (Law.TOKEN_IN_OPEN_BLOCK, [META, start(0), stop(0), start(1), tok(0), done(1)]),
    "a token between blocks": (Law.TOKEN_IN_OPEN_BLOCK, [META, start(0), stop(0), tok(0), done(1)]),
    "a token of another choice's block": (Law.TOKEN_IN_OPEN_BLOCK, [META, start(0), stop(0), start(1), tok(1, 1)]),
    "a block within a block": (Law.ONE_OPEN_BLOCK, [META, start(0), start(1), stop(1), stop(0), done()]),
    "a block twice": (Law.ONE_OPEN_BLOCK, [META, start(0), start(0), stop(0), done()]),
    "a block again": (Law.BLOCKS_IN_ORDER, [META, start(0), stop(0), start(0), stop(0), done()]),
    "a first block of number 1": (Law.BLOCKS_IN_ORDER, [META, start(1), stop(1), done()]),
    "a gap between blocks": (Law.BLOCKS_IN_ORDER, [META, start(0), stop(0), start(2), stop(2), done()]),
    "block 0 after plain text": (Law.BLOCKS_IN_ORDER, [META, tok(), start(0), stop(0), done(1)]),
    "a stop without a start": (Law.STOP_OF_OPEN_BLOCK, [META, stop(0), done()]),
    "a stop of plain text": (Law.STOP_OF_OPEN_BLOCK, [META, tok(), stop(0), done(1)]),
    "a stop twice": (Law.STOP_OF_OPEN_BLOCK, [META, start(0), stop(0), stop(0), done()]),
    "a stop of another block": (Law.STOP_OF_OPEN_BLOCK, [META, start(0), stop(1), done()]),
    "a choice that ends in a block": (Law.BLOCKS_CLOSED, [META, start(0), choice_done(), done()]),
    "success in a block": (Law.BLOCKS_CLOSED, [META, start(0), done()]),
    "a choice done twice": (Law.CHOICE_DONE_ONCE, [META, choice_done(), choice_done(), done()]),
    "a token of a choice that is done": (Law.CHOICE_DONE_ONCE, [META, choice_done(), tok(), done(1)]),
    "a block of a choice that is done": (Law.CHOICE_DONE_ONCE, [META, choice_done(), start(), stop(), done()]),
    "a citation of a choice that is done": (Law.CHOICE_DONE_ONCE, [META, tok(), choice_done(), cite(0), done(1)]),
    "success of one choice of two": (Law.ALL_CHOICES_DONE, [META, tok(), tok(0, 1), choice_done(0), done(2)]),
    "a citation before any block": (Law.CITATION_OF_KNOWN_BLOCK, [META, cite(0), done()]),
    "a citation of a block to come": (Law.CITATION_OF_KNOWN_BLOCK, [META, tok(), cite(1), done(1)]),
    "a citation of block -1": (Law.CITATION_OF_KNOWN_BLOCK, [META, tok(), cite(-1), done(1)]),
    "a patch of no state": (Law.STATE_BEGINS_WHOLE, [META, State(delta="[]"), done()]),
    "a patch after a snapshot without a state": (
        Law.STATE_BEGINS_WHOLE, [META, snap(ChoiceText(text="a")), State(delta="[]"), done()]
    ),
    "a state of nothing": (Law.STATE_BEGINS_WHOLE, [META, WHOLE, State(), done()]),
    "a state that is whole and a patch": (Law.STATE_BEGINS_WHOLE, [META, State(snapshot="{}", delta="[]"), done()]),
    "an id shown twice": (Law.EACH_ID_ONCE, [META, tok(), tok(), done(1)]),
    "an id in a stream without ids": (Law.EACH_ID_ONCE, [NO_IDS, tok(), done(1)]),
    "an id that was not shown": (Law.EACH_ID_ONCE, [META, tok(), done(2)]),
    "an id too many of a stop": (Law.EACH_ID_ONCE, [META, tok(num_ids=2), done(1, "cancelled")]),
    "a token after a snapshot's last block": (
        Law.TOKEN_IN_OPEN_BLOCK, [META, snap(ChoiceText(text="", blocks=(THINKING,))), tok(0), done()]
    ),
    "a token of a choice that a snapshot ended": (
        Law.CHOICE_DONE_ONCE, [META, snap(ChoiceText(text="a", finish_reason="stop")), tok(), done()]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_sequence_passes(name: str) -> None:
    """The machine takes every event, and ends."""
    check_events(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_sequence_names_the_law_it_breaks(name: str) -> None:
    """Each violation is found under its own law."""
    law, events = WRONG[name]
    with pytest.raises(GrammarError) as caught:
        check_events(events)
    assert caught.value.law is law
    assert law.value in str(caught.value)


def test_every_law_can_be_broken() -> None:
    """The table above has a sequence for each law."""
    assert {law for law, _ in WRONG.values()} == set(Law)


@pytest.mark.parametrize("name", RIGHT)
def test_the_end_of_a_right_sequence_passes_as_a_part(name: str) -> None:
    """A reader that resumes after any event sees no violation in what follows."""
    events = RIGHT[name]
    for after in range(1, len(events)):
        check_events(events[after:], is_part=True)


PARTS: dict[str, tuple[Law, list[Event]]] = {
    "meta in the middle": (Law.META_FIRST, [META, done()]),
    "a stop twice": (Law.STOP_OF_OPEN_BLOCK, [stop(3), stop(3), done()]),
    "two blocks at once": (Law.TOKEN_IN_OPEN_BLOCK, [tok(2), tok(3), done()]),
    "a gap between blocks": (Law.BLOCKS_IN_ORDER, [stop(3), start(5), stop(5), done()]),
    "a token after its block": (Law.TOKEN_IN_OPEN_BLOCK, [stop(3), tok(3), done()]),
    "a start in an explicit block": (Law.ONE_OPEN_BLOCK, [tok(2), start(3), stop(3), done()]),
    "a choice done twice": (Law.CHOICE_DONE_ONCE, [choice_done(), choice_done(), done()]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_judged_by_what_it_shows(name: str) -> None:
    """Events after a resume must be in order among themselves."""
    law, events = PARTS[name]
    with pytest.raises(GrammarError) as caught:
        check_events(events, is_part=True)
    assert caught.value.law is law


ALPHABET: list[Event] = [META, STATUS, UNKNOWN, ERROR, done(1), done(0, "cancelled")]
ALPHABET += [make(index, choice) for make in (tok, start, stop) for index in (0, 1) for choice in (0, 1)]
ALPHABET += [choice_done(0), choice_done(1), cite(), cite(0), cite(1), cite(None, None)]


@given(st.lists(st.sampled_from(ALPHABET), max_size=10))
def test_any_sequence_is_taken_or_refused_by_law(events: list[Event]) -> None:
    """The tables have no hole: a sequence passes or raises GrammarError."""
    try:
        check_events([META, *events])
    except GrammarError:
        return
    assert isinstance(events[-1], Done | Error)
