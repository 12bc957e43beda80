"""`GrammarCompiler`: from a request's `Grammar` to a `Matcher` of one sequence, or a 400 that names the fault.

    size, depth, keywords   source.py, pure: before anything is allocated
    proof                   prover.py: compiled in a process that can be killed; what is proved is remembered
    matcher                 compiled again here, for each sequence

A matcher cannot cross processes, so the proof shows that compiling ends within its limits, and llguidance's own limits
bound it a second time. Each sequence's is compiled afresh: llguidance's copies share one lexer, and what one sequence
does to it (it runs out of states, it panics) would end the others'. Blocking; any thread but the engine's and the loop.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import LifoQueue

from streamserve.engine.grammar.limits import PARAM, GrammarLimits, refusal, unsupported_grammar, without_place
from streamserve.engine.grammar.matcher import Matcher, TokenTable, Vocabulary
from streamserve.engine.grammar.prover import Prover
from streamserve.engine.grammar.source import source_of
from streamserve.engine.text.tokenizer import Tokenizer
from streamserve.protocol.errors import BadRequest, Overloaded, StreamserveError
from streamserve.protocol.requests import Grammar

# Worker processes, and so the grammars that are proved at once.
NUM_PROVERS = 2
# So many may wait for them; each may take `compile_seconds`.
_MAX_WAITING = 16
_RETRY_SECONDS = 2
_INSTALL = 'pip install "streamserve[grammar]"'


class GrammarCompiler:
    """The grammars of one model. Nothing is imported, built or started before the first grammar."""

    def __init__(
        self, tokenizer: Tokenizer, num_ids: int, special_ids: Iterable[int] = (), limits: GrammarLimits | None = None
    ) -> None:
        """`special_ids`: those that no text is written with, beside the tokenizer's own: ends, and a format's tags."""
        self.limits = limits or GrammarLimits()
        self._tokenizer = tokenizer
        self._num_ids = num_ids
        self._special_ids = frozenset(special_ids)
        self._proved = ProvedSources(self.limits.cache_bytes)
        self._budget = MatcherBudget(self.limits.max_live_bytes)
        self._lock = threading.Lock()  # guards what follows
        self._vocabulary: Vocabulary | None = None
        self._provers: list[Prover] = []
        self._free: LifoQueue[Prover] = LifoQueue()  # the last used is taken first: often the second never starts
        self._num_waiting = 0
        self._is_closed = False

    def matchers(self, grammar: Grammar, shown: Sequence[Sequence[int]]) -> tuple[Matcher, ...]:
        """Return a matcher for each choice, after the tokens that were shown of it (an end left out).

        Raises BadRequest for a grammar that cannot be used, Overloaded if too many wait to be proved.
        """
        proved = self._proved_source(grammar)
        vocabulary = self._built()
        out = []
        for token_ids in shown:
            self._budget.take(proved.num_bytes)
            matcher = Matcher(vocabulary=vocabulary, inner=vocabulary.new_matcher(proved.source))
            weakref.finalize(matcher, self._budget.give_back, proved.num_bytes).atexit = False
            matcher.feed(token_ids)
            if matcher.error is not None:  # shown under another grammar, or too complex
                message = "the tokens that were shown do not follow the grammar."
                raise StreamserveError(message, code=matcher.error, param=PARAM)
            out.append(matcher)
        return tuple(out)

    def check(self, grammar: Grammar) -> None:
        """Raise BadRequest for a grammar that is wrong on the face of it; what needs the compiler is not looked at."""
        source_of(grammar, self.limits)

    def fault(self, grammar: Grammar) -> BadRequest | None:
        """Return why a grammar cannot be compiled; None if it can. Raises Overloaded as `matchers` does."""
        try:
            self._proved_source(grammar)
        except BadRequest as error:
            return error
        return None

    def close(self) -> None:
        """End the worker processes; a grammar that is being proved is refused."""
        with self._lock:
            self._is_closed = True
            provers = list(self._provers)
        for prover in provers:
            prover.close()

    def _proved_source(self, grammar: Grammar) -> Proved:
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.value}".encode(errors="surrogatepass")).digest()
        found = self._proved.get(key)
        if found is None:
            source = source_of(grammar, self.limits)
            self._require_support()
            with self._one_prover() as prover:
                try:
                    found = Proved(source, prover.prove(source))
                except BadRequest as error:  # a place in the text that was compiled: the caller's own is Lark
                    raise error if grammar.kind == "lark" else without_place(error) from None
            self._proved.add(key, found)
        return found

    def _require_support(self) -> None:
        """Raise unless llguidance is installed, and the tokenizer is a map from ids to bytes."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            message = f"llguidance is not installed on this server: {_INSTALL}"
            raise refusal("grammar_unavailable", message) from None
        if not self._tokenizer.is_byte_exact:
            raise unsupported_grammar("the text of this model's tokens depends on their neighbours.")

    @contextmanager
    def _one_prover(self) -> Iterator[Prover]:
        with self._lock:
            if self._num_waiting >= _MAX_WAITING or self._is_closed:
                raise _full("too many grammars wait to be compiled.")
            self._num_waiting += 1
            if not self._provers:
                self._provers = [Prover(self._table(), self.limits) for _ in range(NUM_PROVERS)]
                for one in self._provers:
                    self._free.put(one)
        try:
            prover = self._free.get()
            try:
                yield prover
            finally:
                self._free.put(prover)
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _built(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._table(), self.limits)
            return self._vocabulary

    def _table(self) -> TokenTable:
        return TokenTable.of(self._tokenizer, self._num_ids, self._special_ids)


@dataclass(frozen=True, slots=True)
class Proved:
    """A text that compiles within its limits, and the bytes that each matcher of it takes."""

    source: str
    num_bytes: int

    @property
    def num_own_bytes(self) -> int:
        """About what it takes to remember it: a character may take four bytes."""
        return 4 * len(self.source) + 200


class ProvedSources:
    """The texts that were proved, the text used last at the end; at most `max_bytes` of them. Any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards `num_bytes` and what follows
        self._found: OrderedDict[bytes, Proved] = OrderedDict()

    def get(self, key: bytes) -> Proved | None:
        """Return a text, and move it to the end."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def add(self, key: bytes, proved: Proved) -> None:
        """Keep a text; the oldest go."""
        with self._lock:
            if key not in self._found:
                self._found[key] = proved
                self.num_bytes += proved.num_own_bytes
            while self.num_bytes > self._max_bytes:
                _, oldest = self._found.popitem(last=False)
                self.num_bytes -= oldest.num_own_bytes

    def __len__(self) -> int:
        return len(self._found)


class MatcherBudget:
    """The bytes that the matchers of open answers take. Any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._lock = threading.RLock()  # guards `num_bytes`; a matcher may be collected while it is held

    def take(self, num_bytes: int) -> None:
        """Count a matcher that is about to be made, or raise Overloaded."""
        with self._lock:
            if self.num_bytes + num_bytes > self._max_bytes:
                raise _full("the grammars of running answers take all the memory for them.")
            self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count a matcher that is gone."""
        with self._lock:
            self.num_bytes -= num_bytes


def _full(message: str) -> Overloaded:
    return Overloaded(f"{message} Try again in a moment.", code="grammar_queue_full", retry_after=_RETRY_SECONDS)
