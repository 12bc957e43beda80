"""`StepTime`: how long a step takes, fitted to the steps that were.

    seconds ≈ base + per_token · num_tokens + per_pair · num_pairs

A pair is a token and a position that it attends to: what attention costs, long contexts and long chunks alike. Least
squares of the relative error, over the mean of each size class of steps. Inside a class the last steps count; a class
without new steps loses weight slowly. So an hour of decodes does not erase the cost of prefill, as plain recursive
least squares with forgetting would. Knows plans and durations; no clock. Engine thread only. (Idea: the
fitted ms-per-token budgets of P-PAS, arXiv 2608.15171, and Sarathi-Serve, arXiv 2403.02310.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from streamserve.engine.plan import Chunk, StepPlan

# The first steps compile and warm things up.
_NUM_WARM_UP_STEPS = 2
_NUM_STEPS_TO_FIT = 16
# The largest steps must be this many times the smallest, or a token's cost cannot be separated from the base.
_MIN_SPREAD = 4
# Inside a class a step weighs at least 1/32: the mean follows the machine.
_MAX_CLASS_STEPS = 32
_HALF_LIFE_STEPS = 4096
# A fit is used for this many further steps before it is made again.
_STEPS_PER_FIT = 8
# One odd step (a page fault, a suspended machine) moves its class no further than this.
_MAX_SURPRISE = 4.0
# No guess goes beyond twice the largest step seen: it is tried before it is stretched.
_MAX_STRETCH = 2
# A step of so many times its base is worth its start: what joins it would hardly cost more in a step of its own. Of one
# that is shorter than a reader notices nothing is left to the next.
_WORTH_BASES = 8
_WORTH_SECONDS = 0.02
_SINGULAR = 1e-7
_BASE, _PER_TOKEN, _PER_PAIR = range(3)


def num_pairs(start: int, num_tokens: int) -> int:
    """Count the positions that the tokens of a chunk attend to: the k-th of them sees start + k."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def size_of(chunks: Iterable[Chunk]) -> tuple[int, int]:
    """Return the tokens and the pairs of a step."""
    tokens = pairs = 0
    for chunk in chunks:
        tokens += len(chunk.token_ids)
        pairs += num_pairs(chunk.start, len(chunk.token_ids))
    return tokens, pairs


@dataclass(slots=True)
class _SizeClass:
    """The mean of the latest steps of about one size."""

    num_steps: float = 0.0
    tokens: float = 0.0
    pairs: float = 0.0
    seconds: float = 0.0
    last_step: int = 0

    def add(self, tokens: int, pairs: int, seconds: float, step: int) -> None:
        self.num_steps = min(self.num_steps + 1, _MAX_CLASS_STEPS)
        self.tokens += (tokens - self.tokens) / self.num_steps
        self.pairs += (pairs - self.pairs) / self.num_steps
        self.seconds += (seconds - self.seconds) / self.num_steps
        self.last_step = step


@dataclass(frozen=True, slots=True)
class _Fit:
    base: float
    per_token: float
    per_pair: float

    def seconds(self, tokens: float, pairs: float) -> float:
        return self.base + self.per_token * tokens + self.per_pair * pairs


class StepTime:
    """The core adds every step; the scheduler and the watchdog read it. None means: too few steps so far."""

    def __init__(self) -> None:
        # Bounded: a class is the two sizes' numbers of bits.
        self._classes: dict[tuple[int, int], _SizeClass] = {}
        self._num_steps = 0
        self._most_tokens = 0
        self._fitted_at = 0
        self._fit: _Fit | None = None

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that is over."""
        self._num_steps += 1
        if self._num_steps <= _NUM_WARM_UP_STEPS:
            return
        tokens, pairs = size_of(plan.chunks)
        self._most_tokens = max(self._most_tokens, tokens)
        if self._fit is not None:
            seconds = min(seconds, _MAX_SURPRISE * self._fit.seconds(tokens, pairs))
        size_class = self._classes.setdefault((tokens.bit_length(), pairs.bit_length()), _SizeClass())
        size_class.add(tokens, pairs, seconds, self._num_steps)

    def predict(self, plan: StepPlan) -> float | None:
        """Return how long a step should take."""
        fit = self._latest_fit()
        return None if fit is None else fit.seconds(*size_of(plan.chunks))

    def tokens_within(self, seconds: float, *, tokens: int, pairs: int, start: int) -> int | None:
        """Return how many tokens of a sequence from position `start` may join a step of that size within `seconds`.

        n tokens cost per_token · n + per_pair · (start · n + n (n + 1) / 2): the positive root. 0 if the time is up.
        """
        fit = self._latest_fit()
        if fit is None:
            return None
        left = seconds - fit.seconds(tokens, pairs)
        if left <= 0:
            return 0
        linear = fit.per_token + fit.per_pair * (start + 0.5)
        # Written so that it stays exact as per_pair goes to 0, where it is left / linear.
        num_tokens = 2 * left / (linear + sqrt(linear * linear + 2 * fit.per_pair * left))
        return int(min(num_tokens, self._most_tokens * _MAX_STRETCH))

    def is_worth_its_start(self, *, tokens: int, pairs: int) -> bool:
        """Whether a step of that size pays for its base: further prompts are as soon done in steps of their own."""
        fit = self._latest_fit()
        return fit is not None and fit.seconds(tokens, pairs) >= max(_WORTH_BASES * fit.base, _WORTH_SECONDS)

    def share_of(self, num_tokens: int) -> float | None:
        """Return the share of a step's time that grows with its tokens, in a step of so many; contexts left out."""
        fit = self._latest_fit()
        return None if fit is None else fit.per_token * num_tokens / fit.seconds(num_tokens, 0)

    def seconds_for(self, num_tokens: int, num_steps: int) -> float | None:
        """Return how long so much prefill takes in so many steps, attention to earlier chunks left out."""
        fit = self._latest_fit()
        return None if fit is None else fit.seconds(num_tokens, 0) + (num_steps - 1) * fit.base

    def _latest_fit(self) -> _Fit | None:
        is_old = self._num_steps - self._fitted_at >= _STEPS_PER_FIT
        if is_old and self._num_steps >= _NUM_STEPS_TO_FIT + _NUM_WARM_UP_STEPS:
            self._fit, self._fitted_at = self._make_fit(), self._num_steps
        return self._fit

    def _make_fit(self) -> _Fit | None:
        """Fit with and without base and pairs; the closest of those in which nothing costs less than nothing."""
        sizes = [one.tokens for one in self._classes.values()]
        if max(sizes) < _MIN_SPREAD * min(sizes):
            return None
        matrix, vector = self._normal_equations()
        best: tuple[float, _Fit] | None = None
        for used in ((_BASE, _PER_TOKEN, _PER_PAIR), (_BASE, _PER_TOKEN), (_PER_TOKEN, _PER_PAIR), (_PER_TOKEN,)):
            solution = _solve([[matrix[i][j] for j in used] for i in used], [vector[i] for i in used])
            if solution is None or min(solution) < 0:
                continue
            explained = sum(vector[i] * value for i, value in zip(used, solution, strict=True))
            costs = dict(zip(used, solution, strict=True))
            fit = _Fit(costs.get(_BASE, 0.0), costs[_PER_TOKEN], costs.get(_PER_PAIR, 0.0))
            if fit.per_token > 0 and (best is None or explained > best[0]):
                best = explained, fit
        return None if best is None else best[1]

    def _normal_equations(self) -> tuple[list[list[float]], list[float]]:
        matrix, vector = [[0.0] * 3 for _ in range(3)], [0.0] * 3
        for one in self._classes.values():
            if one.seconds <= 0:
                continue
            features = (1.0, one.tokens, one.pairs)
            age = self._num_steps - one.last_step
            weight = one.num_steps * 0.5 ** (age / _HALF_LIFE_STEPS) / (one.seconds * one.seconds)
            for i in range(3):
                vector[i] += weight * features[i] * one.seconds
                for j in range(3):
                    matrix[i][j] += weight * features[i] * features[j]
        return matrix, vector


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Solve a positive definite system by Gauss elimination, scaled to a unit diagonal; None if it is singular."""
    size = len(vector)
    scale = [sqrt(matrix[i][i]) for i in range(size)]
    if min(scale) == 0:
        return None
    rows = [[matrix[i][j] / scale[i] / scale[j] for j in range(size)] + [vector[i] / scale[i]] for i in range(size)]
    for i in range(size):
        if rows[i][i] < _SINGULAR:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [below - factor * above for below, above in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return [value / factor for value, factor in zip(solution, scale, strict=True)]
