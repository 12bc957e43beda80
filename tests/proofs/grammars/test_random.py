"""Ten thousand random grammars: each is refused with a 400, or every answer of a random model matches it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import regex as backtracking

from streamserve.engine.echo import VOCAB_SIZE, EchoTokenizer
from streamserve.engine.grammar.compiler import GrammarCompiler
from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.engine.grammar.matcher import Matcher, advance
from streamserve.engine.grammar.source import read_schema
from streamserve.engine.plan import Sampled, StepPlan, StepResult
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Grammar
from tests.proofs.grammars.generators import broken_regex, random_regex, random_schema
from tests.proofs.scale import IS_SOAK, scaled
from tests.support.bodies.grammars import allowed, regex, schema
from tests.support.engines.cores import Drive, request, sampling

pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install -r tests/requirements.txt")

pytestmark = [pytest.mark.timeout(3600 if IS_SOAK else 300)]

NUM_GRAMMARS = scaled(10_000)
MAX_TOKENS = 80
_MATCH_SECONDS = 2.0
TOKENIZER = EchoTokenizer()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(TOKENIZER, VOCAB_SIZE, TOKENIZER.eos_token_ids)
    yield found
    found.close()


class RandomRunner:
    """A model that knows nothing: whatever the mask allows is equally likely; ends, and what closes, a little more."""

    block_size, num_blocks, vocab_size, can_overlap, windows = 4, 513, VOCAB_SIZE, False, (None,)

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def launch(self, plan: StepPlan) -> object:
        return plan

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, StepPlan)
        sampled = []
        for chunk in handle.chunks:
            if chunk.samples:
                mask = chunk.samples[0].mask
                assert mask is not None
                ids = [one for one in range(VOCAB_SIZE) if mask[one // 8] >> one % 8 & 1]
                closing = [one for one in (*chunk.samples[0].mask_end_ids, *b'"]}') if one in ids or one > 255]
                assert ids or closing, "a step without a token"
                pool = closing if closing and self._rng.random() < 0.4 else ids or closing
                sampled.append(Sampled(seq_id=chunk.seq_id, token_ids=(self._rng.choice(pool),)))
        return StepResult(step_id=handle.step_id, sampled=tuple(sampled))

    def close(self) -> None:
        """Nothing is held."""


def is_valid_json(text: str, value: dict[str, Any]) -> bool:
    """By an independent validator: the caller's schema, and that with its objects closed, which forbids more."""
    found = json.loads(text)
    closed = read_schema(json.dumps(value), GrammarLimits())
    return all(jsonschema.Draft202012Validator(one).is_valid(found) for one in (value, closed))


def matches(pattern: str, text: str) -> bool:
    """By an independent matcher, which backtracks: TimeoutError where that would take hours."""
    return backtracking.fullmatch(pattern, text, timeout=_MATCH_SECONDS) is not None


def text_of(ids: list[int]) -> str:
    return b"".join(map(TOKENIZER.token_bytes, ids)).decode()


def prove(compiler: GrammarCompiler, grammars: list[tuple[Grammar, Any]], counts: Counter[str], seed: int) -> None:
    """Let the engine answer all of these at once, as far as they are accepted."""
    drive = Drive(runner=RandomRunner(seed), max_num_seqs=64)
    accepted: dict[int, Any] = {}
    for seq_id, (grammar, value) in enumerate(grammars, 1):
        try:
            [matcher] = compiler.matchers(grammar, [()])
        except BadRequest as error:  # any other error fails the proof
            counts[f"400 {error.code}"] += 1
            continue
        accepted[seq_id] = value
        drive.add(
            request(
                seq_id,
                matcher=matcher,
                sampling=sampling(max_tokens=MAX_TOKENS),
                eos_token_ids=TOKENIZER.eos_token_ids,
            )
        )
    drive.run()
    for seq_id, value in accepted.items():
        answer = drive.answers[seq_id]
        assert answer.error is None, (value, answer.error)
        counts[f"answers ended by {answer.finish_reason}"] += 1
        if answer.finish_reason == "stop":
            ids = answer.token_ids if answer.updates[-1].is_complete else answer.token_ids[:-1]
            counts[judge(value, text_of(ids))] += 1
    drive.assert_empty()


def judge(value: Any, text: str) -> str:
    """Check an answer by what it should match; None: only the engine's own fate is of interest."""
    if value is None:
        return "not judged"
    try:
        is_valid = matches(value, text) if isinstance(value, str) else is_valid_json(text, value)
    except (RecursionError, TimeoutError):  # the validator follows `{"anyOf": [{"$ref": "#"}, …]}` for ever
        return "not judged"
    assert is_valid, f"{value!r} was answered with {text!r}"
    return "judged valid"


def random_grammar(kind: str, rng: random.Random) -> tuple[Grammar, Any]:
    """Return a grammar, and what its answers are judged by."""
    if kind == "schema":
        value = random_schema(rng)
        return schema(value), value
    if rng.random() < 0.1:
        return regex(broken_regex(rng)), None
    pattern = random_regex(rng)
    return regex(pattern), pattern


@pytest.mark.parametrize("kind", ["schema", "regex"])
def test_random_grammars(compiler: GrammarCompiler, kind: str) -> None:
    """No grammar harms the engine, and what an answer ends with is what was asked for."""
    counts: Counter[str] = Counter()
    for begin in range(0, NUM_GRAMMARS, 50):
        grammars = []
        for number in range(begin, min(begin + 50, NUM_GRAMMARS)):
            rng = random.Random(f"{kind} {number}")
            grammars.append(random_grammar(kind, rng))
        prove(compiler, grammars, counts, begin)
    print(f"\nrandom grammars, {kind}: {NUM_GRAMMARS:,}; {dict(counts)}")
    assert counts["judged valid"] > NUM_GRAMMARS // 4
    assert counts["400 invalid_grammar"]


def test_random_tokens_never_leave_a_grammar_without_a_way_on(compiler: GrammarCompiler) -> None:
    """From every state that random tokens reach there is a token, or the text is whole."""
    rng = random.Random(3)
    for number in range(NUM_GRAMMARS // 10):
        try:
            [matcher] = compiler.matchers(schema(random_schema(random.Random(f"walk {number}"))), [()])
        except BadRequest:
            continue
        walk(matcher, rng)


def walk(matcher: Matcher, rng: random.Random) -> None:
    for _ in range(MAX_TOKENS):
        assert matcher.error is None
        ids = sorted(allowed(matcher))
        assert bool(ids) != matcher.is_complete
        if matcher.is_complete:
            return
        advance([(matcher, [rng.choice(ids)])])
