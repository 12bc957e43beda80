"""What a chat's prompt has of tools, and in which block its answer begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.engine.text.formats.markup import choose_format
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.requests import Message, Tool, ToolChoice
from tests.support.models.tagged import EOS, Answer, answer_of, ask, blocks_of, events_of, ids_of, tagged_tokenizer

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"]
# As Qwen3's: tools, calls of earlier turns, and a thought that the prompt opens or closes.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}tool: {{ tool.function.name }} {{ tool.function.parameters | tojson }}\n"
    "{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
    "{% endif %}"
)
MISTRAL = TEMPLATE + (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}"
    "{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = (Tool(name="get_weather", description="Now.", parameters=CITY),)


@pytest.fixture(scope="module", params=["tokens", "text"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    added = TAGS if request.param == "tokens" else ()
    return tagged_tokenizer(tmp_path_factory.mktemp("prompts"), added=added, template=TEMPLATE)


def text_of(tokenizer: HFTokenizer, prompt: Prompt) -> str:
    return b"".join(map(tokenizer.token_bytes, prompt.token_ids)).decode()


def answer_in(tokenizer: HFTokenizer, **fields: Any) -> Answer:
    return answer_of(tokenizer, choose_format(tokenizer, "qwen3"), **{"tools": TOOLS, **fields})


def kinds(answer: Answer, output: str) -> list[str]:
    blocks = blocks_of(events_of(answer.choice(), ids_of(answer.tokenizer, output + EOS), "stop"))
    return [f"{block['kind']} {block['text']}" for block in blocks]


def test_tools_reach_the_template(tokenizer: HFTokenizer) -> None:
    """Tools have OpenAI's shape in the template; with tool_choice none it is not shown them."""
    shown = text_of(tokenizer, tokenizer.encode(ask(tools=TOOLS)))
    assert shown.startswith(
        'tool: get_weather {"type": "object", "properties": {"city": {"type": "string"}}}\n<|im_start|>'
    )
    for fields in ({"tools": ()}, {"tools": TOOLS, "tool_choice": ToolChoice(mode="none")}):
        assert text_of(tokenizer, tokenizer.encode(ask(**fields))).startswith("<|im_start|>user")


def test_earlier_calls_reach_the_template(tokenizer: HFTokenizer) -> None:
    """A turn's calls and a tool's answer are in the prompt."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    turns = (
        Message(role="user", content="?"),
        Message(role="assistant", content="", extra={"tool_calls": [call]}),
        Message(role="tool", content="3 C", extra={"tool_call_id": "call_1"}),
    )
    shown = text_of(tokenizer, tokenizer.encode(ask(messages=turns, tools=TOOLS)))
    assert '<tool_call>call_1 get_weather {"city": "Oslo"}</tool_call>' in shown
    assert "3 C for call_1" in shown


def test_thinking_is_decided_by_the_prompt(tokenizer: HFTokenizer) -> None:
    """A prompt that opens a thought begins the answer in it; one that closes it, or opens none, in the text."""
    output = "Hm.</think>\n\nYes."
    begun = answer_in(tokenizer, chat_template_kwargs={"enable_thinking": True})
    assert kinds(begun, output) == ["thinking Hm.", "text Yes."]
    ended = answer_in(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert kinds(ended, "Yes.") == ["text Yes."]
    assert kinds(answer_in(tokenizer), "<think>\nHm.\n</think>\n\nYes.") == ["thinking Hm.", "text Yes."]


@pytest.mark.parametrize(
    ("last", "output", "expected"),
    [
        ("<think>\nI am", " here.</think>\n\nYes.", ["thinking  here.", "text Yes."]),
        ("<think>\nHm.\n</think>\n\nI am", " here.", ["text  here."]),
        ("I am", " here.", ["text  here."]),
    ],
)
def test_a_continued_message_decides(tokenizer: HFTokenizer, last: str, output: str, expected: list[str]) -> None:
    """The beginning of the answer in the request's last message says in which block it goes on, space and all."""
    turns = (Message(role="user", content="?"), Message(role="assistant", content=last))
    answer = answer_in(tokenizer, messages=turns, continue_final_message=True)
    assert text_of(tokenizer, answer.prompt).endswith(last)
    assert kinds(answer, output) == expected


def test_ids_of_calls_are_short_where_they_must_be(tmp_path: Path) -> None:
    """Mistral's template takes ids of nine characters; ours become such, the same in a call and its answer."""
    tokenizer = tagged_tokenizer(tmp_path, added=["[TOOL_CALLS]"], template=MISTRAL)
    call = {"id": "call_" + 24 * "a", "function": {"name": "f", "arguments": {}}}
    turns = (
        Message(role="user", content="?"),
        Message(role="assistant", content="", extra={"tool_calls": [call]}),
        Message(role="tool", content="3 C", extra={"tool_call_id": call["id"]}),
    )
    shown = text_of(tokenizer, tokenizer.encode(ask(messages=turns)))
    short = shown.partition("<tool_call>")[2][:9]
    assert short.isalnum()
    assert f"3 C for {short}" in shown
