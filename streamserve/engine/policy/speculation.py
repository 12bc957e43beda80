"""`Speculation`: how many tokens a step proposes after the next token of a sequence, so that it may give several.

A proposed token costs a row of the step, whether it is accepted or not. It pays while it is accepted at least as often
as the share of the step's time that rows take: with few sequences a step takes its time for the weights, and rows are
nearly free; in a full step each row costs as much as it can bring.

    rate^i >= per_token * n / (base + per_token * n)        the i-th token after the next; n decodes in the step

The rate is the share that was accepted lately of what was found after a match as long, in this sequence; a sequence
begins with the rates of the engine's last ones. What does not pay is proposed again after a while: rates drift back.

That is a model of the cost; whether it pays is measured. Steps of about n decodes give tokens at one speed with
proposals and at another without, and the slower way is taken in one step of `_LOOK_EVERY` only.

What a draft model proposes where that finds nothing is `drafting`'s.

No answer changes by it: see `Chunk.kept`. Pure; engine thread only. (Idea: adaptive draft length as in SpecDec++, arXiv
2405.19715; TurboSpec, arXiv 2406.14066, for the load.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamserve.engine.plan import StepPlan, StepResult
from streamserve.engine.policy.lookup import PromptLookup

MOST_PROPOSED = 15
_LENGTHS = (4, 7, 12)  # tokens alike, from which on a match is of another kind
DRAFTED = len(_LENGTHS) + 1  # the kind of what a draft model proposes
_FIRST_RATES = (0.4, 0.6, 0.75, 0.85, 0.7)  # by kind, until they are known
_LEAST_RATE, _BEST_RATE = 0.02, 0.98
_OWN_WEIGHT, _COMMON_WEIGHT = 0.15, 0.02  # of the newest token, in the rates of its sequence and of all
_DRIFT = 0.02  # back to the first rates, at each token after which nothing is proposed
_DRAFT_DRIFT = 0.005  # the same of a draft model, which has something to propose after every token
_UNFITTED_ROWS = 16  # rows that fill a step until the time of steps is known
_SPEED_WEIGHT = 0.1  # of the newest step
_LOOK_EVERY = 48  # steps


class AcceptanceRates:
    """The share of proposed tokens that were accepted, by kind of match, and of a draft model's."""

    __slots__ = ("_by_kind",)

    def __init__(self, by_kind: Sequence[float] = _FIRST_RATES) -> None:
        self._by_kind = list(by_kind)

    def __getitem__(self, kind: int) -> float:
        return self._by_kind[kind]

    def copy(self) -> AcceptanceRates:
        """Return rates that change apart from these."""
        return AcceptanceRates(self._by_kind)

    def learn(self, kind: int, num_accepted: int, *, was_refused: bool, weight: float) -> None:
        """Count tokens that were accepted, and a token after them that was not."""
        rate = self._by_kind[kind]
        rate = 1 - (1 - rate) * (1 - weight) ** num_accepted
        if was_refused:
            rate -= weight * rate
        self._by_kind[kind] = min(_BEST_RATE, max(_LEAST_RATE, rate))

    def refuse(self, kind: int) -> None:
        """Count a token that was not accepted."""
        self.learn(kind, 0, was_refused=True, weight=_OWN_WEIGHT)

    def drift(self, kind: int) -> None:
        """Forget a little."""
        drift = _DRAFT_DRIFT if kind == DRAFTED else _DRIFT
        self._by_kind[kind] += drift * (_FIRST_RATES[kind] - self._by_kind[kind])


@dataclass(slots=True)
class Proposer:
    """What proposes tokens of one sequence, and how many were proposed and accepted.

    `speed`: how many tokens a plain step's time should give with what was found last; 1: nothing was.
    """

    lookup: PromptLookup
    acceptance: AcceptanceRates
    kind: int = 0  # of the match that the last proposed tokens came from
    speed: float = 1.0
    num_proposed: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Speed:
    """Tokens a second of steps with about as many decodes: with proposed tokens, and `plain`; 0: not known yet."""

    proposed: float = 0.0
    plain: float = 0.0
    num_steps: int = 0

    def may_propose(self) -> bool:
        """Return whether the next step proposes tokens."""
        is_look = self.num_steps % _LOOK_EVERY == 0
        is_better = not (self.proposed and self.plain) or self.proposed >= self.plain
        return is_better is not is_look

    def note(self, num_tokens: int, seconds: float, *, has_proposed: bool) -> None:
        """Learn from a step that gave so many tokens."""
        self.num_steps += 1
        if seconds <= 0:
            return
        known, newest = self.proposed if has_proposed else self.plain, num_tokens / seconds
        speed = known + _SPEED_WEIGHT * (newest - known) if known else newest
        if has_proposed:
            self.proposed = speed
        else:
            self.plain = speed


@dataclass(slots=True)
class Speculation:
    """The rates that new sequences begin with, the speed by numbers of decodes, and counts by latency class."""

    acceptance: AcceptanceRates = field(default_factory=AcceptanceRates)
    speeds: dict[int, Speed] = field(default_factory=dict)  # by the number of bits of the number of decodes
    num_proposed: Counter[str] = field(default_factory=Counter)
    num_accepted: Counter[str] = field(default_factory=Counter)
    num_drafted: Counter[str] = field(default_factory=Counter)  # of both, those of a draft model
    num_drafted_accepted: Counter[str] = field(default_factory=Counter)

    def proposer_for(self, num_prompt_tokens: int, prediction: Sequence[int]) -> Proposer:
        """Return what a sequence begins with."""
        return Proposer(PromptLookup(num_prompt_tokens, prediction), self.acceptance.copy())

    def propose(
        self, proposer: Proposer, token_ids: Sequence[int], most: int, *, num_rows: int, share: float | None
    ) -> tuple[int, ...]:
        """Return tokens that may follow `token_ids`, up to `most`, as many as are worth their rows.

        `share` of the step's time is for its `num_rows` decodes; None: not known yet.
        """
        proposer.speed = 1.0
        if not self._speed_of(num_rows).may_propose():
            return ()
        share = min(1.0, num_rows / _UNFITTED_ROWS) if share is None else share
        found = proposer.lookup.follow(token_ids, min(most, MOST_PROPOSED))
        if not found.token_ids:
            return ()
        proposer.kind = bisect_right(_LENGTHS, found.num_alike)
        num_worth = _num_worth(proposer.acceptance[proposer.kind], share)
        if not num_worth:
            proposer.acceptance.drift(proposer.kind)
        proposed = found.token_ids[:num_worth]
        proposer.speed = speed_of(proposer.acceptance[proposer.kind], len(proposed), share)
        return proposed

    def note_step(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn from a step that held nothing but decodes."""
        num_decodes, num_rows = len(plan.chunks), sum(len(chunk.samples) for chunk in plan.chunks)
        if num_rows == plan.num_tokens:
            num_given = sum(len(one.token_ids) for one in result.sampled)
            self._speed_of(num_decodes).note(num_given, seconds, has_proposed=num_rows > num_decodes)

    def _speed_of(self, num_decodes: int) -> Speed:
        return self.speeds.setdefault(num_decodes.bit_length(), Speed())

    def note(self, proposer: Proposer, latency_class: str, num_proposed: int, num_accepted: int) -> None:
        """Learn how many proposed tokens were accepted; those after the first refused token say nothing."""
        was_refused = num_accepted < num_proposed
        proposer.acceptance.learn(proposer.kind, num_accepted, was_refused=was_refused, weight=_OWN_WEIGHT)
        self.acceptance.learn(proposer.kind, num_accepted, was_refused=was_refused, weight=_COMMON_WEIGHT)
        proposer.num_proposed += num_proposed
        proposer.num_accepted += num_accepted
        self.num_proposed[latency_class] += num_proposed
        self.num_accepted[latency_class] += num_accepted
        if proposer.kind == DRAFTED:
            self.num_drafted[latency_class] += num_proposed
            self.num_drafted_accepted[latency_class] += num_accepted


def speed_of(rate: float, depth: int, cost: float) -> float:
    """Return how many tokens a plain step's time gives with `depth` proposals, each of which adds `cost` of it."""
    return sum(rate**index for index in range(depth + 1)) / (1 + cost * depth)


def _num_worth(rate: float, share: float) -> int:
    """Return how many tokens in a row are worth their rows."""
    if share <= 0:
        return MOST_PROPOSED
    return min(MOST_PROPOSED, int(math.log(share) / math.log(rate))) if share < 1 else 0
