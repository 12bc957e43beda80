"""Sampling rules, kept stop strings, echo, log-probabilities of prompts and continued messages, by a `ThreadClient`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from streamserve.clients.thread.acceptance import MOST_PROMPT_CANDIDATES, ids_of_bad_words
from streamserve.engine.echo import ASSISTANT, END_OF_TURN, USER, VOCAB_SIZE, EchoRunner, EchoTokenizer
from streamserve.protocol.errors import BadRequest, Overloaded
from streamserve.protocol.events import ChoiceDone, Done, Event, PositionLogprobs, Token
from streamserve.protocol.requests import START, GenerateRequest, Message, Resume, SamplingParams
from tests.support.engines.clients import CONFIG, ask, collect, echo_runner, ids, serving, text
from tests.support.engines.runners import GatedRunner

TOKENIZER = EchoTokenizer()
HI = (Message(role="user", content="Hi"),)
BOAT = TOKENIZER.text_ids(" boat")[0]
PROMPT = "The quiet river and the old boat. " * 4
TOP = 5


async def answer(request: GenerateRequest, resume: Resume = START, *, overlap: bool = True) -> list[Event]:
    async with serving(echo_runner(can_overlap=overlap)) as client:
        return await collect(await client.generate(request, resume=resume))


async def refusal(request: GenerateRequest) -> BadRequest:
    async with serving() as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate(request)
        assert client.stats().running == client.stats().waiting == 0
    return caught.value


async def test_only_allowed_tokens_come() -> None:
    """A bias, allowed ids and bad words decide what comes."""
    allowed = (BOAT, BOAT + 1, BOAT + 2)
    events = await answer(ask(allowed_token_ids=allowed, max_tokens=20, temperature=1.0))
    assert set(ids(events)) == set(allowed)
    forced = await answer(ask(logit_bias=((BOAT, 100.0),), max_tokens=5))
    assert ids(forced) == (BOAT,) * 5
    words = (TOKENIZER.decode([BOAT]) * 2).strip()
    assert len(TOKENIZER.text_ids(words)) > 1
    avoided = await answer(ask(allowed_token_ids=allowed, bad_words=(" boat",), max_tokens=20, temperature=1.0))
    assert set(ids(avoided)) == set(allowed[1:])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias", "invalid_request"),
        ({"allowed_token_ids": (5, VOCAB_SIZE)}, "allowed_token_ids", "invalid_request"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias", "invalid_value"),
        ({"bad_words": ("",)}, "bad_words", "invalid_value"),
        ({"allowed_token_ids": (BOAT,), "bad_words": (" boat",)}, "allowed_token_ids", "conflicting_fields"),
        (
            {"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 1},
            "allowed_token_ids",
            "conflicting_fields",
        ),
        ({"prompt": "a" * 400, "prompt_logprobs": 163}, "prompt_logprobs", "invalid_value"),
        (
            {"messages": HI, "prompt": None, "prompt_logprobs": 0, "has_public_system": True},
            "prompt_logprobs",
            "conflicting_fields",
        ),
    ],
)
async def test_what_cannot_be_chosen_is_refused(fields: dict[str, Any], param: str, code: str) -> None:
    """Before anything is allocated, with the field's name."""
    error = await refusal(ask(**fields))
    assert (error.param, error.code) == (param, code)


def test_a_bad_word_has_the_tokens_of_both_its_places() -> None:
    """At the beginning of a word and within one; a tokenizer's ids that the model lacks are left out."""
    assert ids_of_bad_words(TOKENIZER, SamplingParams(bad_words=("boat",)), VOCAB_SIZE) == (tuple(b"boat"), (BOAT,))
    assert ids_of_bad_words(TOKENIZER, SamplingParams(bad_words=("boat",)), BOAT) == (tuple(b"boat"),)
    with pytest.raises(BadRequest, match="no tokens"):
        ids_of_bad_words(_NoTokens(), SamplingParams(bad_words=("boat",)), VOCAB_SIZE)


class _NoTokens(EchoTokenizer):
    def text_ids(self, text: str) -> tuple[int, ...]:
        return ()


async def test_the_stop_string_stays_in_the_text() -> None:
    """With `include_stop` the answer is what it is without the stop string, up to the end of that."""
    whole = text(await answer(ask(max_tokens=40)))
    stop = whole[20:24]
    end = whole.index(stop) + len(stop)
    kept = await answer(ask(max_tokens=40, stop=(stop, "never"), include_stop=True))
    assert text(kept) == whole[:end]
    assert isinstance(kept[-1], Done)
    assert (kept[-1].finish_reason, kept[-1].stop_string) == ("stop", stop)
    assert text(await answer(ask(max_tokens=40, stop=(stop,)))) == whole[: end - len(stop)]


async def test_each_answer_names_its_stop_string() -> None:
    """Of several each in its own end; an answer that ends otherwise names none."""
    stop = text(await answer(ask(max_tokens=40)))[20:24]
    several = await answer(ask(max_tokens=40, n=2, stop=("never", stop)))
    assert [one.stop_string for one in several if isinstance(one, ChoiceDone)] == [stop, stop]
    for last in (several[-1], (await answer(ask(max_tokens=4, stop=("never",))))[-1]):
        assert isinstance(last, Done)
        assert last.stop_string is None


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_begins_with_its_prompt(n: int) -> None:
    """Each choice begins with the prompt's text, in events without ids, however long it is; the rest is the answer."""
    prompt = "A quiet river. " * 290
    async with serving(EchoRunner(num_blocks=4000, block_size=4), max_len=4700) as client:
        plain = await collect(await client.generate(ask(prompt, n=n)))
        events = await collect(await client.generate(ask(prompt, n=n, echo=True)))
    for choice in range(n):
        mine = [one for one in events if isinstance(one, Token) and one.choice == choice]
        assert "".join(one.text for one in mine if not one.token_ids) == prompt
        assert max(len(one.text) for one in mine) <= 4096
        assert text(events, choice) == prompt + text(plain, choice)
        assert ids(events, choice) == ids(plain, choice)


async def test_a_resumed_answer_begins_where_the_reader_is() -> None:
    """What was shown of the prompt does not come again, also where that is a part of it, or no token has come yet."""
    whole = await answer(ask("The quiet river", echo=True))
    for shown in (0, 3, 15):
        rest = await answer(ask("The quiet river", echo=True), Resume(num_prompt_chars=(shown,)))
        assert text(rest) == text(whole)[shown:]


async def test_token_ids_are_repeated_as_text() -> None:
    """The text of a prompt of ids, without special tokens."""
    request = replace(ask(echo=True), prompt=None, prompt_token_ids=(USER, *b"Hi", END_OF_TURN, BOAT))
    assert text(await answer(request)).startswith("Hi boat")


async def test_a_message_is_continued() -> None:
    """The last turn is not closed and no other begins; with echo the answer has it all."""
    turns = (Message(role="user", content="Name a bird."), Message(role="assistant", content="A fine bird is"))
    request = replace(ask(), prompt=None, messages=turns, continue_final_message=True)
    prompt = TOKENIZER.encode(request).token_ids
    assert prompt == (USER, *b"Name a bird.", END_OF_TURN, ASSISTANT, *b"A fine bird is")
    events = await answer(request)
    bare = await answer(replace(ask(), prompt=None, prompt_token_ids=prompt))
    assert ids(events) == ids(bare)
    assert text(events) == text(bare)  # the space before its first word is text
    assert text(await answer(replace(request, echo=True))) == "A fine bird is" + text(bare)


async def test_overlapped_steps_keep_every_rule() -> None:
    """Bad words of several tokens are known one token late, and avoided all the same."""
    config = replace(CONFIG, overlap=True)
    allowed = (BOAT, BOAT + 1)
    doubled = TOKENIZER.decode([BOAT]) + TOKENIZER.decode([BOAT])
    assert config.overlap
    tokenizer = _Words()
    async with serving(echo_runner(can_overlap=True), config, tokenizer=tokenizer) as client:
        request = ask(allowed_token_ids=allowed, bad_words=(doubled,), max_tokens=60, temperature=1.0)
        found = ids(await collect(await client.generate(request)))
    pairs = set(pairwise(found))
    assert (BOAT, BOAT) not in pairs
    assert (BOAT + 1, BOAT + 1) in pairs


class _Words(EchoTokenizer):
    """Knows two words in a row."""

    def text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(id_ for word in text.split() for id_ in super(_Words, self).text_ids(" " + word))


def of_prompt(events: list[Event]) -> list[PositionLogprobs]:
    """Return what comes before the first id, which is all in choice 0."""
    found: list[PositionLogprobs] = []
    for event in events:
        if isinstance(event, Token) and not event.token_ids:
            assert (event.choice, event.text) == (0, "")
            assert not ids(events[: events.index(event)])
            found += event.logprobs or ()
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_each_token_of_the_prompt_is_there_once(n: int, overlap: bool) -> None:
    """In order, the first without a number, in events of bounded size; the answer is what it is without them."""
    plain = await answer(ask(PROMPT, n=n), overlap=overlap)
    events = await answer(ask(PROMPT, n=n, prompt_logprobs=TOP), overlap=overlap)
    shown = of_prompt(events)
    assert [one.chosen.token_id for one in shown] == list(TOKENIZER.encode(ask(PROMPT)).token_ids)
    assert b"".join(one.chosen.bytes_ for one in shown) == PROMPT.encode()
    assert (shown[0].chosen.logprob, shown[0].top) == (None, ())
    for one in shown[1:]:
        assert one.chosen.logprob is not None
        assert one.chosen.logprob < 0
        assert 1 <= len(one.top) <= TOP
    sizes = [sum(1 + len(one.top) for one in event.logprobs or ()) for event in events if isinstance(event, Token)]
    assert max(sizes) <= 256
    for choice in range(n):
        assert ids(events, choice) == ids(plain, choice)


@pytest.mark.parametrize("num_shown", [1, 2, 40, len(PROMPT)])
async def test_a_resumed_request_shows_the_rest(num_shown: int) -> None:
    """What readers were shown does not come again; the numbers are those of the whole."""
    whole = await answer(ask(PROMPT, prompt_logprobs=TOP), overlap=False)
    rest = await answer(ask(PROMPT, prompt_logprobs=TOP), Resume(num_prompt_logprobs=num_shown), overlap=False)
    assert of_prompt(rest) == of_prompt(whole)[num_shown:]
    assert ids(rest) == ids(whole)


async def test_the_bound_counts_tokens_and_candidates() -> None:
    """As many as may be are served."""
    most = MOST_PROMPT_CANDIDATES // len(PROMPT) - 1
    events = await answer(ask(PROMPT, prompt_logprobs=most, max_tokens=1), overlap=False)
    assert len(of_prompt(events)) == len(PROMPT)


@pytest.mark.parametrize(("kept", "expected"), [(4, "boat"), (1, "t"), (400, "The old boat")])
async def test_the_end_of_a_prompt_is_kept(kept: int, expected: str) -> None:
    """`truncate_prompt_tokens` k: the answer is that to the last k tokens, which `echo` repeats, too."""
    request = ask("The old boat", truncate_prompt_tokens=kept, echo=True)
    async with serving() as client:
        assert TOKENIZER.decode(await client.tokenize(request)) == expected
        generation = await client.generate(request)
        assert generation.accepted.num_prompt_tokens == len(expected)
        truncated = await collect(generation)
    whole = await answer(ask(expected, echo=True))
    assert text(truncated) == text(whole)
    assert text(truncated).startswith(expected)


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_kept"),
    [(1000, 12, 500), (1000, None, 511), (1000, 600, 256), (100, 12, 100), (505, 12, 500)],
)
async def test_as_many_tokens_of_a_prompt_are_kept_as_fit(length: int, max_tokens: int | None, num_kept: int) -> None:
    """-1 leaves room for `max_tokens`, and keeps half of what the model takes at least."""
    async with serving() as client:
        generation = await client.generate(ask("x" * length, max_tokens=max_tokens, truncate_prompt_tokens=-1))
        generation.cancel()
    assert generation.accepted.num_prompt_tokens == num_kept


async def test_no_prompt_is_kept_whole_by_none_of_it() -> None:
    """0 would keep nothing; it is refused, at the door of the engine too."""
    assert (await refusal(ask(truncate_prompt_tokens=0))).param == "truncate_prompt_tokens"
    assert (await refusal(ask(truncate_prompt_tokens=-2))).param == "truncate_prompt_tokens"


async def test_more_choices_than_ever_fit_are_refused() -> None:
    """Each choice is a sequence: a request for more than the queue and the batch hold is a 400, not a wait for ever."""
    config = replace(CONFIG, max_num_seqs=2, max_waiting=3)
    async with serving(config=config) as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate(ask(n=6))
        assert (caught.value.code, caught.value.param) == ("invalid_value", "n")
        assert "5" in caught.value.message
        events = await collect(await client.generate(ask(n=5, temperature=1.0)))
        assert sum(isinstance(event, ChoiceDone) for event in events) == 5


async def test_sixteen_choices_take_sixteen_places() -> None:
    """`n` counts in the queue as so many requests: a caller has no more by asking at once."""
    config = replace(CONFIG, max_num_seqs=2, max_waiting=20)
    async with serving(GatedRunner(echo_runner()), config) as client:
        first = await client.generate(ask(n=16, temperature=1.0))
        with pytest.raises(Overloaded):
            await client.generate(ask(n=16, temperature=1.0))
        first.cancel()
        (await client.generate(ask(n=16, temperature=1.0))).cancel()
