"""Laws of `Speculation`: tokens are proposed where they are likely, rows are cheap, and that is measured to pay."""

from __future__ import annotations

from streamserve.engine.policy.speculation import MOST_PROPOSED, Proposer, Speculation, Speed

REPEATED = [*range(100, 120), *range(100, 116)]  # sixteen tokens alike


def proposed(speculation: Speculation, proposer: Proposer, *, share: float | None = 0.05, num_rows: int = 1) -> int:
    """Return how many tokens are proposed, in a step in which any may be."""
    speed = speculation.speeds.setdefault(num_rows.bit_length(), Speed())
    speed.num_steps = speed.num_steps or 1
    return len(speculation.propose(proposer, REPEATED, MOST_PROPOSED, num_rows=num_rows, share=share))


def proposer_of(speculation: Speculation) -> Proposer:
    return speculation.proposer_for(len(REPEATED), ())


def test_fewer_are_proposed_the_more_a_row_costs() -> None:
    """None in a step that is full."""
    speculation = Speculation()
    nums = [proposed(speculation, proposer_of(speculation), share=share) for share in (0.01, 0.2, 0.5, 0.8, 0.9, 1.0)]
    assert nums == sorted(nums, reverse=True)
    assert nums[0] == MOST_PROPOSED
    assert nums[-2:] == [0, 0]


def test_fewer_are_proposed_the_more_were_refused() -> None:
    """What is never accepted is proposed no longer, and again after a while."""
    speculation = Speculation()
    proposer, nums = proposer_of(speculation), []
    for _ in range(40):
        nums.append(proposed(speculation, proposer, share=0.5))
        if nums[-1]:
            speculation.note(proposer, "chat", nums[-1], 0)
    assert nums[0] > 2
    assert 0 in nums
    assert any(nums[nums.index(0) :])
    assert nums[:3] == sorted(nums[:3], reverse=True)


def test_what_is_accepted_is_proposed_further() -> None:
    """The next sequence begins with more too."""
    speculation = Speculation()
    proposer = proposer_of(speculation)
    before = proposed(speculation, proposer, share=0.5)
    for _ in range(40):
        speculation.note(proposer, "chat", 4, 4)
    assert proposed(speculation, proposer, share=0.5) > before
    assert proposed(speculation, proposer_of(speculation), share=0.5) > before
    assert (proposer.num_proposed, proposer.num_accepted) == (160, 160)
    assert speculation.num_proposed == speculation.num_accepted == {"chat": 160}


def test_until_the_time_of_steps_is_known() -> None:
    """A step of many decodes counts as full."""
    speculation = Speculation()
    assert proposed(speculation, proposer_of(speculation), share=None, num_rows=1) == MOST_PROPOSED
    assert proposed(speculation, proposer_of(speculation), share=None, num_rows=16) == 0


def test_the_slower_way_is_looked_at_now_and_then() -> None:
    """One step in 48, whichever it is."""
    for with_tokens, plain in ((50.0, 60.0), (60.0, 50.0)):
        speed = Speed(proposed=with_tokens, plain=plain)
        ways = []
        for _ in range(96):
            ways.append(speed.may_propose())
            speed.note(int(with_tokens if ways[-1] else plain), 1.0, has_proposed=ways[-1])
        assert ways.count(with_tokens < plain) == 2
