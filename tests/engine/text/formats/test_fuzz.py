"""Whatever a model writes, the parser raises nothing, loses no id and no character, and does not mind the chunks.

**The law of the text.** Every character that a model wrote is in exactly one part, in order. It is text, thinking, a
tool's name or its arguments, or markup. Markup is what docs/reasoning-and-tools.md lists: the tags of the format with
the white space around them, the head of a gpt-oss message, and the frame of a call, which is a JSON object apart from
its arguments. Where the text is cut into tokens changes none of this.
"""

from __future__ import annotations

import json
import random
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


def parts_of(answer: Answer, text: str, cuts: list[int], *, is_cut: bool = False) -> list[Part]:
    """Feed the text in pieces that end at `cuts`."""
    parser, parts, start = parser_of(answer), list[Part](), 0
    for end in (*sorted({cut for cut in cuts if cut < len(text)}), len(text)):
        parts += parser.feed(text[start:end])
        start = end
    return parts + parser.finish(is_cut=is_cut)


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


@settings(max_examples=150)
@given(FORMATS, OUTPUTS, st.lists(st.integers(1, 120), max_size=12))
def test_every_character_is_text_or_markup(key: tuple[str, bool], output: str, cuts: list[int]) -> None:
    """The parts' texts, joined, are the output; in other chunks the blocks are the same."""
    answer = ANSWERS[key]
    text = answer.format.tags.marked(output)
    parts = parts_of(answer, text, cuts)
    assert "".join(part.text for part in parts if isinstance(part, Written | Markup)) == output
    one_by_one = parts_of(answer, text, list(range(1, len(text))))
    assert joined(parts) == joined(one_by_one) == joined(parts_of(answer, text, []))


# No tag, key, name of a tool or frame holds it: the control character ends each of them.
WORD = "Grüße\x07"
SPACES = (" ", "\n", "\n\n", "\u2028", "\xa0")
CALL_PIECES = (
    *('{"name": "f", "arguments": {"a": [1, "x"]}}', '{"name": "f"}', '{"name": "g", "parameters": {}}', '{"a": 1}'),
    *('{"name": "f", "arguments": ', '{"name": "f", "id": "', '"{}"', '"{\\"a\\": 1}"', '""', "null", "nu"),
    *("{}", '{"a": ', "1}", '{"name"', "f", "g", ";", ",", "[", "]", '"', "}", "{", "é", "x y", WORD, WORD, *SPACES),
)
# What a format's calls begin and end with, as a model writes it.
NAMED = ("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]g[CALL_ID]abc123[ARGS]", "[TOOL_CALLS]f", "[TOOL_CALLS] [")
OWN_PIECES: dict[str, tuple[str, ...]] = {
    "harmony": (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>",
        "<|channel|>analysis<|message|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
    "mistral": NAMED,
    "mistral_list": NAMED,
    "deepseek_r1": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "f<｜tool▁sep｜>",
        "\n```<｜tool▁call▁end｜>",
    ),
    "llama3": ("; ", '{"name": "f", "parameters": null}'),
    "qwen3_coder": (
        *("<tool_call>\n<function=f>\n", "<function=g>", "<parameter=x>\n", "\n</parameter>\n", "</function>"),
        "</function>\n</tool_call>",
    ),
}
RANDOM_OUTPUTS = pytest.mark.parametrize("num", [2_500, pytest.param(25_000, marks=pytest.mark.proof)])


@RANDOM_OUTPUTS
def test_all_text_is_conserved(num: int) -> None:
    """Random outputs of the ten formats, cut at random, keep the law of the text, in parts and in blocks' events."""
    rng, keys = random.Random(num), sorted(ANSWERS)
    for number in range(num):
        key = keys[number % len(keys)]
        answer, is_cut = ANSWERS[key], rng.random() < 0.3
        pieces = CALL_PIECES + tuple(tags_of([answer.format.markup])) * 3 + OWN_PIECES.get(key[0], ()) * 4
        output = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 9)))
        case = f"seed {num}, output {number}: {key} {output!r}, {is_cut=}"
        text = answer.format.tags.marked(output)
        parts = parts_of(answer, text, [rng.randint(1, len(text)) for _ in range(rng.randint(0, 8))], is_cut=is_cut)
        assert "".join(part.text for part in parts if isinstance(part, Written | Markup)) == output, case
        blocks = joined(parts)
        assert blocks == joined(parts_of(answer, text, list(range(1, len(text))), is_cut=is_cut)), case
        assert blocks == joined(parts_of(answer, text, [], is_cut=is_cut)), case
        shown = shown_of(blocks)
        # An argument in XML that is written twice counts once.
        if output.count("<parameter=x>") < 2:
            assert shown.count(WORD[:-1]) == output.count(WORD[:-1]), case
        ids = ids_of(answer.tokenizer, output if is_cut else output + "<|eos|>")
        events = blocks_of(events_of(answer.choice(), ids, "length" if is_cut else "stop"))
        assert "".join(block.get("name", "") + block["text"] for block in events) == shown, case


def shown_of(parts: list[Part]) -> str:
    """Return all that readers see of the parts: the names of tools, and the text of the blocks."""
    return "".join((part.name or "") if isinstance(part, Opened) else getattr(part, "text", "") for part in parts)


def calls_of(name: str, output: str, reason: str = "stop") -> tuple[list[tuple[str, str]], str, str | None]:
    """Return the calls of an output whose tags are tokens, its text, and its finish reason."""
    answer = ANSWERS[name, True]
    choice = answer.choice()
    blocks = blocks_of(events_of(choice, ids_of(answer.tokenizer, output + "<|eos|>" * (reason == "stop")), reason))
    calls = [(block["name"], block["text"]) for block in blocks if block["kind"] == "tool_use"]
    return calls, "".join(block["text"] for block in blocks if block["kind"] == "text"), choice.finish_reason


TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
DEEPSEEK_F = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"


@pytest.mark.parametrize(
    ("name", "output", "names"),
    [
        ("harmony", TO_F, "f"),
        ("harmony", TO_F + "\n", "f"),
        ("harmony", TO_F + "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}", "fg"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "f"),
        ("mistral", "[TOOL_CALLS]f[ARGS] \n", "f"),
        ("mistral", "[TOOL_CALLS]f[ARGS][TOOL_CALLS]g[ARGS]{}", "fg"),
        ("mistral", "[TOOL_CALLS]f[ARGS]\n[TOOL_CALLS]g[CALL_ID]abc123456[ARGS]", "fg"),
        ("mistral_list", '[TOOL_CALLS] [{"name": "f"}, {"name": "g", "arguments": null}]', "fg"),
        ("deepseek_r1", DEEPSEEK_F, "f"),
        ("deepseek_r1", DEEPSEEK_F + "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "f"),
        ("deepseek_r1", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n" * 2, "ff"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n", "f"),
        ("qwen3", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "f"),
        ("qwen3", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "f"),
        ("hermes", '<tool_call>{"arguments": "null", "name": "f"}</tool_call>', "f"),
        ("llama3", '{"name": "f", "parameters": null}', "f"),
    ],
)
def test_a_call_without_arguments_is_a_call(name: str, output: str, names: str) -> None:
    """A call that ends, or is followed by another, before its arguments began has the arguments {}."""
    assert calls_of(name, output) == ([(one, "{}") for one in names], "", "tool_calls")


@pytest.mark.parametrize(
    ("name", "output"), [("harmony", TO_F), ("mistral", "[TOOL_CALLS]f[ARGS]"), ("deepseek_r1", DEEPSEEK_F)]
)
def test_a_call_that_is_cut_before_its_arguments_is_not_whole(name: str, output: str) -> None:
    """An answer that max_tokens cuts after a call's name does not call the tool without its arguments."""
    assert calls_of(name, output, "length") == ([("f", "")], "", "length")


def test_a_call_in_xml_that_is_cut_between_its_arguments_is_text() -> None:
    """An answer that max_tokens cuts after one argument does not call the tool without the others."""
    output = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"
    assert calls_of("qwen3_coder", output, "length") == ([], output, "length")
    assert calls_of("qwen3_coder", output + "</function>\n", "length") == ([("f", '{"x": "1"}')], "", "length")


@pytest.mark.parametrize(("value", "rest"), [('"hello"', '"hello"}'), ("nope", "nope}"), ('"[1]"', '"[1]"}')])
def test_arguments_that_are_no_object_are_text(value: str, rest: str) -> None:
    """What stands where a call's arguments should is text if it is no object: it does not vanish."""
    output = f'<tool_call>{{"name": "f", "arguments": {value}}}'
    assert calls_of("qwen3", output) == ([("f", "")], rest, "stop")


@settings(max_examples=100)
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


@settings(max_examples=120)
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


@settings(max_examples=120)
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


@settings(max_examples=100)
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


@settings(max_examples=120)
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


@settings(max_examples=120)
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
