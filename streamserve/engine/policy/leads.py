"""How far answers are ahead of their readers: which wait for them, and which of these give their blocks back.

A sequence `lead_tokens` ahead of its reader is held: it keeps its blocks, and is in no step until the reader has read
on. It parks where another sequence lacks memory, or when its reader has not moved for `stalled_seconds`.

Knows sequences and their readers' pace; no blocks, no queue and no clock (time is an argument). Engine thread only.
"""

from __future__ import annotations

import math

from streamserve.engine.config import EngineConfig
from streamserve.engine.sequence import Sequence
from streamserve.protocol.engine import Park

# A reader that is away is ahead without end; whether it has returned is seen after this time at the latest.
_MOST_RESUME_SECONDS = 30.0


def is_held(sequence: Sequence, config: EngineConfig) -> bool:
    """Whether it stands at its lead."""
    return lead_left(sequence, config) <= 0


def lead_left(sequence: Sequence, config: EngineConfig) -> float:
    """Return how many tokens are left to its lead, pending tokens included; endless where no reader is known."""
    num_read = sequence.reader.num_read
    if num_read is None:
        return math.inf
    return config.lead_tokens - (sequence.num_output_tokens + sequence.num_pending - num_read)


def rests(sequence: Sequence, config: EngineConfig) -> bool:
    """Whether it is held, and all that was begun of it is there: a park loses nothing."""
    is_there = sequence.num_launched_tokens == sequence.num_computed_tokens
    return is_there and sequence.num_unplanned_tokens == 1 and is_held(sequence, config)


def is_stalled(sequence: Sequence, config: EngineConfig, now: float) -> bool:
    """Whether it rests, and its reader has not moved for long: it is gone, or reads no more."""
    return sequence.reader.still_seconds(now) >= config.policy.stalled_seconds and rests(sequence, config)


def may_park(sequence: Sequence, config: EngineConfig, least_ahead: float, now: float) -> bool:
    """Whether it may park for another sequence: it rests, or is `least_ahead` seconds ahead.

    In the second case it has given a token since it was admitted: so parking in turns makes progress.
    """
    if rests(sequence, config):
        return True
    has_moved = sequence.num_output_tokens > len(sequence.request.output_token_ids)
    return has_moved and sequence.ahead_seconds(now) >= least_ahead


def park_of(sequence: Sequence, config: EngineConfig, now: float) -> Park:
    """Return when an answer that parks is to come back."""
    if rests(sequence, config):
        return Park(reason="lead", resume_at_lead=config.lead_tokens // 2)
    return Park(reason="ahead", resume_seconds=min(sequence.ahead_seconds(now) / 2, _MOST_RESUME_SECONDS))
