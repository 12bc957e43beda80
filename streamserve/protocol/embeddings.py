"""What is asked of an embedding model, and what it gives: `EmbedRequest`, `Embedded`. Values only.

A vector is the bytes of its float32 numbers, little-endian, as OpenAI's `encoding_format: "base64"` has them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamserve.protocol.rates import Rates

NUMBER_BYTES = 4  # of a vector's number


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """Texts, or token ids, of which each gets a vector; `dimensions` None: as long as the model makes them.

    Ids are taken as they are; a text gets the tokens with which the model begins and ends it. The inputs of a long
    request are sent in parts: `first` is the index of this part's first input, as messages name it. `is_batch`: it is
    a row of a batch, which delays no other request.
    """

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    first: int = 0
    is_batch: bool = False

    @property
    def num_chars(self) -> int:
        """Characters of its texts, and token ids."""
        return sum(map(len, self.inputs))

    def parts(self, size: int) -> list[EmbedRequest]:
        """Return requests of at most so many inputs each."""
        starts = range(0, len(self.inputs), size)
        return [replace(self, inputs=self.inputs[at : at + size], first=at) for at in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """A vector for each input, in their order, and the number of tokens of all inputs.

    `rates`: what the request has left of its caller's limits over time.
    """

    vectors: tuple[bytes, ...]
    num_tokens: int
    rates: Rates | None = None


def numbers_of(vector: bytes) -> list[float]:
    """Return a vector's numbers, each exactly the float32 number."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def vector_of(numbers: Sequence[float]) -> bytes:
    """Return numbers as a vector."""
    vector = array("f", numbers)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()
