"""`Constraints`: which token may be next, and which ends the answer; row by row, with what is pending and proposed."""

from __future__ import annotations

from dataclasses import replace

from streamserve.engine.constraints import Constraints
from streamserve.engine.kv.holding import Holding
from streamserve.protocol.requests import SamplingParams

PROMPT = (7, 8, 9)
EOS = frozenset({2})
PLAIN = SamplingParams(max_tokens=8, seed=1)


def constraints(sampling: SamplingParams = PLAIN, bad_words: tuple[tuple[int, ...], ...] = ()) -> Constraints:
    return Constraints.of(sampling, PROMPT, EOS, None, bad_words)


def test_stop_tokens_end_an_answer_beside_eos() -> None:
    """With `ignore_eos` they alone do."""
    asked = replace(PLAIN, stop_token_ids=(5,))
    assert constraints(asked).end_ids == {2, 5}
    assert constraints(replace(asked, ignore_eos=True)).end_ids == {5}
    assert constraints(asked).before_end((3, 4, 5, 6)) == (3, 4)


def test_no_token_ends_an_answer_before_min_tokens() -> None:
    """The ends are banned until then, tokens that are pending or proposed counted; a last token is one too many."""
    asked = constraints(replace(PLAIN, min_tokens=2))
    assert [asked.is_end(2, num_output_tokens) for num_output_tokens in (1, 2, 3)] == [False, False, True]
    specs = asked.specs([*PROMPT], 1, (4, 5), Holding())
    assert [(spec.position, spec.banned_token_ids) for spec in specs] == [(4, (2,)), (5, ()), (6, ())]


def test_nothing_is_chosen_after_a_proposed_end() -> None:
    """What would come after it is no part of the answer."""
    assert [spec.position for spec in constraints().specs([*PROMPT, 4], 0, (5, 2, 6), Holding())] == [4, 5]


def test_rules_are_made_where_something_is_asked_for() -> None:
    """A bad word is completed by the last proposed token as by a known token."""
    assert constraints().rules is None
    asked = constraints(bad_words=((4, 5),))
    first, second = asked.specs([*PROMPT, 6], 0, (4,), Holding())
    assert first.rules is second.rules is asked.rules
    assert (first.bad_endings, second.bad_endings) == (((4, 5),), ((4, 5),))


def test_a_penalty_slot_is_begun_once() -> None:
    """A draw has all tokens before it until a launched step has counted them."""
    asked = constraints(replace(PLAIN, presence_penalty=0.5))
    assert asked.has_penalties
    held = Holding(penalty_slot=3)
    [begins] = asked.specs([*PROMPT, 4], 0, (), held)
    assert (begins.penalty_slot, begins.prompt_token_ids, begins.output_token_ids) == (3, PROMPT, (4,))
    held.is_counted = True
    [continues] = asked.specs([*PROMPT, 4], 0, (), held)
    assert (continues.penalty_slot, continues.prompt_token_ids, continues.output_token_ids) == (3, (), ())
