"""`Matcher`: where one sequence stands in its grammar, and which ids may follow. `advance` moves all of a step.

A matcher follows the sequence's output tokens, so a preemption does not concern it, and a readmission feeds it the
tokens that were shown. A matcher that fails keeps its `error`, which ends its own sequence. Made on a client's thread,
used on the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.engine.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

# The code of an answer whose matcher failed.
GRAMMAR_FAILED = "grammar_failed"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Matcher:
    """`mask` has one bit for each id that may follow, ends of an answer left out; `may_end`: one of these may, too.

    `is_complete`: nothing but an end may follow. Invariant: unless it is complete or has failed, `mask` is not empty.
    """

    vocabulary: Vocabulary
    inner: Any  # llguidance.LLMatcher
    mask: bytes = b""
    may_end: bool = False
    is_complete: bool = False
    error: str | None = None

    def feed(self, token_ids: Sequence[int]) -> None:
        """Move over tokens that were shown already."""
        if all(_consume(self, token_id) for token_id in token_ids):
            set_masks([self])

    def fail(self, reason: str) -> None:
        """Record that nothing more can be said of this sequence."""
        logger.warning("a grammar's matcher failed: %s", reason[:200])
        self.error = GRAMMAR_FAILED

    def set_mask(self, mask: bytes, may_end: bool) -> None:
        """Record what may follow. llguidance allows the end to a matcher that has failed: that is asked first."""
        if self.inner.is_error():
            self.fail(self.inner.get_error())
            return
        is_empty = mask.count(0) == len(mask)
        if is_empty and not may_end:
            self.fail("nothing may follow, and the text may not end")
        self.mask, self.may_end, self.is_complete = mask, may_end, is_empty and may_end


def advance(moves: Iterable[tuple[Matcher, int]]) -> None:
    """Move each matcher over its new token, and make all masks in one call."""
    moved = []
    for matcher, token_id in moves:
        if matcher.error is None and _consume(matcher, token_id):
            moved.append(matcher)
    set_masks(moved)


def set_masks(matchers: Sequence[Matcher]) -> None:
    """Make the masks of matchers of one model; if that raises, one by one, so that only the faulty ones fail."""
    if not matchers:
        return
    try:
        found = matchers[0].vocabulary.masks([one.inner for one in matchers])
    except BaseException as error:  # a panic of llguidance is no Exception
        if len(matchers) == 1 and not _is_ours(error):
            matchers[0].fail(f"{type(error).__name__}: {error}")
            return
        if _is_ours(error):
            raise
        for matcher in matchers:
            set_masks([matcher])
        return
    for matcher, (mask, may_end) in zip(matchers, found, strict=True):
        matcher.set_mask(mask, may_end)


def _consume(matcher: Matcher, token_id: int) -> bool:
    try:
        if matcher.inner.consume_token(matcher.vocabulary.twins.get(token_id, token_id)):
            return True
        matcher.fail(matcher.inner.get_error())
    except BaseException as error:
        if _is_ours(error):
            raise
        matcher.fail(f"{type(error).__name__}: {error}")
    return False


def _is_ours(error: BaseException) -> bool:
    """Whether it ends the thread or process, and is no failure of the library."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
