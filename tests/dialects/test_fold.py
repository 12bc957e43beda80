"""Laws of the fold: what a dialect streams, put together as its clients do, is what it shows whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from streamserve.dialects import native
from streamserve.dialects.anthropic import message
from streamserve.dialects.encoder import Encoder, coalesce
from streamserve.dialects.fold import Answer, BlockBegun, Cited, Delta, Failed, Fold
from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.openai import chat, completions
from streamserve.dialects.openai.completions import CompletionEncoder
from streamserve.dialects.plain import TextEncoder, TokensEncoder
from streamserve.protocol.events import TEXT, BlockStart, Citation, Error, Token, Usage
from streamserve.protocol.grammar import Grammar
from tests.support.bodies.event_logs import META, block, interrupted, success, tok
from tests.support.bodies.random_logs import RandomAnswer, named, random_answer
from tests.support.checks.message_checks import check_message
from tests.support.checks.sse_reader import Read, read_events

SEEDS = range(150)
every_answer = pytest.mark.parametrize("joined", [1, 3])


def answers() -> Iterator[RandomAnswer]:
    yield named(interrupted())
    yield from (random_answer(seed, succeeds=True) for seed in SEEDS)


def wire(encoder: Encoder, answer: RandomAnswer, joined: int) -> bytes:
    """Return the whole stream, with so many tokens in a frame."""
    return b"".join(encoder.encode(logged) for logged in coalesce(answer.log, max_tokens=joined))


def chunks(encoder: Encoder, answer: RandomAnswer, joined: int) -> list[dict[str, Any]]:
    """Return the JSON of the chunks before `[DONE]`."""
    *read, done = read_events(wire(encoder, answer, joined))
    assert done.data == "[DONE]"
    return [json.loads(one.data) for one in read]


def test_the_random_logs_keep_the_grammar() -> None:
    """Those with an end and those without."""
    for seed in SEEDS:
        for succeeds in (False, True):
            grammar = Grammar()
            for logged in random_answer(seed, succeeds=succeeds).log:
                grammar.feed(logged.event)


@every_answer
def test_the_clients_own_fold_of_a_chat_is_the_whole_chat(joined: int) -> None:
    """The official client's accumulator: content, thoughts, calls, annotations, log-probabilities, reasons, counts."""
    for answer in answers():
        encoder = chat.encoder_for(answer, include_usage=True, return_token_ids=True)
        whole = chat.completion_json(
            Answer.of(answer.log, answer.request.n), return_token_ids=True, **chat.identity(answer)
        )
        ChatCompletion.model_validate(whole, strict=True)
        read = chunks(encoder, answer, joined)
        begun = list(dict.fromkeys(choice["index"] for chunk in read for choice in chunk["choices"]))
        if begun != sorted(begun):  # that accumulator fails when a later choice begins first
            continue
        state: Any = ChatCompletionStreamState()
        ids: list[list[int]] = [[] for _ in whole["choices"]]
        for chunk in read:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
            for choice in chunk["choices"]:
                ids[choice["index"]] += choice["token_ids"]
        folded = state.current_completion_snapshot.to_dict()
        assert ids == [one["token_ids"] for one in whole["choices"]]
        assert folded["usage"] == whole["usage"]
        assert len(folded["choices"]) == len(whole["choices"])
        for one, expected in zip(folded["choices"], whole["choices"], strict=True):
            assert as_shown(one) == as_shown(expected)


def as_shown(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice without what the accumulator adds, and with one form of what is empty."""
    message = {name: value for name, value in choice["message"].items() if value}
    for name in {"tool_calls", "annotations", "approvals"} & message.keys():
        message[name] = [{key: value for key, value in one.items() if key != "index"} for one in message[name]]
        for one in message[name]:
            one.get("function", {}).pop("parsed_arguments", None)
    logprobs = (choice.get("logprobs") or {}).get("content") or None
    return {
        "index": choice["index"],
        "finish_reason": choice["finish_reason"],
        "message": message,
        "logprobs": logprobs,
    }


@every_answer
def test_the_chunks_of_a_completion_make_the_whole_completion(joined: int) -> None:
    """Text, log-probabilities and ids of each choice, one after the other."""
    for answer in answers():
        encoder = CompletionEncoder(answer, include_usage=True, return_token_ids=True)
        folded = [{"text": "", "logprobs": [], "token_ids": [], "reason": None} for _ in range(answer.request.n)]
        *deltas, last = chunks(encoder, answer, joined)
        for chunk in deltas:
            (choice,) = chunk["choices"]
            one = folded[choice["index"]]
            one["text"] += choice["text"]
            one["logprobs"] += positions(choice["logprobs"])
            one["token_ids"] += choice["token_ids"]
            one["reason"] = one["reason"] or choice["finish_reason"]
        ids = [()]
        pairs = [(answer, Answer.of(answer.log, answer.request.n))]
        whole = completions.completion_json(pairs, prompt_token_ids=ids)
        assert last["usage"] == whole["usage"]
        assert folded == [
            {
                "text": one["text"],
                "logprobs": positions(one["logprobs"]),
                "token_ids": one["token_ids"],
                "reason": one["finish_reason"],
            }
            for one in whole["choices"]
        ]


def positions(logprobs: dict[str, Any] | None) -> list[Any]:
    return [] if logprobs is None else list(zip(*(logprobs[name] for name in sorted(logprobs)), strict=True))


@every_answer
def test_the_events_of_a_message_make_the_whole_message(joined: int) -> None:
    """By the rules of the official client, which tests/e2e/clients/test_folds.py asks itself."""
    for answer in answers():
        for shows in (True, False):
            encoder = message.encoder_for(answer, shows_thinking=shows)
            whole = message.message_json(Answer.of(answer.log), shows_thinking=shows, **message.identity(answer))
            assert check_message(wire(encoder, answer, joined)) == whole


@every_answer
def test_the_events_of_a_run_make_the_whole_run(joined: int) -> None:
    """Native frames, and the same as WebSocket messages: text, steps, citations and what `done` says."""
    for answer in answers():
        if answer.request.n > 1:
            continue
        read = read_events(wire(NativeEncoder(answer.log_id, answer), answer, joined))
        whole = native.run_json(Answer.of(answer.log), stream_id=answer.id, pipeline="p", created=answer.created)
        assert run_of(read) == {name: whole[name] for name in whole if name not in ("id", "pipeline", "created")}
        log = coalesce(answer.log, max_tokens=joined)
        messages = [native.websocket_message(answer.id, answer.log_id, one) for one in log]
        assert [(one["event"], one["event_id"], one["data"]) for one in messages] == [
            (one.event, one.id, json.loads(one.data))
            for one in [*read[:-2], read[-1]]  # without the meta before done
        ]


def run_of(read: list[Read]) -> dict[str, Any]:
    """Return what the native frames of a run say, as a page puts them together."""
    found: dict[str, Any] = {"text": "", "steps": [], "citations": []}
    kinds: dict[int, str] = {}
    for one in read:
        data = json.loads(one.data)
        if one.event == "block_start":
            kinds[data["index"]] = data["kind"]
        elif one.event == "token" and kinds.get(data["index"], TEXT) == TEXT:
            found["text"] += data["text"]
        elif one.event == "status" and data["status"] in ("step", "trimmed"):
            found["steps"].append(data)
        elif one.event == "citation":
            found["citations"].append(data)
        elif one.event == "approval":
            found.setdefault("approvals", []).append(data)
        elif one.event == "meta" and "trimmed" in data:
            found["meta"] = {"trimmed": data["trimmed"]}
        elif one.event == "done":
            found |= data
    return found


@every_answer
def test_the_plain_dialects_show_the_text(joined: int) -> None:
    """Plain text, and tokens until `[DONE]`: the text of all text blocks."""
    for answer in answers():
        if answer.request.n == 1:
            text = Answer.of(answer.log).choices[0].text
            assert wire(TextEncoder(), answer, joined).decode() == text
            tokens = chunks(TokensEncoder(answer.log_id), answer, joined)
            assert "".join(one["token"] for one in tokens) == text


def test_counts_so_far_end_as_the_whole_counts() -> None:
    """At the end they are those of `done`: text without ids, which `echo` repeats or which was held back, has none."""
    for answer in answers():
        if answer.has_token_ids:
            fold = Fold(answer.request.n)
            for logged in answer.log:
                fold.feed(logged.event)
            assert fold.usage.completion_tokens == Answer.of(answer.log).done.usage.completion_tokens


def test_text_of_a_stream_without_ids_is_counted_by_event() -> None:
    """Each event with text is a token there."""
    fold = Fold()
    fold.feed(META)
    fold.feed(Token(text="echoed", token_ids=()))
    assert fold.usage == Usage(prompt_tokens=9, cached_tokens=4)
    other = random_answer(next(seed for seed in range(99) if not random_answer(seed).has_token_ids))
    fold = Fold(other.request.n)
    for logged in other.log:
        fold.feed(logged.event)
    num = sum(isinstance(logged.event, Token) and bool(logged.event.text) for logged in other.log)
    assert fold.usage.completion_tokens == num


def test_a_piece_knows_what_came_before_it() -> None:
    """The number of a call, the kind of a token's block, and where in the content a source is cited."""
    fold = Fold()
    cited = Citation(source="docs", id="1", choice=0, index=2, start=1, end=2)
    events = [*block(0, "tool_use", "{}"), *block(1, "text", "Hé"), *block(2, "text", "llo"), cited]
    pieces = [piece for event in events for piece in fold.feed(event)]
    begun = [piece.block for piece in pieces if isinstance(piece, BlockBegun)]
    assert [(one.call, one.begin) for one in begun] == [(0, None), (None, 0), (None, 2)]
    assert [piece.block.kind for piece in pieces if isinstance(piece, Delta)] == ["tool_use", "text", "text"]
    assert pieces[-1] == Cited(cited, {0: (3, 4)})
    (again,) = fold.feed(BlockStart(choice=0, index=3, kind="tool_use", id="c", name="n"))
    assert isinstance(again, BlockBegun)
    assert again.block.call == 1


def test_an_answer_is_there_at_any_time() -> None:
    """It grows with each event, and says how it ended only when it has."""
    answer = Answer()
    texts = []
    for logged in success(tok("Hé"), tok("llo")):
        assert answer.end is None
        answer.feed(logged.event)
        texts.append(answer.choices[0].text)
    assert texts == ["", "", "Hé", "Héllo", "Héllo"]
    assert answer.done.finish_reason == "stop"


def test_only_a_whole_answer_has_a_done() -> None:
    """A failure, a stop and an abandonment are the errors that they stand for."""
    fold = Fold(2)
    assert fold.feed(Error(code="timeout", message="Late.", retryable=True)) == [Failed("timeout", "Late.", True)]
    for reason in ("cancelled", "abandoned"):
        (failed,) = Fold(2).feed(success(reason=reason)[-1].event)
        assert isinstance(failed, Failed)
        assert failed.error().code == reason
