"""`Life`: where a stream is in its life, in this process; `NEXT`: the one table of all changes. Pure.

    OPENING ──► RUNNING ◄──► PARKED ──► ENDING ──► FINISHED       this process writes the log
                   │           ▲ │         ▲
                   └──► CUT ───┘ │         │ CLAIMED
                         │ RELEASED        │
                         ▼       ▼         │
                       FOLLOWING ◄──► CLAIMING                    another process writes it, or none

From every state that is not over a stream may also become FINISHED (its end is in the log), LOST, BROKEN or LEAVING,
which ends in LEFT. The idea of a table is h11's (`_state.py`).
"""

from __future__ import annotations

from enum import Enum


class Life(Enum):
    """Where a stream is, in this process. From FINISHED on it is over here."""

    OPENING = "opening"  # its first event is being committed
    RUNNING = "running"  # the engine makes it
    PARKED = "parked"  # the engine holds no part of it, and is asked again when that is due
    CUT = "cut"  # an outage of its log lasts: no token is made, and any process may continue it
    ENDING = "ending"  # its terminal event is decided, and being committed
    FOLLOWING = "following"  # another process writes its log, or none does
    CLAIMING = "claiming"  # its terminal event is decided, and this process does not write its log yet
    LEAVING = "leaving"  # it is given up here, for another process to continue
    FINISHED = "finished"  # its terminal event is in the log
    LOST = "lost"  # its log no longer has it
    LEFT = "left"  # another process continues it
    BROKEN = "broken"  # it ends without a terminal event in its log


class Cause(Enum):
    """Why a stream's life changes."""

    ADMITTED = "admitted"  # the engine makes it from now on
    PARKED = "parked"  # the engine holds no part of it
    OUTAGE = "outage"  # of the log, too long to wait for
    OUTAGE_OVER = "outage over"  # and no other process can have continued it
    ENDING = "ending"  # a terminal event is decided: by its user, its time, its reader's absence, an error
    FAILED = "failed"  # its task: an error is to be its terminal event, whatever it was about to commit
    RELEASED = "released"  # the lease: any process may continue it
    FENCED = "fenced"  # another process has claimed it
    CLAIMED = "claimed"  # this process has the lease, and knows all of the log
    DECLINED = "declined"  # the process that writes the log ends it
    LEAVE = "leave"  # the server stops, or it is of no use to this process
    TERMINAL = "terminal"  # its terminal event is in the log
    LOSS = "loss"  # of the log
    CLOSED = "closed"  # its task is over, and another process may continue it
    BROKE = "broke"  # its task is over, and nothing can continue it


# Nothing more happens to it in this process.
OVER = (Life.FINISHED, Life.LOST, Life.LEFT, Life.BROKEN)
# Nothing new begins in it: it is over, or about to be.
CLOSING = (*OVER, Life.LEAVING)
# The log writer is given what is pending.
WRITING = (Life.OPENING, Life.RUNNING, Life.PARKED, Life.ENDING)

_UNFINISHED = {
    Cause.LEAVE: Life.LEAVING,
    Cause.TERMINAL: Life.FINISHED,
    Cause.LOSS: Life.LOST,
    Cause.BROKE: Life.BROKEN,
}
_HELD = {**_UNFINISHED, Cause.FAILED: Life.ENDING}

NEXT: dict[Life, dict[Cause, Life]] = {
    Life.OPENING: {
        **_HELD,
        Cause.ADMITTED: Life.RUNNING,
        Cause.PARKED: Life.PARKED,
        Cause.ENDING: Life.ENDING,
    },
    Life.RUNNING: {
        **_HELD,
        Cause.PARKED: Life.PARKED,
        Cause.OUTAGE: Life.CUT,
        Cause.ENDING: Life.ENDING,
        Cause.FENCED: Life.FOLLOWING,
    },
    Life.PARKED: {
        **_HELD,
        Cause.ADMITTED: Life.RUNNING,
        Cause.OUTAGE: Life.CUT,
        Cause.ENDING: Life.ENDING,
        Cause.RELEASED: Life.FOLLOWING,
        Cause.FENCED: Life.FOLLOWING,
    },
    Life.CUT: {
        **_HELD,
        Cause.OUTAGE_OVER: Life.PARKED,
        Cause.ENDING: Life.CUT,  # committed when the outage is over, here or by who claims the stream for it
        Cause.RELEASED: Life.FOLLOWING,
        Cause.FENCED: Life.FOLLOWING,
    },
    Life.ENDING: {
        **_HELD,
        Cause.OUTAGE: Life.CUT,
        Cause.RELEASED: Life.CLAIMING,
        Cause.FENCED: Life.CLAIMING,
    },
    Life.FOLLOWING: {**_UNFINISHED, Cause.ENDING: Life.CLAIMING, Cause.CLAIMED: Life.PARKED},
    Life.CLAIMING: {**_UNFINISHED, Cause.CLAIMED: Life.ENDING, Cause.DECLINED: Life.FOLLOWING},
    Life.LEAVING: {Cause.TERMINAL: Life.FINISHED, Cause.LOSS: Life.LOST, Cause.CLOSED: Life.LEFT},
    Life.FINISHED: {},
    Life.LOST: {},
    Life.LEFT: {},
    Life.BROKEN: {},
}


class IllegalChange(Exception):
    """A stream's life was to change in a way that the table does not have: a fault of the server."""

    def __init__(self, life: Life, cause: Cause) -> None:
        super().__init__(f"a stream that is {life.value} cannot change by {cause.value!r}")


def after(life: Life, cause: Cause) -> Life:
    """Return the state that follows. Raises IllegalChange."""
    try:
        return NEXT[life][cause]
    except KeyError:
        raise IllegalChange(life, cause) from None
