"""`SequenceRequest` and `Sequence`: the tokens of one answer, and where they stand in the engine.

A sequence knows its tokens, its blocks and how far they are computed; it knows no text, no request, no reader. Engine
thread only. (Idea: vLLM V1's `num_computed_tokens` chasing the known tokens; mini-sglang's lesson that one guarded
`release()` beats set membership.)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from streamserve.engine.kv.integrity import IntegrityError
from streamserve.engine.plan import SampleSpec
from streamserve.protocol.requests import SamplingParams

if TYPE_CHECKING:
    from streamserve.engine.kv.pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One answer to make. `sampling.seed` and `sampling.max_tokens` are resolved; ids are never reused.

    `output_token_ids` were already shown: they count towards max_tokens and min_tokens, so that a resumed sequence ends
    where the uninterrupted one would. `max_tokens` 0 only fills the prefix cache. The first `num_public_tokens` of the
    prompt were put there by the server for everybody, and are cached without the salt. `reader_tokens`: how many output
    tokens the reader has received by now; None: nobody's reading is waited for. `first_token_at`: when the answer's
    first token was made, if that was before this admission.
    """

    seq_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    salt: str = ""
    num_public_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    arrived_at: float = 0.0
    deadline: float | None = None
    latency_class: str = "chat"
    tenant: str = ""
    reader_tokens: int | None = None
    first_token_at: float | None = None


class State(Enum):
    """Where a sequence is: in the queue, in the batch, or gone."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# Preemption is RUNNING → WAITING; nothing leaves FINISHED.
_TRANSITIONS = frozenset(
    {
        (State.WAITING, State.RUNNING),
        (State.RUNNING, State.WAITING),
        (State.WAITING, State.FINISHED),
        (State.RUNNING, State.FINISHED),
    }
)


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one `SequenceRequest`; see `check_integrity` in block_pool.py for what must hold.

    token_ids:  [ prompt ............ | output ............ ]
                [ computed: K/V in blocks )[ in flight )[ to be computed ]( pending )

    In flight are the tokens of launched, uncollected steps. While `is_pending` the last of these gives the sequence one
    more token, which a runner that can overlap knows before we do. A step's result counts only if `num_preemptions` is
    what it was at the launch and the sequence still runs: otherwise its blocks were given back, and it starts afresh.
    `order_key` and `expires_at` (its first step must come before) are the scheduler's, fixed when it is added.
    """

    request: SequenceRequest
    state: State = State.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_in_flight: int = 0
    is_pending: bool = False
    order_key: tuple[float, int] = (0.0, 0)
    expires_at: float = math.inf
    scheduled_at: float | None = None
    first_token_at: float | None = None
    reader_tokens: int | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]
        self.first_token_at = self.request.first_token_at
        self.reader_tokens = self.request.reader_tokens

    @property
    def seq_id(self) -> int:
        """The engine's own id of this sequence."""
        return self.request.seq_id

    @property
    def max_tokens(self) -> int:
        """The most output tokens, shown ones included."""
        assert self.request.sampling.max_tokens is not None, "max_tokens is resolved at acceptance"
        return self.request.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those shown before a resume included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose K/V is still to be computed; 1 means the sequence decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_launched_tokens(self) -> int:
        """Tokens that are computed or in flight: the next chunk starts here."""
        return self.num_computed_tokens + self.num_in_flight

    @property
    def num_unplanned_tokens(self) -> int:
        """Tokens, the pending one included, that no step has been launched for; 1 means the sequence decodes."""
        return len(self.token_ids) + self.is_pending - self.num_computed_tokens - self.num_in_flight

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens that may still come."""
        return max(0, self.max_tokens - self.num_output_tokens)

    def transition(self, state: State) -> None:
        """Move to `state`; every change of state goes through here."""
        if (self.state, state) not in _TRANSITIONS:
            raise IntegrityError(f"sequence {self.seq_id}: {self.state.value} → {state.value}")
        self.state = state

    def launch(self, num_tokens: int, *, is_sampled: bool) -> None:
        """Note that a step with the next `num_tokens` was launched; `is_sampled`: it gives a token."""
        self.num_in_flight += num_tokens
        self.is_pending = is_sampled

    def land(self, num_tokens: int) -> None:
        """Note that the oldest launched step with this sequence is over, and computed `num_tokens`."""
        self.num_in_flight -= num_tokens
        self.num_computed_tokens += num_tokens
        self.is_pending = self.is_pending and self.num_in_flight > 0

    def take_back(self, num_tokens: int) -> None:
        """Undo a launch whose result is not wanted. The same must be done to every step launched after it."""
        self.num_in_flight -= num_tokens
        self.is_pending = False

    def release(self, pool: BlockPool) -> None:
        """Give every block back. Only outside RUNNING; a second call finds nothing to give.

        What is in flight will be dropped; one stream runs the steps in order, so the blocks may be given out at once.
        """
        if self.state is State.RUNNING:
            raise IntegrityError(f"sequence {self.seq_id} gives blocks back while running")
        pool.free(self.lose_blocks())

    def lose_blocks(self) -> list[int]:
        """Forget what is computed and where; returns the blocks, which nobody has given back."""
        blocks, self.block_table = self.block_table, []
        self.num_computed_tokens = self.num_in_flight = 0
        self.is_pending = False
        return blocks

    def finish_reason(self, max_model_len: int) -> str | None:
        """Return why the sequence is over, or None. The eos or stop token is its last token and no part of the text."""
        if self.max_tokens == 0:
            return None if self.num_uncomputed_tokens else "length"
        if self._ends_with_stop_token():
            return "stop"
        if self.num_output_tokens >= self.max_tokens or self.num_tokens >= max_model_len:
            return "length"
        return None

    def must_wait(self, max_model_len: int | None) -> bool:
        """Whether the pending token has to be known first: a penalty counts it, or it is the last there can be."""
        if not self.is_pending:
            return False
        is_last = self.num_output_tokens + 1 >= self.max_tokens
        return is_last or self.num_tokens + 1 >= (max_model_len or sys.maxsize) or self._has_penalties()

    def ahead_seconds(self, pace: float, now: float) -> float | None:
        """Return how long a reader who takes in `pace` tokens a second has enough to read.

        One who is slower has more. None: nobody reads, or nothing came of this admission yet.
        """
        has_said_nothing = self.num_output_tokens == len(self.request.output_token_ids)
        if self.reader_tokens is None or self.first_token_at is None or has_said_nothing:
            return None
        return (self.num_output_tokens - min(self.reader_tokens, pace * (now - self.first_token_at))) / pace

    def sample_spec(self) -> SampleSpec | None:
        """Say how to choose the token after the last known or pending one; None if none is wanted."""
        if self.max_tokens == 0:
            return None
        sampling = self.request.sampling
        assert sampling.seed is not None, "the seed is resolved at acceptance"
        prompt, output = self._penalised_token_ids()
        return SampleSpec(
            position=self.num_tokens + self.is_pending,
            seed=sampling.seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            prompt_token_ids=prompt,
            output_token_ids=output,
            banned_token_ids=self._banned_token_ids(),
            logprobs=sampling.logprobs,
        )

    def _stop_token_ids(self) -> Iterable[int]:
        sampling = self.request.sampling
        return (
            sampling.stop_token_ids
            if sampling.ignore_eos
            else self.request.eos_token_ids.union(sampling.stop_token_ids)
        )

    def _ends_with_stop_token(self) -> bool:
        return (
            self.num_output_tokens > self.request.sampling.min_tokens and self.token_ids[-1] in self._stop_token_ids()
        )

    def _banned_token_ids(self) -> tuple[int, ...]:
        if self.num_output_tokens + self.is_pending >= self.request.sampling.min_tokens:
            return ()
        return tuple(sorted(self._stop_token_ids()))

    def _has_penalties(self) -> bool:
        sampling = self.request.sampling
        return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)

    def _penalised_token_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not self._has_penalties():
            return (), ()
        prompt = self.request.prompt_token_ids
        return prompt, tuple(self.token_ids[len(prompt) :])
