"""Laws of a stream's life: the one table of its changes, walked whole."""

from __future__ import annotations

from itertools import product

import pytest

from streamserve.streams.life import NEXT, OVER, WRITING, Cause, IllegalChange, Life, after

# What follows each state. A cause that is not here is a fault of the server.
TABLE = """
opening    admitted running, parked parked, ending ending, failed ending
running    parked parked, outage cut, ending ending, failed ending, fenced following
parked     admitted running, outage cut, ending ending, failed ending, released following, fenced following
cut        outage over parked, ending cut, failed ending, released following, fenced following
ending     outage cut, failed ending, released claiming, fenced claiming
following  ending claiming, claimed parked
claiming   claimed ending, declined following
leaving    terminal finished, loss lost, closed left
"""
ALWAYS = "terminal finished, loss lost, leave leaving, broke broken"  # of the states before leaving


def written() -> dict[tuple[str, str], str]:
    """Return the table above, by state and cause."""
    changes = {}
    for line in TABLE.split("\n")[1:-1]:
        life, rest = line.split(maxsplit=1)
        for change in rest.split(", ") + ([] if life == "leaving" else ALWAYS.split(", ")):
            cause, then = change.rsplit(" ", 1)
            changes[life, cause] = then
    return changes


def test_the_table_is_the_one_written_here() -> None:
    """For each state and each cause: the state that follows, or a named refusal."""
    changes = written()
    for life, cause in product(Life, Cause):
        if (life.value, cause.value) in changes:
            assert after(life, cause).value == changes.pop((life.value, cause.value))
        else:
            with pytest.raises(IllegalChange, match=rf"that is {life.value} cannot change by '{cause.value}'"):
                after(life, cause)
    assert not changes


def test_a_life_that_is_over_never_changes() -> None:
    """Exactly the states without a change are over, and nothing is committed in them."""
    assert set(OVER) == {life for life in Life if not NEXT[life]}
    assert not [life for life in OVER if life in WRITING]


def reached_from(*begins: Life) -> set[Life]:
    """Return every state that follows these, however many changes later."""
    reached, to_do = set(begins), list(begins)
    while to_do:
        new = set(NEXT[to_do.pop()].values()) - reached
        reached |= new
        to_do += new
    return reached


def test_every_state_is_reached() -> None:
    """From the two states in which a stream begins: a new one, and one of another process."""
    assert reached_from(Life.OPENING, Life.FOLLOWING) == set(Life)


@pytest.mark.parametrize("life", [life for life in Life if life not in OVER], ids=lambda life: life.value)
def test_every_life_can_end(life: Life) -> None:
    """With its terminal event in the log, or its log lost; what is not left yet can be continued elsewhere."""
    assert {Life.FINISHED, Life.LOST, Life.LEFT} <= reached_from(life)


def test_the_engine_works_only_for_who_writes_the_log() -> None:
    """Who follows is admitted only after a claim: there is one producer."""
    assert {life for life in Life if NEXT[life].get(Cause.ADMITTED)} == {Life.OPENING, Life.PARKED}
    assert all(NEXT[life].get(Cause.ADMITTED) is None for life in Life if life not in WRITING)
