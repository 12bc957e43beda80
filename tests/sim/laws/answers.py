"""`AnswerLaws`: an update has the right tokens, at most one end, an error only with a cause, and correct figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamserve.engine.output import SequenceUpdate

if TYPE_CHECKING:
    from tests.sim.asked import Asked
    from tests.sim.simulation import Simulation


class AnswerLaws:
    """Counts the tokens in updates. `failed`: answers that ended in this step and must not be found in the cache."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.tokens = 0
        self.failed: list[Asked] = []
        self.has_ended = False

    def before_step(self) -> None:
        """Reset what is kept for one step."""
        self.failed, self.has_ended = [], False

    def check(self, update: SequenceUpdate) -> Asked:
        """Check one update, and return its answer."""
        asked = self.sim.by_seq_id.get(update.seq_id)
        assert asked is not None, f"15: an update of {update.seq_id} after its end, or after an abort"
        self.tokens += len(update.token_ids)
        self.has_ended = self.has_ended or update.is_last
        shown = (*asked.shown, *update.token_ids)
        assert shown == asked.answer[: len(shown)], "13: other tokens than alone"
        assert sum(one is not None for one in (update.finish_reason, update.error, update.park)) <= 1, "15: ends twice"
        self._check_end(asked, update, len(shown))
        self._check_error(asked, update)
        self._check_figures(asked, update)
        return asked

    def _check_end(self, asked: Asked, update: SequenceUpdate, num_shown: int) -> None:
        if update.finish_reason == "stop" and asked.stopped_at is not None and not update.token_ids:
            self.failed.append(asked)
        elif update.finish_reason is not None:
            ends, alone = (update.finish_reason, num_shown), (asked.reason, len(asked.answer))
            assert ends == alone, f"14: ends with {ends}, alone with {alone}"
        elif update.token_ids:
            assert num_shown < len(asked.answer), "14: the last token without an end"

    def _check_error(self, asked: Asked, update: SequenceUpdate) -> None:
        if update.error is None:
            return
        assert self.sim.has_cause(asked, update.seq_id, update.error), f"16: {update.error}"
        if update.error not in ("timeout", "queue_timeout"):
            self.failed.append(asked)

    def _check_figures(self, asked: Asked, update: SequenceUpdate) -> None:
        laws, first, scheduled = self.sim.laws, update.first_token_at, update.scheduled_at
        assert laws.started_at <= update.at <= self.sim.clock(), "21: an update of another time"
        assert asked.first_token_at in (None, first), "21: the first token comes a second time"
        if update.token_ids:
            assert scheduled is not None, "21: a token before the first step"
            assert asked.admitted_at <= scheduled <= update.at, "21: times out of order"
            assert first is not None, "21: a token before the first"
            assert first <= update.at, "21: times out of order"
            wanted = asked.request.sampling.logprobs is not None
            got = [None if one is None else one.chosen for one in update.logprobs]
            assert got == [-float(token) if wanted else None for token in update.token_ids], "21: logprobs"
        cached = laws.cached_tokens(update.seq_id)
        assert cached is None or update.num_cached_tokens == cached, "21: cached tokens"
