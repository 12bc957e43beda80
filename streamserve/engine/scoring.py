"""`PromptScoring`: at which positions of a prompt the next token was scored, where the caller asks for that.

Each position is scored once: what is computed again after a preemption or a park is not scored again. A position that
is not scored yet is computed, and not taken from the prefix cache. Knows no logits and no blocks. Engine thread only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from streamserve.engine.plan import ScoreSpec

# The most positions that a step scores of one sequence, and tokens it names for that, so that the step stays short for
# all other sequences: each position costs a row of the vocabulary.
_MOST_SCORED = 256
_MOST_CANDIDATES = 2_048


@dataclass(slots=True)
class PromptScoring:
    """The first `num_scored` positions are scored. At each the `num_top` likeliest tokens are named beside its own."""

    prompt_token_ids: tuple[int, ...]
    num_top: int
    num_scored: int

    @property
    def num_reusable_tokens(self) -> int:
        """How far the prefix cache may stand in for computing: to the first position that is not scored yet."""
        return sys.maxsize if self.num_scored >= len(self.prompt_token_ids) - 1 else self.num_scored

    @property
    def most_tokens(self) -> int:
        """As many tokens as a step may compute: until all is scored, not the whole prompt."""
        if self.num_reusable_tokens == sys.maxsize:
            return sys.maxsize
        return min(_MOST_SCORED, max(1, _MOST_CANDIDATES // (1 + self.num_top)))

    def spec(self, start: int, end: int) -> ScoreSpec | None:
        """Return what to score of the chunk from `start` to `end`; None: all of it is scored, or behind the prompt."""
        if start >= len(self.prompt_token_ids) - 1:
            return None
        first = max(start, self.num_scored)
        token_ids = self.prompt_token_ids[first + 1 : end + 1]
        return ScoreSpec(first=first, token_ids=token_ids, num_top=self.num_top) if token_ids else None

    def note(self, spec: ScoreSpec) -> None:
        """Record that a step has scored these positions."""
        self.num_scored = spec.first + len(spec.token_ids)
