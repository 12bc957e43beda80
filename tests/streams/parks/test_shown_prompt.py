"""An answer that begins with its prompt: a park, at any point, repeats nothing of it."""

from __future__ import annotations

from streamserve.protocol.events import BlockStart, PositionLogprobs, Token, TokenLogprob
from streamserve.streams.shown_prompt import ShownPrompt


def test_only_what_comes_first_is_of_the_prompt() -> None:
    """Text and log-probabilities are counted for each choice up to its first id or block."""
    one = PositionLogprobs(chosen=TokenLogprob(token_id=1, token="a", bytes_=b"a", logprob=None))
    shown = ShownPrompt()
    taken = [
        shown.takes(event)
        for event in (
            Token(text="The ", token_ids=()),
            Token(text="The quiet", token_ids=(), choice=1),
            Token(text="quiet", token_ids=()),
            Token(text="", token_ids=(), logprobs=(one, one)),
            Token(text=" river", token_ids=(5,)),
            Token(text="held back", token_ids=()),
            BlockStart(choice=1, index=1, kind="thinking"),
            Token(text="thought", token_ids=(), choice=1, index=1),
        )
    ]
    assert taken == [True] * 4 + [False] * 4
    assert shown.num_chars(3) == (9, 9, 0)
    assert shown.num_logprobs == 2
