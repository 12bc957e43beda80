"""Laws of the echo engine: a wrong read changes the text, and the text is readable."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from streamserve.engine.echo import ASSISTANT, END_OF_TURN, USER, VOCAB_SIZE, EchoRunner, EchoTokenizer
from streamserve.engine.plan import PENDING, Chunk, Sampled, StepPlan
from streamserve.protocol.errors import BadRequest, PromptTooLong
from streamserve.protocol.requests import GenerateRequest, Message
from tests.support.engines.cores import alone, request, sampling
from tests.support.engines.specs import spec_of

GREEDY = spec_of(8, temperature=0.0)


def run(runner: EchoRunner, *chunks: Chunk) -> tuple[Sampled, ...]:
    return runner.collect(runner.launch(StepPlan(step_id=0, chunks=chunks))).sampled


def chunk(table: tuple[int, ...] = (1, 2), start: int = 0, **fields: object) -> Chunk:
    tokens = tuple(range(start, 8))
    return Chunk(
        **{"seq_id": 1, "start": start, "token_ids": tokens, "block_table": table, "samples": (GREEDY,), **fields}
    )


def first_token(*chunks: Chunk) -> int | None:
    runner = EchoRunner(num_blocks=8, block_size=4)
    return [run(runner, one)[-1].token_ids[0] for one in chunks][-1]


def test_pages_may_be_anywhere() -> None:
    """The answer depends on the tokens in the block table, not on the block ids."""
    assert first_token(chunk((1, 2))) == first_token(chunk((7, 3)))


def test_wrong_block_or_order_changes_the_token() -> None:
    """A wrong block, or a wrong order of blocks, changes the text."""
    right = first_token(chunk())
    prefix = chunk(token_ids=(0, 1, 2, 3), block_table=(1,))
    rest = {"start": 4, "token_ids": (4, 5, 6, 7)}
    assert first_token(prefix, chunk(**rest)) == right
    assert first_token(prefix, chunk((3, 2), **rest)) != right
    assert first_token(prefix, chunk((2, 1), **rest)) != right


def test_wrong_position_changes_the_token() -> None:
    """The same tokens at other positions are another text."""
    shifted = chunk((1, 2), start=1, token_ids=(0, 1, 2, 3, 4, 5, 6))
    assert first_token(chunk((1, 2), token_ids=(0, 1, 2, 3, 4, 5, 6))) != first_token(shifted)


def test_poisoned_block_changes_the_token() -> None:
    """A read of a freed block changes the text."""
    runner = EchoRunner(num_blocks=8, block_size=4)
    right = run(runner, chunk())[0]
    last = chunk(start=7)
    assert run(runner, last)[0] == right
    runner.poison(1)
    assert run(runner, last)[0] != right


def test_pending_token_is_that_of_the_step_before() -> None:
    """A plan made before the last token was known gives what one made after it gives."""
    runner, other = EchoRunner(num_blocks=8, block_size=4), EchoRunner(num_blocks=8, block_size=4)
    spec = spec_of(9, temperature=0.0)
    first = runner.launch(StepPlan(step_id=0, chunks=(chunk((1, 2, 3)),)))
    late = chunk((1, 2, 3), start=8, token_ids=(PENDING,), samples=(spec,))
    second = runner.launch(StepPlan(step_id=1, chunks=(late,)))
    known = run(other, chunk((1, 2, 3)))
    assert runner.collect(first).sampled == known
    assert runner.collect(second).sampled == run(other, replace(late, token_ids=known[0].token_ids))


def test_launched_step_is_not_changed_by_what_follows() -> None:
    """Blocks are given out again while a step that reads them is uncollected."""
    runner = EchoRunner(num_blocks=8, block_size=4)
    handle = runner.launch(StepPlan(step_id=0, chunks=(chunk(),)))
    for block_id in (1, 2):
        runner.poison(block_id)
    assert runner.collect(handle).sampled[0].token_ids[0] == first_token(chunk())


def test_banned_tokens_are_not_chosen() -> None:
    """A banned token is replaced by another one."""
    token_id = first_token(chunk())
    assert token_id is not None
    banned = spec_of(8, temperature=0.0, banned_token_ids=(token_id,))
    assert first_token(chunk(samples=(banned,))) not in (token_id, None)


def test_logprobs_are_a_distribution() -> None:
    """All candidates' probabilities sum to one; the chosen one's is among them; asking for less gives less."""
    runner = EchoRunner(num_blocks=8, block_size=4)
    (all_of_them,) = run(runner, chunk(samples=(spec_of(8, temperature=0.0, logprobs=100),)))
    assert all_of_them.logprobs[0] is not None
    assert math.isclose(sum(math.exp(logprob) for _, logprob in all_of_them.logprobs[0].top), 1.0)
    assert (all_of_them.token_ids[0], all_of_them.logprobs[0].chosen) == all_of_them.logprobs[0].top[0]
    (two,) = run(runner, chunk(samples=(spec_of(8, temperature=0.0, logprobs=2),)))
    assert two.logprobs[0] is not None
    assert two.logprobs[0].top == all_of_them.logprobs[0].top[:2]


def test_answer_is_readable_and_endless() -> None:
    """Words, punctuation and whole emoji; never eos, never a broken code point inside."""
    ids = alone(request(1, sampling=sampling(max_tokens=400)), num_blocks=200)
    text = EchoTokenizer().decode(ids[:-1])
    assert len(ids) == 400
    assert "\ufffd" not in text
    assert any(ord(character) > 0xFFFF for character in text)


def test_chat_template() -> None:
    """Each turn is role, content, end; then the assistant's begins."""
    messages = (Message(role="user", content="hi"),)
    assert EchoTokenizer().encode(GenerateRequest(model="e", messages=messages)).token_ids == (
        USER,
        *b"hi",
        END_OF_TURN,
        ASSISTANT,
    )


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": ""}, BadRequest),
        ({"prompt_token_ids": ()}, BadRequest),
        ({"prompt_token_ids": (VOCAB_SIZE,)}, BadRequest),
        ({"prompt_token_ids": (-1,)}, BadRequest),
        ({"prompt": "\ud800"}, BadRequest),
        ({"messages": (Message(role="user", content="\udc00"),)}, BadRequest),
        ({"prompt": "x" * 3_000_000}, PromptTooLong),
    ],
)
def test_bad_prompts_are_refused(fields: dict[str, object], error: type[BadRequest]) -> None:
    """Empty, out of range, half a surrogate pair, megabytes: a named error before anything is allocated."""
    with pytest.raises(error):
        EchoTokenizer().encode(GenerateRequest(model="e", **fields))  # type: ignore[arg-type]
