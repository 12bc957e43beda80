"""Laws of the transcript: how many tokens of each choice a reader has after any event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.engine import Accepted
from streamserve.protocol.events import BlockStart, BlockStop, Event, Status, Token
from streamserve.streams.transcript import Transcript

ACCEPTED = Accepted(num_prompt_tokens=3, max_tokens=99, seed=1)
# Most events bring one token, some none or several, some are no tokens.
EVENTS = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 2]), st.sampled_from([1, 1, 1, 1, 0, 2, 5, None])), max_size=60
)


def event_of(choice: int, num_tokens: int | None, seq: int) -> Event:
    if num_tokens is None:
        return Status(status="waiting")
    return Token(text="x", token_ids=tuple(range(seq, seq + num_tokens)), choice=choice)


@given(events=EVENTS)
def test_what_was_delivered(events: list[tuple[int, int | None]]) -> None:
    """The count at every event, and past the last, equals that of a plain loop."""
    tally, counts, ids = Transcript(ACCEPTED, 3, 0.0), [[0, 0, 0]], [[], [], []]
    for seq, (choice, num_tokens) in enumerate(events, 1):
        tally.note(event_of(choice, num_tokens, seq), seq)
        counts.append(list(counts[-1]))
        counts[-1][choice] += num_tokens or 0
        ids[choice] += range(seq, seq + (num_tokens or 0))
    assert [list(tally.delivered(seq)) for seq in range(len(counts))] == counts
    assert list(tally.delivered(1000)) == counts[-1]
    assert tally.token_ids == tuple(map(tuple, ids))


def test_thoughts_are_counted() -> None:
    """The tokens of thinking blocks, with their tags, are a part of the usage, whatever ends the answer."""
    transcript = Transcript(ACCEPTED, 2, 0.0)
    events = [
        Token(text="", token_ids=(1,)),
        BlockStart(choice=0, index=1, kind="thinking"),
        Token(text="a", token_ids=(2, 3), index=1),
        Token(text="b", token_ids=(4,), choice=1),
        BlockStop(choice=0, index=1),
        BlockStart(choice=0, index=2, kind="text"),
        Token(text="c", token_ids=(5,), index=2),
    ]
    for seq, event in enumerate(events, 1):
        transcript.note(event, seq)
    assert (transcript.usage.completion_tokens, transcript.usage.reasoning_tokens) == (5, 2)
