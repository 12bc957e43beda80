"""Whatever a model writes, the parser raises nothing, loses no id and no character, and does not mind the chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import RawLogprobs
from streamserve.engine.text.formats.base import Closed, Made, Markup, Opened, Parser, Part, Written
from streamserve.engine.text.formats.json_call import CallReader, JsonValue
from streamserve.engine.text.formats.known import KNOWN
from streamserve.engine.text.formats.markup import MarkedFormat, tags_of
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.protocol.events import Token
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import SamplingParams, Tool
from tests.engine.text.formats.test_samples import with_ends
from tests.support.models.tagged import Answer, answer_of, blocks_of, events_of, ids_of, resumed, tagged_tokenizer

TAGS = tags_of(KNOWN)
PIECES = (
    *('{"name": "f", "arguments": {"a": [1, "x"]}}', '{"name": "f"}', '{"arguments": {}, "name": "g"}', '{"name"', "{"),
    *('"', "}", "]", "[", ",", ";", "\n", " ", "\n\n", "f", "function", "json", "assistant", "analysis", "final", "é"),
    *(
        "commentary",
        " to=functions.f ",
        "```json\n",
        "\n```",
        '{"a": ',
        "1}",
        "<",
        "</",
        "<thi",
        "Hello.",
        "🙂",
        "\\u00",
        "<function=f>",
        "<parameter=x>\n",
        "\n</parameter>\n",
        "</function>",
    ),
)
OUTPUTS = st.lists(st.sampled_from((*PIECES, *TAGS, *TAGS)), max_size=14).map("".join)
ANSWERS: dict[tuple[str, bool], Answer] = {}


@pytest.fixture(scope="module", autouse=True)
def answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for has_tags in (True, False):
        tokenizer = tagged_tokenizer(tmp_path_factory.mktemp("fuzz"), special=TAGS if has_tags else ())
        for markup in KNOWN:
            ANSWERS[markup.name, has_tags] = answer_with(tokenizer, MarkedFormat(markup, tokenizer))


def answer_with(tokenizer: HFTokenizer, format_: MarkedFormat) -> Answer:
    return answer_of(tokenizer, format_, "assistant\n", tools=(Tool(name="f"), Tool(name="g")))


def parser_of(answer: Answer) -> Parser:
    parser = answer.format.parser(answer.request, answer.prompt)
    assert parser is not None
    return parser


def parts_of(answer: Answer, text: str, cuts: list[int]) -> list[Part]:
    """Feed the text in pieces that end at `cuts`."""
    parser, parts, start = parser_of(answer), list[Part](), 0
    for end in (*sorted({cut for cut in cuts if cut < len(text)}), len(text)):
        parts += parser.feed(text[start:end])
        start = end
    return parts + parser.finish()


def joined(parts: list[Part]) -> list[Part]:
    """Return the blocks of the parts, their texts joined."""
    out: list[Part] = []
    for part in parts:
        if isinstance(part, Markup):
            continue
        if isinstance(part, Written | Made) and out and isinstance(out[-1], Written):
            out[-1] = Written(out[-1].text + part.text)
        else:
            out.append(Written(part.text) if isinstance(part, Made) else part)
    return out


FORMATS = st.sampled_from([(markup.name, has_tags) for markup in KNOWN for has_tags in (True, False)])


@settings(max_examples=400)
@given(FORMATS, OUTPUTS, st.lists(st.integers(1, 120), max_size=12))
def test_every_character_is_text_or_markup(key: tuple[str, bool], output: str, cuts: list[int]) -> None:
    """The parts' texts, joined, are the output; in other chunks the blocks are the same."""
    answer = ANSWERS[key]
    text = answer.format.tags.marked(output)
    parts = parts_of(answer, text, cuts)
    assert "".join(part.text for part in parts if isinstance(part, Written | Markup)) == output
    one_by_one = parts_of(answer, text, list(range(1, len(text))))
    assert joined(parts) == joined(one_by_one) == joined(parts_of(answer, text, []))


@settings(max_examples=200)
@given(FORMATS, OUTPUTS, st.sampled_from(["stop", "length"]), st.data())
def test_every_id_is_one_event(key: tuple[str, bool], output: str, reason: str, data: st.DataObject) -> None:
    """Ids come in order, each at once; the log keeps its laws; a resumed answer is the same."""
    answer = ANSWERS[key]
    token_ids = ids_of(answer.tokenizer, output + "<|eos|>")
    choice = answer.choice()
    for number, token_id in enumerate(token_ids[:-1], 1):
        events = events_of(choice, [token_id], None)
        assert [event.token_ids for event in events if isinstance(event, Token)] == [(token_id,)]
        assert choice.num_tokens == number
    events = events_of(answer.choice(), token_ids, reason)
    check_events(with_ends(events))
    assert [one for event in events if isinstance(event, Token) for one in event.token_ids] == list(token_ids)
    cut = data.draw(st.integers(0, len(events)))
    assert resumed(answer, events[:cut], token_ids, reason) == events


@settings(max_examples=300)
@given(
    FORMATS,
    OUTPUTS,
    st.lists(st.sampled_from(["o.", "l", "\n", "{", "é", "n>", "Hello. "]), min_size=1, max_size=2),
    st.integers(0, 20),
    st.data(),
)
def test_stop_strings_and_blocks(
    key: tuple[str, bool], output: str, stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    """A stop string ends the text before it, in text blocks only; an answer that is resumed ends in the same place."""
    sampling = SamplingParams(seed=1, stop=tuple(stop), min_tokens=min_tokens)
    answer = replace(ANSWERS[key], sampling=sampling)
    token_ids = ids_of(answer.tokenizer, output + "<|eos|>")
    choice = answer.choice()
    events = events_of(choice, token_ids, "stop")
    check_events(with_ends(events))
    if choice.stopped_at is None:
        assert choice.num_tokens == len(token_ids)
        if not min_tokens:
            texts = [block["text"] for block in blocks_of(events) if block["kind"] == "text"]
            assert not any(one in text for one in stop for text in texts)
    else:
        assert (choice.finish_reason, choice.stopped_at) == ("stop", choice.num_tokens)
    cut = data.draw(st.integers(0, len(events)))
    assert resumed(answer, events[:cut], token_ids, "stop") == events


def test_logprobs_stand_with_their_ids() -> None:
    """Several tokens in one update become the tokens of several blocks, each with the log-probabilities of its ids."""
    answer = replace(ANSWERS["qwen3", True], sampling=SamplingParams(seed=1, logprobs=0))
    token_ids = ids_of(answer.tokenizer, "<think>Hm.</think>Yes.")
    logprobs = tuple(RawLogprobs(chosen=-float(number), top=()) for number in range(len(token_ids)))
    events = answer.choice().push(
        SequenceUpdate(seq_id=1, at=0.0, token_ids=token_ids, logprobs=logprobs, finish_reason="length")
    )
    tokens = [event for event in events if isinstance(event, Token)]
    assert [token.text for token in tokens] == ["Hm.", "Yes."]
    pairs = [(one.chosen.token_id, one.chosen.logprob) for token in tokens for one in token.logprobs or ()]
    assert pairs == [(token_id, -float(number)) for number, token_id in enumerate(token_ids)]
    assert all(len(token.logprobs or ()) == len(token.token_ids) for token in tokens)


@settings(max_examples=300)
@given(FORMATS, OUTPUTS, st.lists(st.integers(1, 120), max_size=12))
def test_what_passes_changes_nothing(key: tuple[str, bool], output: str, cuts: list[int]) -> None:
    """A text that a parser lets pass is what it would return for it, and it goes on in the same way without it."""
    answer = ANSWERS[key]
    text = answer.format.tags.marked(output)
    fed, passed, start = parser_of(answer), parser_of(answer), 0
    for end in (*sorted({cut for cut in cuts if cut < len(text)}), len(text)):
        piece, start = text[start:end], end
        if piece and passed.passes(piece):
            assert fed.feed(piece) == [Written(piece)]
        else:
            expected = fed.feed(piece)
            assert passed.feed(piece) == expected
    assert passed.finish() == fed.finish()
    assert passed.num_calls == fed.num_calls


@settings(max_examples=200)
@given(FORMATS, OUTPUTS)
def test_calls_are_json_or_do_not_parse(key: tuple[str, bool], output: str) -> None:
    """A call's text is an object, or the beginning of one that no reader takes for whole."""
    answer = ANSWERS[key]
    choice = answer.choice()
    blocks = blocks_of(events_of(choice, ids_of(answer.tokenizer, output + "<|eos|>"), "stop"))
    num_whole = 0
    for block in blocks:
        if block["kind"] == "tool_use":
            assert block["name"]
            try:
                num_whole += isinstance(json.loads(block["text"]), dict)
            except ValueError:
                continue
    assert (choice.finish_reason == "tool_calls") == (num_whole > 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(JSON, st.booleans(), st.integers(1, 5), st.text(alphabet=" \n}],x", max_size=3))
def test_json_ends_where_it_ends(value: object, is_ascii: bool, size: int, rest: str) -> None:
    """A value is whole at its last character, and not before; numbers need what follows them."""
    source = json.dumps([value], ensure_ascii=is_ascii, indent=1 if size == 3 else None)
    text, reader, at = source + rest, JsonValue(), 0
    for start in range(0, len(text), size):
        if not reader.is_whole:
            at = start + reader.feed(text[start : start + size], 0)
    assert reader.is_whole
    assert at == len(source)


@settings(max_examples=300)
@given(st.text(alphabet='{}[]",:\\ntrue0123eE+-. a', max_size=24))
def test_json_breaks_where_python_does(text: str) -> None:
    """What is found whole parses, and what parses is found whole."""
    reader = JsonValue()
    end = reader.feed("[" + text + "]", 0)
    try:
        json.loads("[" + text + "]", parse_constant=lambda name: pytest.fail(name))
        is_valid = True
    except ValueError:
        is_valid = False
    assert (reader.is_whole and end == len(text) + 2) == is_valid


def test_a_long_call_is_read_in_linear_time() -> None:
    """Each character of a call is looked at a bounded number of times: its arguments come as they are fed."""
    reader = CallReader()
    assert reader.feed('{"name": "f", "arguments": {"code": "', 0) == 37
    reader.parts.clear()
    for _ in range(1_000):
        reader.feed("print(1) ", 0)
        assert [part.text for part in reader.parts] == ["print(1) "]
        reader.parts.clear()


def test_a_name_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """What has no name after some thousand characters is text, though it may still be a call."""
    answer = ANSWERS["qwen3", True]
    parser = parser_of(answer)
    text = answer.format.tags.marked('<tool_call>{"arguments": {"code": "') + "x" * 5_000
    parts = parser.feed(text)
    assert "".join(part.text for part in parts if isinstance(part, Written)) == answer.format.tags.shown(text)
    assert not any(isinstance(part, Opened | Closed) for part in parts)
