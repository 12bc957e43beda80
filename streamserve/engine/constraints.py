"""`Constraints`: which token may be next in a sequence, and which token ends the answer.

Made of what the caller asked for: sampling parameters, bad words, a grammar. The runner gets it row by row, as
`SampleSpec`. Knows tokens; no blocks and no positions in the queue. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from streamserve.engine.kv.holding import Holding
from streamserve.engine.plan import SampleSpec, TokenRules
from streamserve.protocol.requests import SamplingParams

if TYPE_CHECKING:
    from streamserve.engine.grammar.matcher import Matcher


@dataclass(slots=True, eq=False)
class Constraints:
    """What a draw of one sequence obeys. `matcher` alone changes: it follows the known tokens.

    `end_ids` end the answer: eos and stop tokens. `rules`: bias, allowed ids and bad words; None without these.

    With a grammar the next mask depends on the pending token: the sequence waits for it. `num_grammar_waits` counts how
    often it was left out of a step for that, which happens only with overlap.
    """

    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...]
    end_ids: frozenset[int]
    matcher: Matcher | None
    rules: TokenRules | None
    has_penalties: bool
    num_grammar_waits: int = 0

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        prompt_token_ids: tuple[int, ...],
        eos_token_ids: frozenset[int],
        matcher: Matcher | None,
        bad_word_ids: tuple[tuple[int, ...], ...],
    ) -> Constraints:
        """Return the constraints of these parameters."""
        rules = None
        if sampling.logit_bias or sampling.allowed_token_ids or bad_word_ids:
            rules = TokenRules(
                logit_bias=sampling.logit_bias,
                allowed_token_ids=sampling.allowed_token_ids,
                bad_words=bad_word_ids,
            )
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        return cls(
            sampling=sampling,
            prompt_token_ids=prompt_token_ids,
            end_ids=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids),
            matcher=matcher,
            rules=rules,
            has_penalties=penalties != (0.0, 0.0, 1.0),
        )

    @property
    def is_complete(self) -> bool:
        """Whether the text matches its grammar as it is, and nothing more may follow."""
        return self.matcher is not None and self.matcher.is_complete

    def is_end(self, token_id: int, num_output_tokens: int) -> bool:
        """Whether the last of so many output tokens ends the answer."""
        # In a grammar an end is allowed before min_tokens only where nothing else is.
        has_min_tokens = self.matcher is not None or num_output_tokens > self.sampling.min_tokens
        return has_min_tokens and token_id in self.end_ids

    def before_end(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the tokens before the first that ends the answer."""
        return tuple(takewhile(lambda token_id: token_id not in self.end_ids, token_ids))

    def specs(
        self, token_ids: list[int], num_pending: int, proposed_ids: tuple[int, ...], held: Holding
    ) -> tuple[SampleSpec, ...]:
        """Return how to choose the token after the known and pending tokens, and after each of the proposed tokens.

        The proposed tokens are followed up to the first that ends the answer or that the grammar forbids.
        """
        matcher = self.matcher
        mask, may_end = (None, False) if matcher is None else (matcher.mask, matcher.may_end)
        first = self._spec(token_ids, num_pending, (), mask, may_end, held)
        if not proposed_ids:
            return (first,)
        proposed = self.before_end(proposed_ids)
        follows = [(None, False)] * len(proposed) if matcher is None else matcher.follow(proposed)
        return first, *(
            self._spec(token_ids, num_pending, proposed[:row], *follow, held) for row, follow in enumerate(follows, 1)
        )

    def _spec(
        self,
        token_ids: list[int],
        num_pending: int,
        proposed: tuple[int, ...],
        mask: bytes | None,
        may_end: bool,
        held: Holding,
    ) -> SampleSpec:
        """Return how to choose the token after all known and pending tokens and these."""
        sampling, prompt, rules = self.sampling, self.prompt_token_ids, self.rules
        num_known, num_new = len(token_ids), num_pending + len(proposed)
        banned: tuple[int, ...] = ()
        if num_known - len(prompt) + num_new < sampling.min_tokens:
            banned = tuple(sorted(self.end_ids))
        bad_endings: tuple[tuple[int, int], ...] = ()
        if rules is not None and rules.bad_words:
            longest = max(map(len, rules.bad_words))
            newest = (*token_ids[max(len(prompt), num_known - longest) :], *proposed)
            bad_endings = rules.bad_endings(newest, is_pending=num_pending > 0)
        begins_counts = held.begins_counts
        return SampleSpec(
            position=num_known + num_new,
            sampling=sampling,
            penalty_slot=held.penalty_slot,
            prompt_token_ids=prompt if begins_counts else (),
            output_token_ids=tuple(token_ids[len(prompt) :]) if begins_counts else (),
            banned_token_ids=banned,
            mask=mask,
            mask_end_ids=tuple(sorted(self.end_ids)) if may_end else (),
            rules=rules,
            bad_endings=bad_endings,
        )
