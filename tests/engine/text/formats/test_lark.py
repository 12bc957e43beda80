"""The grammar of a whole output, compiled by llguidance: it takes what the parser reads as the blocks asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("llguidance", reason="needs llguidance")

from streamserve.engine.grammar.compiler import GrammarCompiler
from streamserve.engine.grammar.matcher import advance
from streamserve.engine.text.formats.markup import choose_format
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Grammar, Tool, ToolChoice
from tests.engine.text.formats.test_samples import FORMATS
from tests.support.models.tagged import EOS, Answer, answer_of, blocks_of, events_of, ids_of, tagged_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool(name="get_weather", parameters=CITY, strict=True), Tool(name="search", parameters=CITY))
WITH_CALLS = sorted(set(FORMATS) - {"qwen3_coder"})  # which has tests of its own: test_xml_call.py
# How each format writes one call and two, and a thought before them.
CALLS = {
    "qwen3": ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n", "<think>\nHm.\n</think>\n\n"),
    "smollm3": ('<tool_call>{"name": "%s", "arguments": %s}</tool_call>', "\n", "<think>\nHm.\n</think>\n"),
    "llama3": ('{"name": "%s", "parameters": %s}', "; ", ""),
    "mistral": ("[TOOL_CALLS]%s[ARGS]%s", "", "[THINK]Hm.[/THINK]"),
    "harmony": (
        "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s",
        "<|call|><|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    ),
    "deepseek_r1": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>",
        "\n",
        "<think>\nHm.</think>\n\n",
    ),
}
COMPILERS: dict[HFTokenizer, GrammarCompiler] = {}


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    for compiler in COMPILERS.values():
        compiler.close()
    COMPILERS.clear()


FRAMES = {"deepseek_r1": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")}


@pytest.fixture(scope="module", params=["special", "added"])
def tokenizers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFTokenizer]:
    return {
        name: tagged_tokenizer(tmp_path_factory.mktemp(name), **{request.param: family["tags"]})
        for name, family in FORMATS.items()
    }


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """Return a tokenizer that has no tag as one token."""
    return tagged_tokenizer(tmp_path_factory.mktemp("spelled"))


def answer_in(tokenizer: HFTokenizer, name: str, prompt: str = "<|im_start|>assistant\n", **fields: Any) -> Answer:
    return answer_of(tokenizer, choose_format(tokenizer, name), prompt, **{"tools": TOOLS, **fields})


def accepts(answer: Answer, output: str) -> bool:
    """Return whether the request's grammar, compiled as for the engine, takes an output id by id and lets it end."""
    grammar = answer.format.grammar(answer.request, answer.prompt)
    assert grammar is not None
    tokenizer = answer.tokenizer
    if tokenizer not in COMPILERS:
        COMPILERS[tokenizer] = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    [matcher] = COMPILERS[tokenizer].matchers(grammar, [()])
    for token_id in ids_of(tokenizer, output):
        if not matcher.mask[token_id // 8] >> token_id % 8 & 1:
            return False
        advance([(matcher, [token_id])])
    assert matcher.error is None
    return matcher.may_end


def calls_in(name: str, *calls: tuple[str, str], thought: bool = False) -> str:
    form, between, before = CALLS[name]
    begin, end = FRAMES.get(name, ("", ""))
    return (before if thought else "") + begin + between.join(form % call for call in calls) + end


PARIS, OSLO, OTHER = ("get_weather", '{"city":"Paris"}'), ("search", '{"town":1}'), ("get_weather", '{"town":1}')


@pytest.mark.parametrize("name", WITH_CALLS)
def test_required_calls(tokenizers: dict[str, HFTokenizer], name: str) -> None:
    """One call or several, of the request's tools; a strict tool's arguments match its schema; no plain text."""
    answer = answer_in(tokenizers[name], name, tool_choice=ToolChoice(mode="required"))
    for calls in ([PARIS], [OSLO], [PARIS, OSLO]):
        output = calls_in(name, *calls)
        assert accepts(answer, output), output
        blocks = blocks_of(events_of(answer.choice(), ids_of(answer.tokenizer, output + EOS), "stop"))
        assert [(block["name"], block["text"]) for block in blocks] == calls
    assert not accepts(answer, "It is sunny.")
    assert not accepts(answer, calls_in(name, OTHER))
    assert not accepts(answer, calls_in(name, ("nothing", "{}")))


@pytest.mark.parametrize("name", WITH_CALLS)
def test_arguments_may_have_blanks(tokenizers: dict[str, HFTokenizer], name: str) -> None:
    """One after a colon or a comma, as models write JSON; two are none, so that no answer is lost in them."""
    answer = answer_in(tokenizers[name], name, tool_choice=ToolChoice(mode="required"))
    assert accepts(answer, calls_in(name, ("get_weather", '{"city": "Paris"}')))
    assert accepts(answer, calls_in(name, ("search", '{"a": [1, 2], "b":{}}')))
    assert not accepts(answer, calls_in(name, ("get_weather", '{"city":  "Paris"}')))


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_thought_comes_first(tokenizers: dict[str, HFTokenizer], name: str) -> None:
    """A model that thinks may think before a call, and must go on where the prompt began a thought."""
    answer = answer_in(tokenizers[name], name, tool_choice=ToolChoice(mode="required"))
    before = CALLS[name][2]
    assert accepts(answer, calls_in(name, PARIS, thought=True))
    if before.startswith("<think>"):
        begun = answer_in(tokenizers[name], name, "assistant\n<think>\n", tool_choice=ToolChoice(mode="required"))
        assert accepts(begun, "Hm." + before.partition("Hm.")[2] + calls_in(name, PARIS))
        assert not accepts(begun, calls_in(name, PARIS))
        ended = answer_in(tokenizers[name], name, "<think>\n\n</think>\n\n", tool_choice=ToolChoice(mode="required"))
        assert not accepts(ended, calls_in(name, PARIS, thought=True))
        assert accepts(ended, calls_in(name, PARIS))


@pytest.mark.parametrize("name", WITH_CALLS)
def test_named_and_single_calls(tokenizers: dict[str, HFTokenizer], name: str) -> None:
    """A named choice takes that tool only; without parallel calls there is one."""
    named = answer_in(tokenizers[name], name, tool_choice=ToolChoice(mode="required", names=("search",)))
    assert accepts(named, calls_in(name, OSLO))
    assert not accepts(named, calls_in(name, PARIS))
    single = answer_in(tokenizers[name], name, tool_choice=ToolChoice(mode="required"), parallel_tool_calls=False)
    assert accepts(single, calls_in(name, PARIS))
    assert not accepts(single, calls_in(name, PARIS, OSLO))


@pytest.mark.parametrize("name", WITH_CALLS)
def test_free_text_and_strict_calls(tokenizers: dict[str, HFTokenizer], name: str) -> None:
    """With a strict tool and a free choice, text is free, and a call of that tool matches its schema."""
    answer = answer_in(tokenizers[name], name)
    assert accepts(answer, calls_in(name, PARIS))
    assert not accepts(answer, calls_in(name, OTHER))
    frame = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert accepts(answer, frame + "It is sunny.")


GRAMMARS = [
    (Grammar(kind="json_schema", value=json.dumps(CITY)), '{"city":"Paris"}', '{"town":1}'),
    (Grammar(kind="json_object"), '{"a":[1,2]}', "[1]"),
    (Grammar(kind="regex", value=r"[a-c]+/[0-9]{2}"), "abc/12", "abc/1"),
    (Grammar(kind="choice", value='["yes", "no \\"way\\""]'), 'no "way"', "maybe"),
    (Grammar(kind="lark", value='start: "a" more\nmore: /b+/ ("{" "}")?'), "abb{}", "ba"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS, ids=[one[0].kind for one in GRAMMARS])
@pytest.mark.parametrize("name", [name for name in WITH_CALLS if CALLS[name][2]])
def test_text_after_a_thought(
    tokenizers: dict[str, HFTokenizer], name: str, grammar: Grammar, good: str, bad: str
) -> None:
    """The request's grammar holds for the text, and the thought before it is free."""
    answer = answer_in(tokenizers[name], name, tools=(), grammar=grammar)
    frame = "<|channel|>final<|message|>" if name == "harmony" else ""
    thought = CALLS[name][2]
    assert accepts(answer, thought + frame + good)
    assert accepts(answer, frame + good)
    assert not accepts(answer, thought + frame + bad)
    blocks = blocks_of(events_of(answer.choice(), ids_of(answer.tokenizer, thought + frame + good + EOS), "stop"))
    assert blocks[-1] == {"kind": "text", "text": good}


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_tags_that_are_text(spelled: HFTokenizer, name: str) -> None:
    """A tag that is no token of the tokenizer ends the thought where its text does."""
    answer = answer_in(spelled, name, tool_choice=ToolChoice(mode="required"))
    assert accepts(answer, calls_in(name, PARIS, thought=True))
    assert not accepts(answer, calls_in(name, OTHER, thought=True))
    free = answer_in(spelled, name)
    assert accepts(free, "It is sunny.")
    assert accepts(free, "Let me see. " + calls_in(name, PARIS))
    assert not accepts(free, "Let me see. " + calls_in(name, OTHER))


def test_nothing_asked_is_no_grammar(spelled: HFTokenizer) -> None:
    """Tools without a strict one, and a free choice, hold the output to nothing."""
    answer = answer_in(spelled, "qwen3", tools=(Tool(name="search"),))
    assert answer.format.grammar(answer.request, answer.prompt) is None


@pytest.mark.parametrize("name", ["think", "text"])
def test_a_call_without_markup_is_refused(spelled: HFTokenizer, name: str) -> None:
    """A forced call of a model whose output format has no calls fails with the way out."""
    answer = answer_in(spelled, name, tool_choice=ToolChoice(mode="required"))
    with pytest.raises(BadRequest, match="has no tool calls") as caught:
        answer.format.grammar(answer.request, answer.prompt)
    assert caught.value.code == "tools_unsupported"


def test_setting_names_a_format(tmp_path: Path) -> None:
    """A setting wins over what the tokenizer shows; a wrong name says which there are."""
    tokenizer = tagged_tokenizer(tmp_path, added=["<think>", "</think>"])
    assert choose_format(tokenizer).name == "think"
    assert choose_format(tokenizer, "gpt-oss").name == "harmony"
    assert choose_format(tokenizer, "tests.engine.text.formats.test_lark.own_format").name == "own"


def own_format(tokenizer: HFTokenizer) -> Any:
    made = choose_format(tokenizer, "hermes")
    made.name = "own"
    return made
