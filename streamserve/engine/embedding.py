"""`EmbedQueue`: which inputs of which requests the next pass of an embedding model computes. Pure; no torch, no clock.

    request A: 40 documents ─┐   tenant 1                          a pass: max_batch_tokens at most, padding counted,
    request B:  2 documents ─┴► A0 A1 … B0 B1 ─┐                   and no more than the measured time allows
    request C:  1 question  ──► C0  tenant 2  ─┴► A0 C0 A1 A2 …

Tenants take turns, an input each, so a question never waits for the documents of another tenant. Rows of batches are
taken where nothing else waits. Inputs of a request are taken by their length, the longest first: a pass of inputs that
are about as long is padded least. `EchoEmbedder` ships for a site's tests.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamserve.engine.echo import VOCAB_SIZE, EchoTokenizer
from streamserve.engine.text.spelling import spell
from streamserve.protocol.embeddings import vector_of
from streamserve.protocol.spelling import Spell, Spelled

HUNG_FACTOR = 8  # a pass takes so many times what was to be expected, and counts as hung
FIRST_PASS_SECONDS = 120.0  # until a pass was measured
_MIN_BATCH_TOKENS = 256  # of a pass, however slow: fewer leave the processor idle
_FORGET = 0.25  # the weight of the last pass in the measured time


class Embedder(Protocol):
    """Computes vectors. `embed` on the engine thread, the rest on any.

    `dimensions`: of its vectors; `allows_fewer`: they may be cut. `max_model_len`: tokens of an input.
    """

    dimensions: int
    allows_fewer: bool
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_parameters: int

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Return the ids of texts, with those that the model begins and ends them with. Slow: never on a loop."""

    def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids. Raises BadRequest for unknown ids. Slow, too."""

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: Sequence[int | None]) -> list[bytes | None]:
        """Return the vector of each input, of so many dimensions; None for one that is not finite."""


@dataclass(slots=True, eq=False)
class Work:
    """A request on its way: its inputs as ids, and the vectors so far. Changed on the engine thread only."""

    inputs: Sequence[Sequence[int]]
    dimensions: int | None
    tenant: str = ""
    is_batch: bool = False  # a row of a batch
    is_withdrawn: bool = False  # its client has left; set on any thread
    vectors: list[bytes | None] = field(init=False)
    num_left: int = field(init=False)  # inputs without a vector

    def __post_init__(self) -> None:
        self.vectors = [None] * len(self.inputs)
        self.num_left = len(self.inputs)


@dataclass(frozen=True, slots=True)
class Item:
    """One input of a request."""

    work: Work
    index: int

    @property
    def token_ids(self) -> Sequence[int]:
        """The input."""
        return self.work.inputs[self.index]


class EmbedQueue:
    """The inputs that wait, by tenant. The caller guards it by a lock."""

    def __init__(self) -> None:
        self._tenants: dict[bool, dict[str, deque[Item]]] = {False: {}, True: {}}  # by Work.is_batch

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    @property
    def num_tokens(self) -> int:
        """Tokens of the inputs that wait."""
        return sum(len(item.token_ids) for items in self._all() for item in items)

    def add(self, work: Work) -> None:
        """Add a request's inputs, behind those of its tenant that wait."""
        by_length = sorted(range(len(work.inputs)), key=lambda index: -len(work.inputs[index]))
        items = self._tenants[work.is_batch].setdefault(work.tenant, deque())
        items.extend(Item(work, index) for index in by_length)

    def take(self, most_tokens: int) -> list[Item]:
        """Take the inputs of a pass: one at least, and no more than fill `most_tokens`, padding counted."""
        taken: list[Item] = []
        longest = 0
        for tenants in self._tenants.values():
            turns = deque(tenants)
            while turns:
                tenant = turns.popleft()
                items = tenants[tenant]
                while items and items[0].work.is_withdrawn:
                    items.popleft()
                if items:
                    length = max(longest, len(items[0].token_ids))
                    if taken and length * (len(taken) + 1) > most_tokens:
                        return taken
                    longest = length
                    taken.append(items.popleft())
                if items:
                    turns.append(tenant)
                    tenants[tenant] = tenants.pop(tenant)  # behind the others, also in the next pass
                else:
                    del tenants[tenant]
        return taken

    def _all(self) -> Iterator[deque[Item]]:
        return (items for tenants in self._tenants.values() for items in tenants.values())


class PassTime:
    """The measured time of a token in a pass, by which the next pass is bounded. One thread."""

    def __init__(self, max_tokens: int, max_seconds: float) -> None:
        self._max_tokens, self._max_seconds = max_tokens, max_seconds
        self._token_seconds: float | None = None

    @property
    def most_tokens(self) -> int:
        """How many tokens the next pass may have."""
        if not self._token_seconds:
            return min(self._max_tokens, _MIN_BATCH_TOKENS * 4)
        by_time = int(self._max_seconds / self._token_seconds)
        return min(self._max_tokens, max(_MIN_BATCH_TOKENS, by_time))

    def seconds_allowed(self, num_tokens: int, least: float) -> float:
        """Return how long a pass may take until it counts as hung."""
        if self._token_seconds is None:
            return max(least, FIRST_PASS_SECONDS)
        return max(least, HUNG_FACTOR * self._token_seconds * num_tokens)

    def seconds_for(self, num_tokens: int) -> float | None:
        """Return how long so many tokens take; None before a pass was measured."""
        return None if self._token_seconds is None else self._token_seconds * num_tokens

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note what a pass took."""
        measured, before = seconds / max(1, num_tokens), self._token_seconds
        self._token_seconds = measured if before is None else before + _FORGET * (measured - before)


_ECHO_DIMENSIONS, _ECHO_MODEL_LEN = 64, 8192
_WORD = re.compile(r"\w+")


class EchoEmbedder:
    """An embedding model without weights, for a site's tests: texts that have words in common are near each other.

    Each word adds a vector that is made of its hash; the sum has the length 1. `pause` is called once a pass.
    """

    dimensions, allows_fewer, max_model_len, vocab_size = _ECHO_DIMENSIONS, True, _ECHO_MODEL_LEN, VOCAB_SIZE
    dtype, device, num_parameters = "int", "cpu", 0

    def __init__(self, pause: Callable[[], None] | None = None) -> None:
        self._tokenizer, self._pause = EchoTokenizer(), pause

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [self._tokenizer.text_ids(text) for text in texts]

    def spell(self, asked: Spell) -> Spelled:
        return spell(self._tokenizer, asked)

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: Sequence[int | None]) -> list[bytes | None]:
        if self._pause is not None:
            self._pause()
        return [self._embed(ids, num or _ECHO_DIMENSIONS) for ids, num in zip(inputs, dimensions, strict=True)]

    def _embed(self, token_ids: Sequence[int], num: int) -> bytes:
        total = [0.0] * _ECHO_DIMENSIONS
        for word in _WORD.findall(self._tokenizer.decode(token_ids).lower()) or [""]:
            for index, byte in enumerate(hashlib.shake_128(word.encode()).digest(_ECHO_DIMENSIONS)):
                total[index] += byte - 127.5
        length = math.sqrt(sum(number * number for number in total[:num])) or 1.0
        return vector_of([number / length for number in total[:num]])
