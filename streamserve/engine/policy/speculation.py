"""`Speculation`: how many tokens a step tries after the next token of a sequence, so that it may give several.

A tried token costs a row of the step, whether it proves right or not. It pays while its odds are at least the share of
the step's time that rows take: with few sequences a step takes its time for the weights, and rows are nearly free; in a
full step each row costs as much as it can bring.

    odds^i >= per_token * n / (base + per_token * n)        the i-th token after the next; n decodes in the step

The odds are those of tokens found like that lately: by how many tokens before them were alike, in this sequence, which
begins with what the engine's last sequences had. What does not pay is tried again after a while: the odds drift back.

That is a model of the cost; whether it pays is measured. Steps of about n decodes give tokens at one rate where tokens
were tried and at another where none were, and the slower way is taken in one step of `_LOOK_EVERY` only.

What is tried changes no answer: see `Chunk.kept`. Pure; engine thread only. (Idea: adaptive draft length as in
SpecDec++, arXiv 2405.19715; TurboSpec, arXiv 2406.14066, for the load.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamserve.engine.plan import StepPlan, StepResult
from streamserve.engine.policy.lookup import PromptLookup

MOST_TRIED = 15
_LENGTHS = (4, 7, 12)  # where another kind of match begins, by the tokens that were alike
_FIRST_ODDS = (0.4, 0.6, 0.75, 0.85)  # by kind, until it is known
_LEAST_ODDS, _BEST_ODDS = 0.02, 0.98
_OWN_WEIGHT, _COMMON_WEIGHT = 0.15, 0.02  # of the newest token, in the odds of its sequence and of all
_DRIFT = 0.02  # back to the first odds, at each token for which nothing is tried
_UNFITTED_ROWS = 16  # rows that fill a step until the time of steps is known
_RATE_WEIGHT = 0.1  # of the newest step
_LOOK_EVERY = 48  # steps


class Odds:
    """How often a tried token was right, by kind of match."""

    __slots__ = ("_by_kind",)

    def __init__(self, by_kind: Sequence[float] = _FIRST_ODDS) -> None:
        self._by_kind = list(by_kind)

    def __getitem__(self, kind: int) -> float:
        return self._by_kind[kind]

    def copy(self) -> Odds:
        """Return odds that change apart from these."""
        return Odds(self._by_kind)

    def learn(self, kind: int, num_right: int, *, was_wrong: bool, weight: float) -> None:
        """Count tokens that were right, and a token after them that was not."""
        odds = self._by_kind[kind]
        odds = 1 - (1 - odds) * (1 - weight) ** num_right
        if was_wrong:
            odds -= weight * odds
        self._by_kind[kind] = min(_BEST_ODDS, max(_LEAST_ODDS, odds))

    def drift(self, kind: int) -> None:
        """Forget a little."""
        self._by_kind[kind] += _DRIFT * (_FIRST_ODDS[kind] - self._by_kind[kind])


@dataclass(slots=True)
class Guesses:
    """What is tried of one sequence, and how that went. `num_tried` and `num_right` count tokens."""

    lookup: PromptLookup
    odds: Odds
    kind: int = 0  # of the match that the last tried tokens came from
    num_tried: int = 0
    num_right: int = 0


@dataclass(slots=True)
class Rates:
    """Tokens a second of steps with about as many decodes: where tokens were tried, and where none were; 0: unknown."""

    tried: float = 0.0
    plain: float = 0.0
    num_steps: int = 0

    def may_try(self) -> bool:
        """Return whether to try tokens in the next step."""
        is_look = self.num_steps % _LOOK_EVERY == 0
        is_better = not (self.tried and self.plain) or self.tried >= self.plain
        return is_better is not is_look

    def note(self, num_tokens: int, seconds: float, *, has_tried: bool) -> None:
        """Learn from a step that gave so many tokens."""
        self.num_steps += 1
        if seconds <= 0:
            return
        rate = num_tokens / seconds
        known = self.tried if has_tried else self.plain
        rate = known + _RATE_WEIGHT * (rate - known) if known else rate
        if has_tried:
            self.tried = rate
        else:
            self.plain = rate


@dataclass(slots=True)
class Speculation:
    """The odds that new sequences begin with, the rates by numbers of decodes, and counts by latency class."""

    odds: Odds = field(default_factory=Odds)
    rates: dict[int, Rates] = field(default_factory=dict)  # by the number of bits of the number of decodes
    num_tried: Counter[str] = field(default_factory=Counter)
    num_right: Counter[str] = field(default_factory=Counter)

    def guesses_for(self, num_prompt_tokens: int, prediction: Sequence[int]) -> Guesses:
        """Return what a sequence begins with."""
        return Guesses(PromptLookup(num_prompt_tokens, prediction), self.odds.copy())

    def propose(
        self, guesses: Guesses, token_ids: Sequence[int], most: int, *, num_rows: int, share: float | None
    ) -> tuple[int, ...]:
        """Return the tokens to try after `token_ids`, up to `most`.

        `share` of the step's time is for its `num_rows` decodes; None: not known yet.
        """
        if not self._rates_of(num_rows).may_try():
            return ()
        share = min(1.0, num_rows / _UNFITTED_ROWS) if share is None else share
        found = guesses.lookup.follow(token_ids, min(most, MOST_TRIED))
        if not found.token_ids:
            return ()
        guesses.kind = bisect_right(_LENGTHS, found.num_alike)
        num_worth = _num_worth(guesses.odds[guesses.kind], share)
        if not num_worth:
            guesses.odds.drift(guesses.kind)
        return found.token_ids[:num_worth]

    def note_step(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn from a step that held nothing but decodes."""
        num_decodes, num_rows = len(plan.chunks), sum(len(chunk.samples) for chunk in plan.chunks)
        if num_rows == plan.num_tokens:
            num_given = sum(len(one.token_ids) for one in result.sampled)
            self._rates_of(num_decodes).note(num_given, seconds, has_tried=num_rows > num_decodes)

    def _rates_of(self, num_decodes: int) -> Rates:
        return self.rates.setdefault(num_decodes.bit_length(), Rates())

    def note(self, guesses: Guesses, latency_class: str, num_tried: int, num_right: int) -> None:
        """Learn how many of the tried tokens were right; those after the first wrong token say nothing."""
        was_wrong = num_right < num_tried
        guesses.odds.learn(guesses.kind, num_right, was_wrong=was_wrong, weight=_OWN_WEIGHT)
        self.odds.learn(guesses.kind, num_right, was_wrong=was_wrong, weight=_COMMON_WEIGHT)
        guesses.num_tried += num_tried
        guesses.num_right += num_right
        self.num_tried[latency_class] += num_tried
        self.num_right[latency_class] += num_right


def _num_worth(odds: float, share: float) -> int:
    """Return how many tokens in a row are worth their rows."""
    if share <= 0:
        return MOST_TRIED
    return min(MOST_TRIED, int(math.log(share) / math.log(odds))) if share < 1 else 0
