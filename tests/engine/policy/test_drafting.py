"""Laws of `Drafting`: a draft model proposes where its tokens are likely, its passes are cheap, and that pays."""

from __future__ import annotations

from streamserve.engine.plan import Chunk, Draft, Sampled, StepPlan, StepResult
from streamserve.engine.policy.drafting import Drafting, Pays, most_missing, num_left
from streamserve.engine.policy.speculation import DRAFTED, MOST_PROPOSED, Proposer, Speculation
from streamserve.engine.step_time import StepTime
from tests.support.engines.cores import sampling


def proposer_of(rate: float | None = None) -> Proposer:
    """Return one whose tokens are accepted at about a rate."""
    proposer = Speculation().proposer_for(10, ())
    if rate is not None:
        proposer.acceptance._by_kind[DRAFTED] = rate
    return proposer


def depth(weight: float, proposer: Proposer | None = None, **fields: int) -> int:
    numbers = {"num_missing": 2, "num_left": 100, "num_rows": 1, **fields}
    most = numbers.pop("most", MOST_PROPOSED)
    drafting = Drafting(weight=weight, max_len=1_000)
    return drafting.depth(proposer or proposer_of(), most, step_time=StepTime(), **numbers)


def test_fewer_are_proposed_the_more_a_pass_costs() -> None:
    """And none where passes cost what they bring."""
    depths = [depth(weight) for weight in (0.01, 0.1, 0.3, 0.9)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 3
    assert depths[-1] == 0


def test_fewer_are_proposed_the_more_are_refused() -> None:
    """Down to none, and with all accepted as many as may be."""
    depths = [depth(0.02, proposer_of(rate)) for rate in (0.98, 0.8, 0.5, 0.05)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == MOST_PROPOSED
    assert depths[-1] == 0
    assert depth(0.02, proposer_of(0.98), most=4) == 4


def test_none_are_proposed_in_a_full_step() -> None:
    """Where each row costs as much as it can bring."""
    assert depth(0.1, num_rows=1) > 0
    assert depth(0.1, num_rows=16) == 0


def test_what_the_lookup_has_found_goes_before_what_is_no_faster() -> None:
    """The draft model is asked where it should give more."""
    proposer = proposer_of(0.8)
    proposer.speed = 1.2
    assert depth(0.1, proposer) > 0
    proposer.speed = 8.0
    assert depth(0.1, proposer) == 0


def test_a_long_prompt_is_computed_for_an_answer_that_wins_it_back() -> None:
    """An answer is taken to go on for as long as it has lasted."""
    assert depth(0.1, num_missing=2_000, num_left=num_left(3, 500)) == 0
    assert depth(0.1, num_missing=2_000, num_left=num_left(300, 500)) > 0
    assert num_left(300, 5) == 5


def test_what_was_refused_is_tried_again_after_a_while() -> None:
    """Rates drift back while nothing is proposed."""
    proposer = proposer_of(0.05)
    depths = [depth(0.1, proposer) for _ in range(300)]
    assert depths[0] == 0
    assert depths[-1] > 0


def test_the_measured_time_of_passes_replaces_the_guess() -> None:
    """A draft model whose passes take long is asked for less than its weights suggest."""
    drafting, step_time = Drafting(weight=0.02, max_len=1_000), StepTime()
    for num_tokens in [1, 64] * 20:
        plan = StepPlan(step_id=0, chunks=(Chunk(seq_id=1, start=0, token_ids=(7,) * num_tokens, block_table=(1,)),))
        step_time.note(plan, 0.100 + 0.0001 * num_tokens)
        drafting.note_pass(plan, 0.080 + 0.0001 * num_tokens)
    few = drafting.depth(proposer_of(), 15, num_missing=1, num_left=99, num_rows=1, step_time=step_time)
    assert few == 0 < depth(0.02)
    assert most_missing(drafting, 0.07, start=0, unfitted=256) < most_missing(drafting, 1.0, start=0, unfitted=256)


def play(pays: Pays, num_steps: int, *, drafted: float, plain: float) -> list[bool]:
    """Return in which of the steps tokens are drafted, where both ways give so many tokens a second."""
    ways = []
    for _ in range(num_steps):
        ways.append(pays.may_draft())
        pays.note(100, 100 / (drafted if ways[-1] else plain), has_drafted=ways[-1], is_measure=True)
    return ways


def test_a_draft_model_that_does_not_pay_is_asked_ever_more_seldom() -> None:
    """In fewer than one step in fifty, over a thousand steps."""
    ways = play(Pays(), 2_000, drafted=50.0, plain=60.0)
    assert sum(ways[:48]) <= 5
    assert sum(ways) < 40
    assert any(ways[1_000:])


def test_a_draft_model_that_pays_is_asked_in_nearly_every_step() -> None:
    """Without it two steps in 48."""
    ways = play(Pays(), 480, drafted=90.0, plain=60.0)
    assert ways.count(False) == 20


def test_a_draft_model_that_begins_to_pay_is_found_out() -> None:
    """Within a few looks, and then it is asked again."""
    pays = Pays()
    play(pays, 100, drafted=50.0, plain=60.0)
    ways = play(pays, 2_000, drafted=90.0, plain=60.0)
    assert sum(ways[-400:]) > 300


def asked(num_missing: int = 1, num_wanted: int = 3) -> tuple[Draft, ...]:
    draft = Draft(
        seq_id=1, start=0, token_ids=(7,) * num_missing, block_table=(1,), sampling=sampling(), num_wanted=num_wanted
    )
    return (draft,)


def test_passes_count_as_time_of_their_step() -> None:
    """A step is as slow as both together; a step that computed a prompt for the draft model is no measure."""
    drafting = Drafting(weight=0.1, max_len=1_000)
    plan = StepPlan(step_id=0, chunks=(Chunk(seq_id=1, start=9, token_ids=(7,), block_table=(1,)),))
    result = StepResult(step_id=0, sampled=(Sampled(seq_id=1, token_ids=(7, 8)),))
    drafting._pays(1).num_steps = 5
    for num_missing in (1, 300):
        assert drafting.may_draft(1)
        drafting.begin(asked(num_missing), 1)
        drafting.note_pass(plan, 0.5)
        drafting.note_pass(plan, 0.5)
        assert drafting.note_step(plan, result, 1.0)
    assert drafting._pays(1).drafted.count == 1
    assert drafting._pays(1).drafted.value == 1.0  # two tokens in two seconds


def test_it_rests_after_a_pass_out_of_memory() -> None:
    """For some hundred steps."""
    drafting = Drafting(weight=0.1, max_len=1_000)
    drafting._pays(1).num_steps = 5
    drafting.rest()
    assert not any(drafting.may_draft(1) for _ in range(100))


def test_a_look_is_bounded_by_the_time_since_the_last() -> None:
    """What sequences have become meanwhile is not computed only to look; a new sequence is, after a while."""
    drafting, step_time = Drafting(weight=0.2, max_len=1_000), StepTime()
    pays = drafting._pays(1)
    assert drafting.most_to_look(1, step_time) == float("inf")
    play(pays, 48, drafted=50.0, plain=60.0)
    before = drafting.most_to_look(1, step_time)
    assert before < 100
    for _ in range(400):
        assert pays.may_draft()  # the look waits
        pays.note(100, 2.0, has_drafted=False, is_measure=True)
    assert before < 300 < drafting.most_to_look(1, step_time) < 1_000
