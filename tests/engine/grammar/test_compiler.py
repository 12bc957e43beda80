"""Laws of compiling a grammar: in a process that can be killed, within limits, and again for each sequence."""

from __future__ import annotations

import builtins
import gc
import json
import os
import random
import signal
import threading
from typing import Any

import pytest

from streamserve.engine.echo import END_OF_TURN, EOS, VOCAB_SIZE, EchoTokenizer
from streamserve.engine.grammar.compiler import MatcherBudget, Proved, ProvedSources
from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.engine.grammar.matcher import Matcher, TokenTable, Vocabulary, advance, set_masks
from streamserve.engine.grammar.source import source_of
from streamserve.protocol.errors import BadRequest, Overloaded, StreamserveError
from streamserve.protocol.requests import Grammar
from tests.support.bodies.grammars import (
    SLOW_SCHEMA,
    accepts,
    allowed,
    choice,
    compiling,
    lark,
    one_matcher,
    regex,
    schema,
)
from tests.support.engines.runners import DEADLINE_SECONDS

pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")

LIMITS = GrammarLimits()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        (regex("[0-9]{2}/a"), ["12/a"], ["1", "12/", "12/ab"]),
        (regex("^a|b$"), ["a", "b"], ["ab", "^a"]),
        (regex("(é|\n)x"), ["éx", "\nx"], ["ex"]),
        (choice("yes", "no", "no/way\n"), ["yes", "no", "no/way\n"], ["ye", "maybe"]),
        (Grammar(kind="json_object"), ["{}", '{"a":[1,{"b":null}]}'], ["[]", '{"a": 1}', "1"]),
        (schema(PERSON), ['{"name":"é","age":-3}'], ['{"age":1,"name":""}', '{"name":"","age":1,"x":1}', "{}"]),
        (lark('start: word ("," word)*\nword: /[a-z]+/'), ["a,bc"], ["a,", "A"]),
        (lark('start: lazy "x"\nlazy[lazy]: /.*/'), ["ax"], ["abx", "a"]),
        (lark('start: "<" %json {"properties": {"a": {"type": "integer"}}} ">"'), ['<{"a":1}>'], ['<{"b":1}>']),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else None,
)
def test_each_kind_matches_what_it_says(grammar: Grammar, matching: list[str], others: list[str]) -> None:
    """Whole texts match, and nothing else does: no prefix, no blanks, keys in their order."""
    with compiling() as compiler:
        assert [text for text in matching if not accepts(compiler, grammar, text)] == []
        assert [text for text in others if accepts(compiler, grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "code", "says"),
    [
        (regex("(a"), "invalid_grammar", "unclosed group"),
        (regex("(?=a)b"), "invalid_grammar", "look-around"),
        (regex("a[^\\s\\S]"), "invalid_grammar", "no text matches"),
        (regex("()"), "invalid_grammar", "only the empty text"),
        (lark("start: a\na: b\nb: a"), "invalid_grammar", "no finite text"),
        (lark('start: "a" start'), "invalid_grammar", "no finite text"),
        (lark("start: missing"), "invalid_grammar", "missing"),
        (lark('begin: "a"'), "invalid_grammar", "start"),
        (schema({"type": "string", "minLength": 5, "maxLength": 3}), "invalid_grammar", "minLength"),
        (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "invalid_grammar", "Unsatisfiable"),
        (schema({"enum": []}), "invalid_grammar", "empty"),
        (schema({"type": "nothing"}), "invalid_grammar", "nothing"),
        (schema({"$ref": "https://example.org/s"}), "invalid_grammar", "example.org"),
        (schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "invalid_grammar", "oneOf"),
        (schema({"uniqueItems": True}), "unsupported_grammar", "uniqueItems"),
        (schema({"x-guidance": {"lenient": True}}), "unsupported_grammar", "x-guidance"),
        (Grammar(kind="xml"), "invalid_grammar", "kind"),
    ],
    ids=str,
)
def test_what_cannot_be_matched_is_refused(grammar: Grammar, code: str, says: str) -> None:
    """A grammar that cannot start, never ends or contradicts itself is a 400 that says why, in one short line."""
    with compiling() as compiler, pytest.raises(BadRequest) as caught:
        one_matcher(compiler, grammar)
    assert (caught.value.code, caught.value.param) == (code, "grammar")
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


WORDS = (b'{"', b'":', b"name", b'":"', b'{"na', b'x"}', b'"}', b'me":')
NAMED = {"type": "object", "properties": {"name": {"const": "x"}}, "required": ["name"]}


@pytest.mark.parametrize(
    "grammar",
    [
        schema(NAMED),
        lark(f"start: %json {json.dumps(NAMED)}"),
        lark('%llguidance {"no_forcing": false}\nstart: "{" "\\"name\\"" ":" "\\"x\\"" "}"'),
        choice('{"name":"x"}'),
        regex(r'\{"name":"x"\}'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_text_that_must_follow_may_be_written_with_any_tokens(grammar: Grammar) -> None:
    """Each token that begins the rest is allowed, across the parts of a grammar too: the model chooses."""
    tokens = (*(bytes([byte]) for byte in range(256)), *WORDS, b"<end>")
    vocabulary = Vocabulary(TokenTable(tokens=tokens, special_ids=(len(tokens) - 1,)), LIMITS)
    matcher = Matcher(vocabulary=vocabulary, inner=vocabulary.new_matcher(source_of(grammar, LIMITS)))
    set_masks([matcher])
    rest = b'{"name":"x"}'
    for written in (b'{"', b"name", b'":"', b'x"}'):
        begins = {tokens.index(one) for one in tokens if rest.startswith(one)}
        assert allowed(matcher) == begins
        advance([(matcher, [tokens.index(written)])])
        rest = rest.removeprefix(written)
    assert matcher.is_complete


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_served() -> None:
    """The worker is killed in the middle of it."""
    with compiling(compile_seconds=1.0) as compiler:
        one_matcher(compiler, regex("a"))
        first = compiler._provers[-1].pid
        with pytest.raises(BadRequest) as caught:
            one_matcher(compiler, schema(SLOW_SCHEMA))
        assert caught.value.code == "grammar_too_complex"
        assert first is not None
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert one_matcher(compiler, regex("b")).error is None


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    """Both bounds: what compiling takes ends the worker, what a matcher would keep is counted."""
    with compiling(worker_bytes=16 * 1024 * 1024, compile_seconds=60.0) as compiler:
        with pytest.raises(BadRequest, match="too much memory") as caught:
            one_matcher(compiler, schema(SLOW_SCHEMA))
        assert caught.value.code == "grammar_too_complex"
    with compiling(max_bytes=1024 * 1024) as compiler:
        with pytest.raises(BadRequest, match="the limit is 1,048,576") as caught:
            one_matcher(compiler, schema({"type": "integer", "multipleOf": 20_011}))
        assert caught.value.code == "grammar_too_complex"


@pytest.mark.parametrize("kind", [signal.SIGSEGV, signal.SIGKILL], ids=["SIGSEGV", "SIGKILL"])
def test_a_worker_that_crashes_refuses_one_grammar(kind: signal.Signals) -> None:
    """What ends the compiler's process is a 400 for the grammar that it had; the next one gets a new process."""
    with compiling(compile_seconds=DEADLINE_SECONDS) as compiler:
        one_matcher(compiler, regex("a"))
        prover = compiler._provers[-1]
        pid = prover.pid
        assert pid is not None
        refused: list[Exception] = []

        def compile_slowly() -> None:
            try:
                one_matcher(compiler, schema(SLOW_SCHEMA))
            except Exception as error:
                refused.append(error)

        thread = threading.Thread(target=compile_slowly)
        thread.start()
        while not prover._lock.locked():
            threading.Event().wait(0.001)
        os.kill(pid, kind)
        thread.join()
        assert [getattr(error, "code", None) for error in refused] == ["grammar_too_complex"]
        assert accepts(compiler, regex("b"), "b")


def test_a_worker_ends_with_its_parent() -> None:
    """Its stdin ends, whatever ended the parent."""
    with compiling() as compiler:
        one_matcher(compiler, regex("a"))
        process = compiler._provers[-1]._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_SECONDS) == 0


def test_what_was_proved_is_not_proved_again() -> None:
    """A grammar that every request of a site has costs its process once."""
    with compiling() as compiler:
        one_matcher(compiler, regex("a+"))
        for prover in compiler._provers:
            prover.close()
        one_matcher(compiler, regex("a+"))
        assert [prover.pid for prover in compiler._provers] == [None, None]


def test_proved_texts_are_bounded_in_bytes() -> None:
    """The one used longest ago goes first."""
    sources = ProvedSources(max_bytes=2 * Proved("x" * 100, 0).num_own_bytes)
    for key in (b"1", b"2"):
        sources.add(key, Proved("x" * 100, 0))
    assert sources.get(b"1") is not None
    sources.add(b"3", Proved("x" * 100, 0))
    assert [sources.get(key) is not None for key in (b"1", b"2", b"3")] == [True, False, True]
    sources.add(b"4", Proved("x" * 10_000, 0))
    assert (len(sources), sources.num_bytes) == (0, 0)


def test_open_answers_matchers_are_bounded_in_bytes() -> None:
    """Beyond the bound a request is asked to come again, and a matcher that is gone leaves its place."""
    budget = MatcherBudget(100)
    budget.take(60)
    with pytest.raises(Overloaded):
        budget.take(60)
    budget.give_back(60)
    budget.take(100)
    with compiling(max_live_bytes=1) as compiler, pytest.raises(Overloaded) as caught:
        one_matcher(compiler, regex("a"))
    assert caught.value.code == "grammar_queue_full"
    with compiling() as compiler:
        matcher = one_matcher(compiler, regex("a"))
        assert compiler._budget.num_bytes > 0
        del matcher
        gc.collect()
        assert compiler._budget.num_bytes == 0


def test_so_many_grammars_wait_at_most() -> None:
    """Each may take seconds: those that would wait for too many others are refused at once."""
    with compiling() as compiler:
        compiler._num_waiting = 16
        with pytest.raises(Overloaded):
            one_matcher(compiler, regex("a"))
        compiler._num_waiting = 0
        one_matcher(compiler, regex("a"))


def test_shown_tokens_are_followed() -> None:
    """A readmitted answer continues in the state it had; each choice has a matcher of its own."""
    with compiling() as compiler:
        fresh, shown = compiler.matchers(regex("a+b"), [(), tuple(b"aa")])
        assert (allowed(fresh), fresh.may_end) == ({ord("a")}, False)
        assert (allowed(shown), shown.may_end) == ({ord("a"), ord("b")}, False)
        advance([(shown, [ord("b")])])
        assert (allowed(shown), shown.is_complete) == (set(), True)
        assert not fresh.is_complete
        with pytest.raises(StreamserveError) as caught:
            one_matcher(compiler, regex("a+b"), tuple(b"x"))
        assert caught.value.code == "grammar_failed"


def test_ends_are_no_part_of_a_mask() -> None:
    """Which ids end an answer is the sequence's own business: the matcher only knows whether it may end."""
    with compiling() as compiler:
        matcher = one_matcher(compiler, regex("a*"))
        assert (allowed(matcher), matcher.may_end, matcher.is_complete) == ({ord("a")}, True, False)
        assert not {EOS, END_OF_TURN} & allowed(matcher)
        assert all(not EchoTokenizer().is_special(one) for one in allowed(one_matcher(compiler, regex("(.|\n)*"))))


def test_a_special_token_is_written_by_its_name_only() -> None:
    """No text of a grammar is written with special tokens; a Lark grammar may ask for one."""
    with compiling() as compiler:
        assert allowed(one_matcher(compiler, lark('start: <id_257> "a"'))) == {257}
        assert allowed(one_matcher(compiler, regex("<id_257>"))) == {ord("<")}


def test_ids_with_the_same_text_are_allowed_together() -> None:
    """The echo engine has halves of code points that are bytes as well; SentencePiece has " " twice."""
    tokenizer = EchoTokenizer()
    with compiling() as compiler:
        matcher = one_matcher(compiler, regex("é"))
        advance([(matcher, [0xC3])])
        twins = {one for one in range(VOCAB_SIZE) if tokenizer.token_bytes(one) == b"\xa9"}
        assert len(twins) > 1
        assert allowed(matcher) == twins
        advance([(matcher, [max(twins)])])
        assert matcher.is_complete


def test_one_faulty_matcher_fails_alone() -> None:
    """An exception or a panic from the library is that matcher's; the masks of the others are made."""

    class Panic(BaseException):
        """As pyo3's PanicException, which is no Exception."""

    class Faulty:
        def __init__(self, error: BaseException) -> None:
            self._error = error

        def __getattr__(self, name: str) -> Any:
            raise self._error

    with compiling() as compiler:
        matchers = [one_matcher(compiler, regex("ab")) for _ in range(20)]
        matchers[3].inner = Faulty(Panic("no"))
        matchers[7].inner = Faulty(ValueError("no"))
        advance([(matcher, [ord("a")]) for matcher in matchers])
        failed = [place for place, matcher in enumerate(matchers) if matcher.error is not None]
        assert failed == [3, 7]
        assert {frozenset(allowed(one)) for one in matchers if one.error is None} == {frozenset({ord("b")})}
        matchers[5].inner = Faulty(Panic("no"))
        set_masks([one for one in matchers if one.error is None])
        assert matchers[5].error == "grammar_failed"
        assert sum(one.error is not None for one in matchers) == 3
        assert matchers[3].follow([ord("a")]) == []  # of a failed matcher nothing is looked ahead
        matchers[6].inner = Faulty(Panic("no"))
        assert (matchers[6].follow([ord("b")]), matchers[6].error) == ([], None)


def test_a_token_that_is_not_allowed_fails_its_matcher() -> None:
    """llguidance allows the end to a matcher that has failed: it must not look like a whole match."""
    with compiling() as compiler:
        matcher = one_matcher(compiler, regex("ab"))
        advance([(matcher, [ord("x")])])
        assert matcher.error == "grammar_failed"
        assert not matcher.is_complete


@pytest.mark.parametrize("num_matchers", [1, 15, 16, 40])
def test_many_masks_at_once_are_those_made_one_by_one(num_matchers: int) -> None:
    """One call of several threads for a large step gives the same bits."""
    with compiling() as compiler:
        text = b'{"name":"x y","age":1'
        matchers = [one_matcher(compiler, schema(PERSON), tuple(text[: n % len(text)])) for n in range(num_matchers)]
        alone = [(one.mask, one.may_end) for one in matchers]
        set_masks(matchers)
        assert [(one.mask, one.may_end) for one in matchers] == alone


def test_a_lexer_that_runs_out_of_states_is_one_sequences_own() -> None:
    """llguidance's copies share a lexer: each sequence's matcher is compiled afresh, so that it cannot end others'."""
    with compiling(max_lexer_states=300) as compiler:
        grammar = regex("[ab]*a[ab]{14}x")
        first, second = compiler.matchers(grammar, [(), ()])
        rng = random.Random(1)
        for _ in range(3_000):
            advance([(first, [rng.choice(b"ab")])])
        assert first.error == "grammar_failed"
        advance([(second, [ord("a")])])
        assert second.error is None
        assert one_matcher(compiler, grammar).error is None


def test_without_the_package_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional package: nothing else of the engine needs it."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with compiling() as compiler, pytest.raises(BadRequest, match=r"pip install .*streamserve\[grammar\]") as caught:
        one_matcher(compiler, regex("a"))
    assert caught.value.code == "grammar_unavailable"


def test_a_tokenizer_that_is_no_map_of_bytes_is_refused() -> None:
    """Its text depends on neighbours, so no mask of ids could promise what the text will be."""

    class Windowed(EchoTokenizer):
        is_byte_exact = False

    from streamserve.engine.grammar.compiler import GrammarCompiler

    compiler = GrammarCompiler(Windowed(), VOCAB_SIZE)
    with pytest.raises(BadRequest) as caught:
        one_matcher(compiler, regex("a"))
    assert caught.value.code == "unsupported_grammar"


def test_limits_cross_to_the_worker_as_they_are() -> None:
    """Every field is a plain number."""
    assert json.loads(json.dumps({f: getattr(GrammarLimits(), f) for f in GrammarLimits.__slots__}))
