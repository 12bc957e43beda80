"""Laws of constrained sequences in the core: masks follow tokens, ends are whole, one fault ends one answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from streamserve.engine.echo import EOS, EchoRunner, EchoTokenizer
from streamserve.engine.grammar.compiler import GrammarCompiler
from streamserve.engine.grammar.matcher import Matcher
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.requests import Grammar
from tests.support.bodies.grammars import choice, compiling, one_matcher, regex, schema
from tests.support.engines.cores import Answer, Drive, request, sampling
from tests.support.engines.runners import GuessingRunner, ProposingRunner

pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")

WORDS = regex("( [a-z]+){3,6}")
TOKENIZER = EchoTokenizer()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with compiling() as found:
        yield found


def constrained(
    compiler: GrammarCompiler, seq_id: int, grammar: Grammar, *, eos: bool = True, **fields: Any
) -> SequenceRequest:
    shown = fields.pop("output_token_ids", ())
    outer = {name: fields.pop(name) for name in ("reader_tokens", "prompt") if name in fields}
    params = sampling(**{"max_tokens": 60, "temperature": 1.0, "seed": seq_id, **fields})
    return request(
        seq_id,
        matcher=one_matcher(compiler, grammar, shown),
        sampling=params,
        output_token_ids=shown,
        eos_token_ids=TOKENIZER.eos_token_ids if eos else frozenset(),
        **outer,
    )


def text_of(answer: Answer) -> str:
    """The text as `Choice` makes it: an end is no part of it."""
    is_ended = answer.finish_reason == "stop" and not answer.updates[-1].is_complete
    ids = answer.token_ids[:-1] if is_ended else answer.token_ids
    return b"".join(map(TOKENIZER.token_bytes, ids)).decode()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_answers_match_their_grammars(compiler: GrammarCompiler, overlap: bool) -> None:
    """Many at once, beside one without a grammar, each by its own."""
    drive = Drive(overlap=overlap, num_blocks=257)
    answers = drive.run(*[constrained(compiler, n, WORDS if n % 2 else choice("yes", "no")) for n in range(1, 8)])
    drive.run(request(50))
    for n in range(1, 8):
        pattern = "( [a-z]+){3,6}" if n % 2 else "yes|no"
        assert re.fullmatch(pattern, text_of(drive.answers[n])), text_of(drive.answers[n])
        assert drive.answers[n].finish_reason == "stop"
    assert answers


def test_a_complete_text_ends_without_an_end_token(compiler: GrammarCompiler) -> None:
    """Nothing more may follow: the answer stops with its last token, which is text, though max_tokens is reached."""
    drive = Drive()
    drive.run(constrained(compiler, 1, choice("yes"), max_tokens=3))
    answer = drive.answers[1]
    assert (text_of(answer), answer.finish_reason) == ("yes", "stop")
    assert answer.updates[-1].is_complete
    assert len(answer.token_ids) == 3


def test_an_answer_that_is_cut_says_length(compiler: GrammarCompiler) -> None:
    """What there is begins a text that matches."""
    drive = Drive()
    drive.run(constrained(compiler, 1, regex("[a]{30}"), max_tokens=5))
    assert (text_of(drive.answers[1]), drive.answers[1].finish_reason) == ("aaaaa", "length")


def test_ends_are_allowed_only_where_the_text_matches(compiler: GrammarCompiler) -> None:
    """With an end that is always likely the shortest text comes, and never less."""
    drive = Drive()
    ends = {"stop_token_ids": (EOS,)}
    drive.run(*[constrained(compiler, n, regex("a{4,40}"), max_tokens=50, **ends) for n in range(1, 9)])
    texts = [text_of(drive.answers[n]) for n in range(1, 9)]
    assert all(re.fullmatch("a{4,40}", text) for text in texts)
    assert {drive.answers[n].finish_reason for n in range(1, 9)} == {"stop"}
    assert len(set(texts)) > 1


def test_min_tokens_holds_while_the_grammar_goes_on(compiler: GrammarCompiler) -> None:
    """The end is banned before min_tokens; where the grammar leaves nothing else, the grammar decides."""
    drive = Drive()
    drive.run(*[constrained(compiler, n, regex("a*"), min_tokens=12, max_tokens=50) for n in range(1, 7)])
    assert min(len(text_of(drive.answers[n])) for n in range(1, 7)) >= 12
    drive.run(constrained(compiler, 20, choice("yes", "no"), min_tokens=12))
    assert text_of(drive.answers[20]) in ("yes", "no")
    assert drive.answers[20].finish_reason == "stop"


def test_without_an_end_an_answer_goes_on_until_it_must(compiler: GrammarCompiler) -> None:
    """`ignore_eos`, or a model without end tokens: complete, or cut."""
    drive = Drive()
    drive.run(
        constrained(compiler, 1, regex("a*"), ignore_eos=True, max_tokens=20),
        constrained(compiler, 2, regex("a{1,7}"), ignore_eos=True, max_tokens=20),
        constrained(compiler, 3, regex("a{1,7}"), eos=False, max_tokens=20),
    )
    assert (text_of(drive.answers[1]), drive.answers[1].finish_reason) == ("a" * 20, "length")
    assert (text_of(drive.answers[2]), drive.answers[2].finish_reason) == ("a" * 7, "stop")
    assert (text_of(drive.answers[3]), drive.answers[3].finish_reason) == ("a" * 7, "stop")


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_shown_tokens_continue_as_if_never_interrupted(compiler: GrammarCompiler, overlap: bool) -> None:
    """A readmission after each number of tokens gives the same answer."""
    grammar = schema({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}})
    whole = Drive(overlap=overlap)
    whole.run(constrained(compiler, 1, grammar))
    ids = tuple(whole.answers[1].token_ids)
    assert len(ids) > 2
    for cut in range(1, len(ids) + 1):
        drive = Drive(overlap=overlap)
        again = replace(constrained(compiler, 1, grammar, output_token_ids=ids[:cut]), seq_id=1)
        if ids[:cut][-1] in TOKENIZER.eos_token_ids:
            continue  # acceptance leaves it out of what the matcher is fed: tests/clients/thread/test_grammar.py
        drive.run(again)
        assert ids[:cut] + tuple(drive.answers[1].token_ids) == ids
        assert drive.answers[1].finish_reason == whole.answers[1].finish_reason


def test_preemption_changes_nothing(compiler: GrammarCompiler) -> None:
    """A matcher follows tokens, not blocks: an answer whose blocks were taken continues where it was."""
    plain = Drive(num_blocks=257)
    plain.run(*[constrained(compiler, n, WORDS) for n in range(1, 7)])
    tight = Drive(num_blocks=257)
    turns = iter(range(10_000))
    tight.core.scheduler.forced_preempt = lambda running: running[-1:] if next(turns) % 3 == 0 else ()
    tight.run(*[constrained(compiler, n, WORDS) for n in range(1, 7)])
    assert tight.core.scheduler.num_preemptions > 0
    assert {n: one.token_ids for n, one in tight.answers.items()} == {
        n: one.token_ids for n, one in plain.answers.items()
    }


def test_a_faulty_matcher_ends_its_own_answer(compiler: GrammarCompiler) -> None:
    """The others of the step go on, and the blocks come back."""

    class Broken:
        """A matcher of the library that panics at its third token."""

        def __init__(self, matcher: Matcher) -> None:
            self._inner, self._left = matcher.inner, 2

        def consume_token(self, token_id: int) -> bool:
            if not self._left:
                raise SystemError("panic")
            self._left -= 1
            return bool(self._inner.consume_token(token_id))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    drive = Drive()
    broken = constrained(compiler, 2, WORDS)
    assert broken.matcher is not None
    broken.matcher.inner = Broken(broken.matcher)
    drive.run(constrained(compiler, 1, WORDS), broken, constrained(compiler, 3, WORDS))
    assert (drive.answers[2].error, len(drive.answers[2].token_ids)) == ("grammar_failed", 2)
    assert [drive.answers[n].finish_reason for n in (1, 3)] == ["stop", "stop"]
    assert drive.core.stats.blocks_used == 0


def test_with_overlap_a_grammar_waits_and_others_do_not(compiler: GrammarCompiler) -> None:
    """Its mask needs the token in flight: it is left out of every second step, which is counted; alone, of none."""
    drive = Drive(speculation="off", overlap=True)
    drive.run(constrained(compiler, 1, regex("a{8}")), request(2, sampling=sampling(max_tokens=16)))
    steps = [plan for plan in drive.plans if any(chunk.seq_id == 2 for chunk in plan.chunks)]
    assert len(steps) == 16
    assert drive.core.stats.grammar_waits > 0
    assert text_of(drive.answers[1]) == "a" * 8
    with_grammar = [any(chunk.seq_id == 1 for chunk in plan.chunks) for plan in drive.plans]
    assert sum(with_grammar) == 8
    alone = Drive(speculation="off", overlap=True)
    alone.run(constrained(compiler, 1, regex("a{8}")))
    assert len(alone.plans) == 8


def test_without_overlap_nothing_waits(compiler: GrammarCompiler) -> None:
    """On a CPU a grammar is in every step."""
    drive = Drive(speculation="off")
    drive.run(constrained(compiler, 1, regex("a{8}")), request(2, range(100, 120), sampling=sampling(max_tokens=16)))
    assert [len(plan.chunks) for plan in drive.plans[:8]] == [2] * 8
    assert drive.core.stats.grammar_waits == 0


def test_penalties_logprobs_and_grammars_go_together(compiler: GrammarCompiler) -> None:
    """Each keeps its own meaning."""
    drive = Drive()
    drive.run(constrained(compiler, 1, choice("yes"), frequency_penalty=1.5, logprobs=1))
    assert text_of(drive.answers[1]) == "yes"
    assert all(one is not None for one in drive.answers[1].logprobs)


def test_json_of_the_echo_engine_is_json(compiler: GrammarCompiler) -> None:
    """An engine without a model ends its texts and objects, so that a site's tests get whole answers."""
    drive = Drive(num_blocks=513)
    drive.run(*[constrained(compiler, n, Grammar(kind="json_object"), max_tokens=400) for n in range(1, 9)])
    ended = [one for one in drive.answers.values() if one.finish_reason == "stop"]
    assert len(ended) > 4
    for answer in ended:
        assert isinstance(json.loads(text_of(answer)), dict)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_answers_of_several_tokens_a_step_are_the_same(compiler: GrammarCompiler, overlap: bool) -> None:
    """Each row has the mask of the tokens before it; nothing is proposed beyond an end or what the grammar forbids."""
    grammars = (WORDS, choice("yes", "no"), schema({"type": "object", "properties": {"a": {"type": "integer"}}}))

    def requests() -> list[SequenceRequest]:
        return [constrained(compiler, n, grammars[n % 3], logprobs=n % 2 or None) for n in range(1, 7)]

    alone = Drive(num_blocks=257).run(*requests())
    texts = [(*range(20), *one.token_ids) for one in alone.values()]
    for seed in range(4):
        inner = EchoRunner(num_blocks=257, block_size=4, can_overlap=overlap)
        runner = ProposingRunner(inner, texts, seed)
        found = Drive(runner=runner, overlap=overlap, prefix_caching=False).run(*requests())
        for n, answer in found.items():
            assert text_of(answer) == text_of(alone[n])
            assert (answer.token_ids, answer.logprobs) == (alone[n].token_ids, alone[n].logprobs)
        assert runner.num_kept[2] + runner.num_kept[3] > 0


def test_with_a_draft_model_answers_are_the_same(compiler: GrammarCompiler) -> None:
    """It knows no grammar: what one forbids is not tried, and the rest is checked as ever."""

    def requests() -> list[SequenceRequest]:
        free = regex("[\\x00-\\x7f]{40}")
        return [constrained(compiler, n, free if n > 1 else WORDS, max_tokens=40) for n in range(1, 5)]

    alone = Drive(num_blocks=257, block_size=8, speculation="off").run(*requests())
    draft = GuessingRunner(EchoRunner(num_blocks=257, block_size=8), 0.2)
    drive = Drive(runner=EchoRunner(num_blocks=257, block_size=8), draft=draft)
    found = drive.run(*requests())
    assert {n: one.token_ids for n, one in found.items()} == {n: one.token_ids for n, one in alone.items()}
    assert draft.passes
    drive.assert_empty()
