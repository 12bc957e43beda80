"""The format that a tokenizer describes in its `response_template`, on samples of transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.engine.text.formats.markup import choose_format
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Grammar, Tool, ToolChoice
from tests.support.models.tagged import EOS, answer_of, blocks_of, events_of, ids_of, resumed, tagged_tokenizer

# Templates and outputs are transformers' (Apache-2.0): tests/utils/test_chat_parsing.py.
COHERE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "fields": {
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "content": "text"},
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>", "content": "text"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
QWEN3_XML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
GEMMA4 = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
    },
}
COHERE_OUTPUT = (
    "<|START_THINKING|>I should call a tool.<|END_THINKING|>"
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "simple_tool", '
    '"parameters": {"temperature_format": "Celsius"}}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>'
)
XML_OUTPUT = (
    "<tool_call>\n<function=get_weather>\n<parameter=locations>\n"
    '[{"country": "France", "city": "Paris"}]\n</parameter>\n'
    "<parameter=temp_units>\ncelsius\n</parameter>\n</function>\n</tool_call>"
)
GEMMA_OUTPUT = (
    "<|channel>thought\nThe user is asking for the current temperature in Paris. I should check "
    "the available tools to see if there's a function that can provide this information.<channel|>"
    '<|tool_call>call:get_current_temperature{detail_level:0,location:<|"|>Paris, France<|"|>,'
    'unit:<|"|>celsius<|"|>}<tool_call|><|tool_response>'
)
GEMMA_THOUGHT = GEMMA_OUTPUT.partition("thought\n")[2].partition("<channel|>")[0]
CASES: list[tuple[str, dict[str, Any], list[str], str, list[tuple[str, Any]]]] = [
    (
        "cohere",
        COHERE,
        ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>"],
        COHERE_OUTPUT.removesuffix("<|END_OF_TURN_TOKEN|>"),
        [("thinking", "I should call a tool."), ("simple_tool", {"temperature_format": "Celsius"})],
    ),
    (
        "qwen3 xml",
        QWEN3_XML,
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
        XML_OUTPUT,
        [("get_weather", {"locations": [{"country": "France", "city": "Paris"}], "temp_units": "celsius"})],
    ),
    (
        "gemma 4",
        GEMMA4,
        ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"],
        GEMMA_OUTPUT,
        [
            ("thinking", GEMMA_THOUGHT),
            ("get_current_temperature", {"detail_level": 0, "location": "Paris, France", "unit": "celsius"}),
        ],
    ),
]


def read(blocks: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(one["name"], json.loads(one["text"])) if "name" in one else (one["kind"], one["text"]) for one in blocks]


@pytest.mark.parametrize("has_tags", [True, False])
@pytest.mark.parametrize(("name", "template", "tags", "output", "blocks"), CASES, ids=[case[0] for case in CASES])
def test_samples_of_templates(
    tmp_path: Path,
    name: str,
    template: dict[str, Any],
    tags: list[str],
    output: str,
    blocks: list[tuple[str, Any]],
    has_tags: bool,
) -> None:
    """The tokenizer's own template wins; its blocks are those of transformers, and a cut answer goes on with them."""
    tokenizer = tagged_tokenizer(tmp_path, special=tags if has_tags else (), response_template=template)
    format_ = choose_format(tokenizer)
    assert format_.name == "response_template"
    tools = tuple(Tool(name=one) for one, _ in blocks)
    answer = answer_of(tokenizer, format_, "<|im_start|>assistant\n", tools=tools)
    ids = ids_of(tokenizer, output + EOS)
    choice = answer.choice()
    events = events_of(choice, ids, "stop")
    assert read(blocks_of(events)) == blocks
    assert choice.finish_reason == "tool_calls"
    for cut in range(0, len(events) + 1, 3):
        assert resumed(answer, events[:cut], ids, "stop") == events


def test_a_call_that_does_not_parse_is_text(tmp_path: Path) -> None:
    """transformers raises for it and ends the answer; here it is text, with its tags."""
    tokenizer = tagged_tokenizer(tmp_path, special=["<|START_ACTION|>", "<|END_ACTION|>"], response_template=COHERE)
    answer = answer_of(tokenizer, choose_format(tokenizer), "x")
    output = "<|START_ACTION|>[{nothing]<|END_ACTION|>So?"
    events = events_of(answer.choice(), ids_of(tokenizer, output + EOS), "stop")
    assert blocks_of(events) == [{"kind": "text", "text": output}]


def test_a_prompt_that_opens_a_thought(tmp_path: Path) -> None:
    """What the prompt has after the template's anchor sets the state."""
    tokenizer = tagged_tokenizer(tmp_path, added=["<think>", "</think>", "<|im_start|>"], response_template=QWEN3_XML)
    answer = answer_of(tokenizer, choose_format(tokenizer), "<think>old</think><|im_start|>assistant\n<think>\n")
    events = events_of(answer.choice(), ids_of(tokenizer, "Hm.</think>\n\nYes." + EOS), "stop")
    assert blocks_of(events) == [{"kind": "thinking", "text": "Hm."}, {"kind": "text", "text": "Yes."}]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": ToolChoice(mode="required")},
        {"parallel_tool_calls": False},
        {"tools": (Tool(name="f", strict=True),)},
        {"grammar": Grammar(kind="json_object")},
    ],
)
def test_a_template_holds_no_output(tmp_path: Path, fields: dict[str, Any]) -> None:
    """It does not say how calls are written: what needs that is refused with the way out."""
    tokenizer = tagged_tokenizer(tmp_path, response_template=QWEN3_XML)
    answer = answer_of(tokenizer, choose_format(tokenizer), "x", **fields)
    with pytest.raises(BadRequest, match="FORMAT") as caught:
        answer.format.grammar(answer.request, answer.prompt)
    assert caught.value.code == "unsupported_grammar"


def test_a_template_that_is_none_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A template of another version is logged, and the format is looked for elsewhere."""
    tokenizer = tagged_tokenizer(tmp_path, added=["<think>", "</think>"], response_template={"version": 9})
    assert choose_format(tokenizer).name == "think"
    assert "response_template" in caplog.text
