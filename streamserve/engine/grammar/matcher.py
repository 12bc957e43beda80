"""`Vocabulary`: a model's ids as llguidance knows them. `Matcher`: where one sequence stands in its grammar.

A vocabulary is built from the tokenizer's `token_bytes`, so any `Tokenizer` that is byte-exact will do. One id is added
after the last: the end. llguidance allows it where the text so far is a whole match; which of the model's ids end an
answer is the sequence's own business. Special tokens have no text, so no text of a grammar can be written with them; a
Lark grammar names them as `<|name|>`. Read-only after it is built; any thread.

A matcher knows which ids may follow; `advance` moves all of a step. It follows the sequence's output tokens, so a
preemption does not concern it, and a readmission feeds it the tokens that were shown. A matcher that fails keeps its
`error`, which ends its own sequence. Made on a client's thread, used on the engine's.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.engine.text.tokenizer import Tokenizer

_WORD_BITS = 32
# So many masks or more are made by several threads: for fewer, to wake them takes longer than to make the masks.
_LEAST_PARALLEL = 16
_END = b"<|streamserve_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """The texts of ids 0, 1, …, the special ids among them, and the end's id after the last.

    llguidance knows one id for each text. Other ids with the same text (SentencePiece has " " as a word and as a byte)
    have no entry here, and `twins` names the id that stands for them.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    twins: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_ids: int, special_ids: Collection[int]) -> TokenTable:
        """Return the table of a model with `num_ids` ids. A special token's text is its name."""
        special = {one for one in range(num_ids) if tokenizer.is_special(one) or one in special_ids}
        tokens = [tokenizer.token_bytes(one) for one in range(num_ids)]
        for one in special:
            tokens[one] = _special_name(tokens[one], one)
        first: dict[bytes, int] = {}
        twins = {}
        for one, text in enumerate(tokens):
            if text and one not in special and first.setdefault(text, one) != one:
                twins[one] = first[text]
                tokens[one] = b""
        return cls(tokens=(*tokens, _END), special_ids=(*sorted(special), num_ids), twins=twins)


def _special_name(text: bytes, token_id: int) -> bytes:
    """Return what a Lark grammar names a special token by: `<…>`, as llguidance asks for."""
    return text if text[:1] == b"<" and text[-1:] == b">" else b"<id_%d>" % token_id


@dataclass(slots=True)
class _Wrapped:
    """What `llguidance.TokenizerWrapper` takes. It tokenises no text: each source states that no token is forced."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None
    _bytes: dict[int, int] = field(default_factory=dict)

    def __call__(self, text: bytes | str) -> list[int]:
        if not self._bytes:
            self._bytes = {token[0]: place for place, token in enumerate(self.tokens) if len(token) == 1}
        data = text.encode() if isinstance(text, str) else text
        return [self._bytes.get(byte, 0) for byte in data]


def make_tokenizer(table: TokenTable) -> Any:
    """Return llguidance's tokenizer. Slow: about a second for 150,000 ids."""
    import llguidance

    wrapped = _Wrapped(list(table.tokens), list(table.special_ids), eos_token_id=len(table.tokens) - 1)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapped))


def parser_limits(limits: GrammarLimits) -> Any:
    """Return llguidance's own limits of one matcher."""
    import llguidance

    return llguidance.LLParserLimits(
        step_lexer_fuel=limits.step_lexer_fuel,
        step_max_items=limits.step_max_items,
        max_lexer_states=limits.max_lexer_states,
        verbose_errors=False,
    )


class Vocabulary:
    """Makes matchers of one model, and fills their masks."""

    def __init__(self, table: TokenTable, limits: GrammarLimits) -> None:
        import llguidance

        self.num_ids = len(table.tokens) - 1  # without the end
        self.twins = table.twins
        self.least_parallel = _LEAST_PARALLEL
        self._twin_bits = [
            (one // 8, 1 << one % 8, first // 8, 1 << first % 8) for one, first in sorted(table.twins.items())
        ]
        self._num_mask_bytes = -(-len(table.tokens) // _WORD_BITS) * (_WORD_BITS // 8)
        self._tokenizer = make_tokenizer(table)
        self._limits = parser_limits(limits)
        self._executor = llguidance.LLExecutor()

    def new_matcher(self, source: str) -> Any:
        """Return llguidance's matcher of a text, at its beginning. Bounded only by its own limits."""
        import llguidance

        return llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)

    def masks(self, matchers: Sequence[Any]) -> list[tuple[bytes, bool]]:
        """Return for each matcher the ids that may follow, one bit for each, and whether the text may end here."""
        if len(matchers) < self.least_parallel:
            return [self._split(bytearray(one.compute_bitmask())) for one in matchers]
        size = self._num_mask_bytes
        buffer = bytearray(size * len(matchers))
        pointer = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
        pairs = [(one, place) for place, one in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, pointer, size, len(matchers))
        return [self._split(buffer[place * size : (place + 1) * size]) for place in range(len(matchers))]

    def _split(self, mask: bytearray) -> tuple[bytes, bool]:
        place, bit = self.num_ids // 8, 1 << self.num_ids % 8
        may_end = bool(mask[place] & bit)
        mask[place] &= ~bit & 0xFF
        for twin_place, twin_bit, first_place, first_bit in self._twin_bits:
            if mask[first_place] & first_bit:
                mask[twin_place] |= twin_bit
        return bytes(mask), may_end


logger = logging.getLogger(__name__)

# The code of an answer whose matcher failed.
GRAMMAR_FAILED = "grammar_failed"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Matcher:
    """`mask` has a bit for each id that may follow, but for ends of an answer; `may_end`: an end may follow, too.

    `is_complete`: nothing but an end may follow. Invariant: unless it is complete or has failed, `mask` is not empty.
    """

    vocabulary: Vocabulary
    inner: Any  # llguidance.LLMatcher
    mask: bytes = b""
    may_end: bool = False
    is_complete: bool = False
    error: str | None = None

    def feed(self, token_ids: Sequence[int]) -> None:
        """Move over tokens that were shown already."""
        if all(_consume(self, token_id) for token_id in token_ids):
            set_masks([self])

    def follow(self, token_ids: Sequence[int]) -> list[tuple[bytes, bool]]:
        """Return what may follow after each of these tokens, up to the first that is not allowed or ends the text.

        (mask, may_end) of each, as of the tokens before; the matcher stays where it is. Where the library fails, less.
        """
        follows: list[tuple[bytes, bool]] = []
        if not token_ids or self.error is not None:
            return follows
        try:
            ahead = self.inner.deep_copy()
            for token_id in token_ids:
                if not ahead.consume_token(self.vocabulary.twins.get(token_id, token_id)):
                    break
                (follow,) = self.vocabulary.masks([ahead])
                if follow[0].count(0) == len(follow[0]):
                    break
                follows.append(follow)
        except BaseException as error:  # a panic of llguidance is no Exception
            if _is_ours(error):
                raise
            logger.warning("a grammar could not be looked ahead: %s", type(error).__name__)
        return follows

    def fail(self, reason: str) -> None:
        """Record that this sequence can be checked no more."""
        logger.warning("a grammar's matcher failed: %r", reason[:200])
        self.error = GRAMMAR_FAILED

    def set_mask(self, mask: bytes, may_end: bool) -> None:
        """Record what may follow. llguidance allows the end to a matcher that has failed: that is asked first."""
        if self.inner.is_error():
            self.fail(self.inner.get_error())
            return
        is_empty = mask.count(0) == len(mask)
        if is_empty and not may_end:
            self.fail("nothing may follow, and the text may not end")
        self.mask, self.may_end, self.is_complete = mask, may_end, is_empty and may_end


def advance(moves: Iterable[tuple[Matcher, Sequence[int]]]) -> None:
    """Move each matcher over its new tokens, and make all masks in one call."""
    moved = []
    for matcher, token_ids in moves:
        if token_ids and matcher.error is None and all(_consume(matcher, token_id) for token_id in token_ids):
            moved.append(matcher)
    set_masks(moved)


def set_masks(matchers: Sequence[Matcher]) -> None:
    """Make the masks of matchers of one model; if that raises, one by one, so that only the faulty matchers fail."""
    if not matchers:
        return
    try:
        found = matchers[0].vocabulary.masks([one.inner for one in matchers])
    except BaseException as error:  # a panic of llguidance is no Exception
        if len(matchers) == 1 and not _is_ours(error):
            matchers[0].fail(f"{type(error).__name__}: {error}")
            return
        if _is_ours(error):
            raise
        for matcher in matchers:
            set_masks([matcher])
        return
    for matcher, (mask, may_end) in zip(matchers, found, strict=True):
        matcher.set_mask(mask, may_end)


def _consume(matcher: Matcher, token_id: int) -> bool:
    try:
        if matcher.inner.consume_token(matcher.vocabulary.twins.get(token_id, token_id)):
            return True
        matcher.fail(matcher.inner.get_error())
    except BaseException as error:
        if _is_ours(error):
            raise
        matcher.fail(f"{type(error).__name__}: {error}")
    return False


def _is_ours(error: BaseException) -> bool:
    """Whether it ends the thread or process, and is no failure of the library."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
