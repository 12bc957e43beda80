"""Laws of `Speculation`: tokens are tried where they are likely, rows are cheap, and that is measured to pay."""

from __future__ import annotations

from streamserve.engine.policy.speculation import MOST_TRIED, Guesses, Rates, Speculation

REPEATED = [*range(100, 120), *range(100, 116)]  # sixteen tokens alike


def proposed(speculation: Speculation, guesses: Guesses, *, share: float | None = 0.05, num_rows: int = 1) -> int:
    """Return how many tokens are tried, in a step in which any may be."""
    rates = speculation.rates.setdefault(num_rows.bit_length(), Rates())
    rates.num_steps = rates.num_steps or 1
    return len(speculation.propose(guesses, REPEATED, MOST_TRIED, num_rows=num_rows, share=share))


def guesses_of(speculation: Speculation) -> Guesses:
    return speculation.guesses_for(len(REPEATED), ())


def test_fewer_are_tried_the_more_a_row_costs() -> None:
    """None in a step that is full."""
    speculation = Speculation()
    tried = [proposed(speculation, guesses_of(speculation), share=share) for share in (0.01, 0.2, 0.5, 0.8, 0.9, 1.0)]
    assert tried == sorted(tried, reverse=True)
    assert tried[0] == MOST_TRIED
    assert tried[-2:] == [0, 0]


def test_fewer_are_tried_the_more_were_wrong() -> None:
    """What never proves right is tried no longer, and again after a while."""
    speculation = Speculation()
    guesses, tried = guesses_of(speculation), []
    for _ in range(40):
        tried.append(proposed(speculation, guesses, share=0.5))
        if tried[-1]:
            speculation.note(guesses, "chat", tried[-1], 0)
    assert tried[0] > 2
    assert 0 in tried
    assert any(tried[tried.index(0) :])
    assert tried[:3] == sorted(tried[:3], reverse=True)


def test_what_proves_right_is_tried_further() -> None:
    """The next sequence begins with more too."""
    speculation = Speculation()
    guesses = guesses_of(speculation)
    before = proposed(speculation, guesses, share=0.5)
    for _ in range(40):
        speculation.note(guesses, "chat", 4, 4)
    assert proposed(speculation, guesses, share=0.5) > before
    assert proposed(speculation, guesses_of(speculation), share=0.5) > before
    assert (guesses.num_tried, guesses.num_right) == (160, 160)
    assert speculation.num_tried == speculation.num_right == {"chat": 160}


def test_until_the_time_of_steps_is_known() -> None:
    """A step of many decodes counts as full."""
    speculation = Speculation()
    assert proposed(speculation, guesses_of(speculation), share=None, num_rows=1) == MOST_TRIED
    assert proposed(speculation, guesses_of(speculation), share=None, num_rows=16) == 0


def test_the_slower_way_is_looked_at_now_and_then() -> None:
    """One step in 48, whichever it is."""
    for tried, plain in ((50.0, 60.0), (60.0, 50.0)):
        rates = Rates(tried=tried, plain=plain)
        ways = []
        for _ in range(96):
            ways.append(rates.may_try())
            rates.note(int(tried if ways[-1] else plain), 1.0, has_tried=ways[-1])
        assert ways.count(tried < plain) == 2
