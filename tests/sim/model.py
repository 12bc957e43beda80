"""The model of the simulation: cheap, exact, and with one right answer for every request.

`SimRunner` keeps a "KV cache" of one number a token, which depends on all tokens before it; a new token is a checksum
of all these numbers, read back through the block table, and of its sampling. A wrong block, slot, position, seed or
lost token changes the answer. `Reference` is the same model without an engine: a loop over one request. (The echo
runner does the same with readable text, at five times the cost.)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from zlib import crc32

from streamserve.engine.kv.groups import ONE_GROUP, Windows
from streamserve.engine.plan import (
    PENDING,
    Chunk,
    RawLogprobs,
    Sampled,
    SampleSpec,
    StepOutOfMemory,
    StepPlan,
    StepResult,
)
from streamserve.protocol.requests import SamplingParams

VOCAB_SIZE = 128
EOS = 1
# The duration of a step of the fake device.
STEP_SECONDS = 8 / 1024
TOKEN_SECONDS = 1 / 1024
# The content of memory that was never written.
POISON = -1
_MIX = 6364136223846793005
_MASK = 2**63 - 1


def entry(before: int, position: int, token_id: int) -> int:
    """Return a token's number in the cache: a function of the token and of all tokens before it."""
    return (before * _MIX + (position << 20 | token_id)) & _MASK


def beginning(adapter: str, group: int = 0) -> int:
    """Return what stands before the first token: an adapter, and a group of layers, computes other numbers."""
    return crc32(adapter.encode()) + (group << 40)  # 0 without


def seen(num_tokens: int, window: int | None) -> slice:
    """Return the positions that a token's successor is drawn by in a group, when there are so many."""
    return slice(0 if window is None else max(0, num_tokens - window), num_tokens)


def entries(token_ids: tuple[int, ...], adapter: str = "", group: int = 0) -> array[int]:
    """Return what the cache must hold for these tokens, in a group of layers."""
    out, before = array("q"), beginning(adapter, group)
    for position, token_id in enumerate(token_ids):
        before = entry(before, position, token_id)
        out.append(before)
    return out


def draw(state: int, spec: SampleSpec, prompt: Iterable[int] = (), output: Iterable[int] = ()) -> int:
    """Choose a token. It depends on every field of the spec and on every count, so that a lost one shows."""
    if spec.sampling.temperature:
        state = crc32(b"%d %d" % (spec.sampling.seed, spec.position), state)
    if spec.sampling.repetition_penalty != 1.0:
        state = crc32(array("q", (*prompt, POISON, *output)).tobytes(), state)
    token_id = state % VOCAB_SIZE
    while token_id in spec.banned_token_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


class SimRunner:
    """Implements `Runner`: computes in `launch`, and returns results in `collect`, as a device with one queue does.

    `is_faulty(seq_id)`: this chunk's numbers are not finite. `has_room(num_tokens)`: False runs the step out of memory,
    late (in collect) if `is_late`, always with its slots spoilt. `meanwhile()` is called while a step runs. `is_void`:
    a step failed late, and the results of steps launched on top of it are discarded.
    """

    vocab_size = VOCAB_SIZE

    def __init__(
        self, *, num_blocks: int, block_size: int, can_overlap: bool = False, windows: Windows = ONE_GROUP
    ) -> None:
        self.num_blocks = num_blocks
        self.windows = windows
        self.block_size = block_size
        self.can_overlap = can_overlap
        self.slots = array("q", [POISON]) * (num_blocks * block_size)
        self.is_faulty: Callable[[int], bool] = lambda seq_id: False
        self.has_room: Callable[[int], bool] = lambda num_tokens: True
        self.is_late = False
        self.meanwhile: Callable[[], None] = lambda: None
        self.is_void = False
        self.launched: list[StepPlan] = []
        self.failed: list[StepPlan] = []
        self._last: dict[int, int] = {}
        self._counted: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # by row: prompt and output

    def launch(self, plan: StepPlan) -> tuple[StepPlan, StepResult | None]:
        """Compute the step at once."""
        self.is_void = self.is_void and bool(self.launched)
        assert len(self.launched) < (2 if self.can_overlap else 1), "launched before the step before was collected"
        if not self.has_room(plan.num_tokens):
            self._spoil(plan)
            self.failed.append(plan)
            if not self.is_late:
                raise StepOutOfMemory
            self.launched.append(plan)
            return plan, None
        sampled = [one for chunk in plan.chunks if (one := self._run(chunk)) is not None]
        self._last = {one.seq_id: one.token_ids[-1] for one in sampled if one.token_ids}
        self.launched.append(plan)
        return plan, StepResult(step_id=plan.step_id, sampled=tuple(sampled))

    def collect(self, handle: object) -> StepResult:
        """Return the step's result, in the order of launching."""
        assert isinstance(handle, tuple)
        plan, result = handle
        self.meanwhile()
        assert self.launched.pop(0) is plan, "collected out of order, or twice"
        if result is None:
            self.is_void = True
            raise StepOutOfMemory
        return result

    def close(self) -> None:
        """Do nothing: no memory is held."""

    def poison(self, block_id: int) -> None:
        """Overwrite a block that has lost its content (the core's `on_evict`)."""
        start = block_id * self.block_size
        self.slots[start : start + self.block_size] = array("q", [POISON]) * self.block_size

    def block(self, block_id: int) -> array[int]:
        """Return what a block holds."""
        return self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]

    def _run(self, chunk: Chunk) -> Sampled | None:
        is_pending = chunk.token_ids == (PENDING,)
        token_ids = (self._last.get(chunk.seq_id, POISON),) if is_pending else chunk.token_ids
        if POISON in token_ids or self.is_faulty(chunk.seq_id):
            self._write(chunk, None)
            return Sampled(seq_id=chunk.seq_id, error="numerical_error")
        self._write(chunk, token_ids)
        if not chunk.samples:
            return None
        token_id = draw(crc32(self._read(chunk)), chunk.samples[0], *self._count(chunk.samples[0], token_ids))
        logprobs = None if chunk.samples[0].sampling.logprobs is None else RawLogprobs(chosen=-float(token_id))
        return Sampled(seq_id=chunk.seq_id, token_ids=(token_id,), logprobs=(logprobs,))

    def _count(self, spec: SampleSpec, token_ids: tuple[int, ...]) -> tuple[Sequence[int], Sequence[int]]:
        """Count as a device does: first the tokens that begin a row, then each step's own token."""
        if spec.penalty_slot is None:
            return (), ()
        if spec.prompt_token_ids:
            self._counted[spec.penalty_slot] = tuple(spec.prompt_token_ids), list(spec.output_token_ids)
        else:
            self._counted[spec.penalty_slot][1].append(token_ids[-1])
        return self._counted[spec.penalty_slot]

    def _write(self, chunk: Chunk, token_ids: tuple[int, ...] | None) -> None:
        for group, table in enumerate(chunk.tables):
            before = self.slots[self._slot(table, chunk.start - 1)] if chunk.start else beginning(chunk.adapter, group)
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                before = POISON if token_ids is None else entry(before, position, token_ids[position - chunk.start])
                self.slots[self._slot(table, position)] = before

    def _read(self, chunk: Chunk) -> bytes:
        size, num_tokens, out = self.block_size, chunk.start + len(chunk.token_ids), b""
        for table, window in zip(chunk.tables, self.windows, strict=True):
            own, span = array("q"), seen(num_tokens, window)
            first = span.start // size
            for block_id in table[first:]:
                own += self.slots[block_id * size : (block_id + 1) * size]
            out += own[span.start - first * size : span.stop - first * size].tobytes()
        return out

    def _slot(self, table: tuple[int, ...], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _spoil(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            self._write(chunk, None)


@cache
def reference(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    eos: frozenset[int],
    max_model_len: int,
    adapter: str = "",
    windows: Windows = ONE_GROUP,
) -> tuple[tuple[int, ...], str]:
    """Return all tokens of an answer, and its finish reason: the same model, one request, no engine."""
    assert sampling.max_tokens is not None
    assert sampling.seed is not None
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)
    num_tokens, out = len(prompt), []
    caches = [entries(prompt, adapter, group) for group in range(len(windows))]
    while len(out) < sampling.max_tokens and num_tokens < max_model_len:
        spec = SampleSpec(
            position=num_tokens,
            sampling=sampling,
            banned_token_ids=tuple(stops) if len(out) < sampling.min_tokens else (),
        )
        read = (one[seen(num_tokens, window)] for one, window in zip(caches, windows, strict=True))
        token_id = draw(crc32(b"".join(one.tobytes() for one in read)), spec, prompt, out)
        out.append(token_id)
        if token_id in stops:
            return tuple(out), "stop"
        for one in caches:
            one.append(entry(one[-1], num_tokens, token_id))
        num_tokens += 1
    return tuple(out), "length"
