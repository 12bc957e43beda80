"""`PromptLookup`: what follows the last tokens of a sequence where they stood before, in its prompt or its output.

Answers that quote, correct or repeat have most of their tokens in the prompt. Pure: one sequence's ints, no odds.
(Idea: prompt lookup decoding, A. Saxena 2023; Yang et al., "Inference with Reference", arXiv 2304.04487.)

Tokens are kept as four bytes each and searched as bytes: an index would take thirty times the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

MIN_MATCH, MAX_MATCH = 3, 16  # tokens that must be alike; more than the most say nothing more
_MAX_CANDIDATES = 8  # places that are compared, the latest first
_SIZE = array("i").itemsize
_GAP = -1  # between the prediction and the prompt: no token


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens that may follow, and how many before them were alike."""

    token_ids: tuple[int, ...]
    num_alike: int


NOTHING = Found((), 0)


class PromptLookup:
    """The known tokens of one sequence, which only grow, after the caller's `prediction` of its output."""

    def __init__(self, num_prompt_tokens: int, prediction: Sequence[int] = ()) -> None:
        self._prediction = tuple(prediction)
        self._num_prompt_tokens, self._num_known = num_prompt_tokens, 0
        self._text = bytearray(array("i", [*prediction, _GAP]).tobytes() if prediction else b"")

    def follow(self, token_ids: Sequence[int], most: int) -> Found:
        """Return up to `most` tokens that may follow `token_ids`."""
        self._text += array("i", token_ids[self._num_known :]).tobytes()
        self._num_known = len(token_ids)
        return self._begin(token_ids, most) or self._repeat(most)

    def _begin(self, token_ids: Sequence[int], most: int) -> Found | None:
        """Return what follows in the prediction while the output is still its beginning, and too short for a search."""
        num_output = self._num_known - self._num_prompt_tokens
        is_beginning = (
            num_output < MIN_MATCH and tuple(token_ids[self._num_prompt_tokens :]) == self._prediction[:num_output]
        )
        if not self._prediction or not is_beginning:
            return None
        return Found(self._prediction[num_output : num_output + most], MAX_MATCH)

    def _repeat(self, most: int) -> Found:
        """Return what follows the longest match of the last tokens; of equal matches the latest."""
        text, ends = self._text, len(self._text)
        wanted = bytes(text[ends - MIN_MATCH * _SIZE :])
        if len(wanted) < MIN_MATCH * _SIZE:
            return NOTHING
        best, best_at, before, num_seen = 0, 0, ends - _SIZE, 0
        while num_seen < _MAX_CANDIDATES and best < MAX_MATCH:
            at = text.rfind(wanted, 0, before)
            if at < 0:
                break
            before = at + len(wanted) - 1
            if at % _SIZE:
                continue
            num_seen += 1
            num_alike = self._num_alike(at + len(wanted))
            if num_alike > best:
                best, best_at = num_alike, at + len(wanted)
        return Found(self._from(best_at, most), best) if best else NOTHING

    def _num_alike(self, end: int) -> int:
        """Return how many tokens before `end` are those before the end of the text."""
        text, ends, num = self._text, len(self._text), MIN_MATCH
        while num < MAX_MATCH:
            first, last = end - (num + 1) * _SIZE, ends - (num + 1) * _SIZE
            if first < 0 or text[first : first + _SIZE] != text[last : last + _SIZE]:
                break
            num += 1
        return num

    def _from(self, at: int, most: int) -> tuple[int, ...]:
        """Return the tokens from `at` to a gap; where the text ends first, it goes on as it has repeated itself."""
        piece = array("i", bytes(self._text[at : at + most * _SIZE])).tolist()
        if _GAP in piece:
            return tuple(piece[: piece.index(_GAP)])
        period = len(piece)
        return tuple(piece[index % period] for index in range(most)) if period else ()
