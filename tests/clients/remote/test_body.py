"""Laws of the request's way out: every field is sent under the server's name, left out, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamserve.clients.remote.body import CHAT, COMPLETIONS, body_of, can_continue
from streamserve.clients.remote.config import SERVERS
from streamserve.protocol.errors import BadRequest, CannotContinue
from streamserve.protocol.events import BlockText
from streamserve.protocol.requests import (
    START,
    GenerateRequest,
    Grammar,
    Message,
    Resume,
    SamplingParams,
    ShownChoice,
    Tool,
    ToolChoice,
)
from tests.support.servers.upstreams import chat

SO_FAR = ShownChoice(blocks=(BlockText(index=0, kind="text", text="So far", is_open=True),), num_tokens=3)
SHOWN = Resume(shown=(SO_FAR,))


def body(request: GenerateRequest, server: str = "vllm", resume: Resume = START) -> dict[str, Any]:
    _, out = body_of(request, resume, "org/model", server, SERVERS[server])
    json.dumps(out)
    return out


def test_a_chat_is_openais() -> None:
    """Only what the caller has set is sent, beside the usage that is always asked for."""
    unset = ("top_p", "presence_penalty", "frequency_penalty", "seed")
    route, out = body_of(chat(stop=("###",), unset=unset), START, "org/model", "openai", SERVERS["openai"])
    assert route == CHAT
    assert out == {
        "model": "org/model",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "Hello?"}],
        "temperature": 0.0,
        "max_tokens": 64,
        "stop": ["###"],
    }


def test_what_acceptance_filled_in_is_not_sent() -> None:
    """A resumed request has a seed and max_tokens that the caller left open: the server's own hold."""
    out = body(chat(seed=0, max_tokens=0, unset=("seed", "max_tokens", "temperature")))
    assert not {"seed", "max_tokens", "temperature"} & out.keys()


def test_a_prompt_is_a_completion() -> None:
    """As text or as ids."""
    sampling = SamplingParams(max_tokens=3)
    for prompt in ({"prompt": "Once"}, {"prompt_token_ids": (1, 2)}):
        route, out = body_of(
            GenerateRequest(model="m", sampling=sampling, **prompt), START, "m", "vllm", SERVERS["vllm"]
        )
        assert (route, out["prompt"]) == (COMPLETIONS, "Once" if "prompt" in prompt else [1, 2])


SETTINGS: dict[str, Any] = {
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": (7,), "ignore_eos": True,
    "logit_bias": ((5, -1.0),), "allowed_token_ids": (1, 2), "bad_words": ("no",), "include_stop": True,
    "skip_special_tokens": False, "truncate_prompt_tokens": 5,
}  # fmt: skip


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_each_extra_field_is_sent_or_refused(server: str, name: str) -> None:
    """None is dropped: a dropped field would change the answer silently."""
    request = chat(**{name: SETTINGS[name]})
    if name in SERVERS[server].fields:
        value = body(request, server)[SERVERS[server].fields[name]]
        assert value == ({"5": -1.0} if name == "logit_bias" else json.loads(json.dumps(SETTINGS[name])))
        return
    with pytest.raises(BadRequest, match=f"{name} is not supported by this model's server") as caught:
        body(request, server)
    assert caught.value.param == name


OFF = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize("server", SERVERS)
def test_what_the_caller_switches_off_is_off_there_too(server: str) -> None:
    """A server has its model's own defaults: 0 is said where the caller has said it, in the server's word for it."""
    unset = ("temperature", "top_p")
    sent = body(chat(**OFF, unset=unset), server)
    fields = SERVERS[server].fields
    no_top_k = 0 if server in ("llama-server", "streamserve") else -1
    expected = {"top_k": no_top_k, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: sent.get(fields[name]) for name in OFF if name in fields} == {
        name: value for name, value in expected.items() if name in fields
    }
    left_open = body(chat(unset=(*unset, *OFF)), server)
    assert not {fields[name] for name in OFF if name in fields} & left_open.keys()


def test_what_no_server_has_is_refused() -> None:
    """Log-probabilities of the prompt, and of a prompt's completion."""
    for request in (
        chat(prompt_logprobs=1),
        GenerateRequest(model="m", prompt="x", sampling=SamplingParams(logprobs=1)),
        chat(echo=True),
    ):
        with pytest.raises(BadRequest):
            body(request)
    with pytest.raises(BadRequest):
        body(chat(chat_template_kwargs={"enable_thinking": False}), "openai")


def test_tools_go_through() -> None:
    """Schemas, strictness, the choice, and calls and results of earlier turns in OpenAI's shape, null beside a call."""
    tools = (Tool(name="get", description="Gets.", parameters={"type": "object"}, strict=True), Tool(name="put"))
    made = {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"a": 1}}}]}
    messages = (
        Message(role="user", content="Go"),
        Message(role="assistant", content="", extra=made),
        Message(role="tool", content="7", extra={"tool_call_id": "c1"}),
    )
    out = body(chat(tools=tools, messages=messages, parallel_tool_calls=False))
    get = {"name": "get", "parameters": {"type": "object"}, "description": "Gets.", "strict": True}
    assert out["tools"] == [
        {"type": "function", "function": get},
        {"type": "function", "function": {"name": "put", "parameters": {}}},
    ]
    assert (out["tool_choice"], out["parallel_tool_calls"]) == ("auto", False)
    assert out["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert out["messages"][1]["content"] is None
    assert out["messages"][2] == {"role": "tool", "content": "7", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("choice", "sent", "names"),
    [
        (ToolChoice(mode="none"), "none", ["get", "put"]),
        (ToolChoice(mode="required"), "required", ["get", "put"]),
        (ToolChoice(mode="required", names=("put",)), {"type": "function", "function": {"name": "put"}}, ["put"]),
        (ToolChoice(mode="auto", names=("put",)), "auto", ["put"]),
    ],
)
def test_the_choice_of_tools(choice: ToolChoice, sent: Any, names: list[str]) -> None:
    """A named choice names the tool; where only some are allowed, only those are shown."""
    out = body(chat(tools=(Tool(name="get"), Tool(name="put")), tool_choice=choice))
    assert out["tool_choice"] == sent
    assert [tool["function"]["name"] for tool in out["tools"]] == names


OBJECT = Grammar(kind="json_schema", value='{"type":"object"}')
REGEX, LARK = Grammar(kind="regex", value="a+"), Grammar(kind="lark", value='start: "a"')
CHOICE = Grammar(kind="choice", value='["a","b.\\n"]')
GBNF = Grammar(kind="gbnf", value='root ::= "a"')
STRICT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}
SENT: list[tuple[str, Grammar, dict[str, Any]]] = [
    ("openai", Grammar(kind="json_object"), {"response_format": {"type": "json_object"}}),
    ("llama-server", OBJECT, {"response_format": STRICT}),
    ("llama-server", CHOICE, {"grammar": 'root ::= "a" | "b.\\x0a"'}),
    ("vllm", OBJECT, {"response_format": STRICT}),
    ("vllm", REGEX, {"structured_outputs": {"regex": "a+"}}),
    ("vllm", CHOICE, {"structured_outputs": {"choice": ["a", "b.\n"]}}),
    ("vllm", LARK, {"structured_outputs": {"grammar": 'start: "a"'}}),
    ("vllm-guided", REGEX, {"guided_regex": "a+"}),
    ("vllm-guided", CHOICE, {"guided_choice": ["a", "b.\n"]}),
    ("vllm-guided", LARK, {"guided_grammar": 'start: "a"'}),
    ("llama-server", GBNF, {"grammar": 'root ::= "a"'}),
    ("vllm", GBNF, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ("vllm-guided", GBNF, {"guided_grammar": 'root ::= "a"'}),
    ("sglang", GBNF, {"ebnf": 'root ::= "a"'}),
    ("streamserve", GBNF, {"grammar": {"type": "gbnf", "grammar": 'root ::= "a"'}}),
    ("sglang", REGEX, {"regex": "a+"}),
    ("sglang", CHOICE, {"regex": "(a)|(b\\.\n)"}),
    ("streamserve", OBJECT, {"grammar": {"type": "json_schema", "schema": {"type": "object"}}}),
    ("streamserve", Grammar(kind="json_object"), {"grammar": {"type": "json_object"}}),
    ("streamserve", REGEX, {"grammar": {"type": "regex", "pattern": "a+"}}),
    ("streamserve", CHOICE, {"grammar": {"type": "choice", "choices": ["a", "b.\n"]}}),
    ("streamserve", LARK, {"grammar": {"type": "lark", "grammar": 'start: "a"'}}),
]


@pytest.mark.parametrize(("server", "grammar", "sent"), SENT)
def test_grammars_go_through(server: str, grammar: Grammar, sent: dict[str, Any]) -> None:
    """Each kind in the server's own field."""
    plain = body(chat(), server)
    assert {name: value for name, value in body(chat(grammar=grammar), server).items() if name not in plain} == sent


def test_a_schema_of_a_prompt() -> None:
    """llama-server ignores `response_format` there, and has a field of its own; a provider has none."""
    request = GenerateRequest(model="m", prompt="x", grammar=OBJECT)
    assert body(request, "llama-server")["json_schema"] == {"type": "object"}
    assert "response_format" not in body(request, "llama-server")
    assert body(request)["response_format"] == STRICT
    with pytest.raises(BadRequest, match="with prompt") as caught:
        body(request, "openai")
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("grammar", [REGEX, CHOICE, LARK, GBNF], ids=lambda grammar: grammar.kind)
def test_a_grammar_that_a_server_lacks_is_refused(server: str, grammar: Grammar) -> None:
    """It is never dropped; the message names the kinds that the server takes."""
    if grammar.kind in SERVERS[server].grammars:
        assert body(chat(grammar=grammar), server).keys() > body(chat(), server).keys()
        return
    with pytest.raises(BadRequest, match=r"It takes: .*json_object, json_schema") as caught:
        body(chat(grammar=grammar), server)
    assert (caught.value.param, caught.value.code) == ("grammar", "unsupported_parameter")


@pytest.mark.parametrize(
    ("server", "flags"),
    [
        ("vllm", {"continue_final_message": True, "add_generation_prompt": False}),
        ("sglang", {"continue_final_message": True, "add_generation_prompt": False}),
        ("llama-server", {"continue_final_message": True, "add_generation_prompt": False}),
        ("streamserve", {"continue_final_message": True}),
    ],
)
def test_a_partial_answer_is_sent_back(server: str, flags: dict[str, bool]) -> None:
    """As the beginning of the assistant's turn; what was shown counts against max_tokens."""
    out = body(chat(), server, SHOWN)
    assert out["messages"][-1] == {"role": "assistant", "content": "So far"}
    assert flags.items() <= out.items()
    assert out["max_tokens"] == 61
    if "min_tokens" in SERVERS[server].fields:
        assert body(chat(min_tokens=5), server, SHOWN)["min_tokens"] == 2
        assert "min_tokens" not in body(chat(min_tokens=3), server, SHOWN)


def test_a_callers_own_beginning_is_continued_too() -> None:
    """What was shown follows it in the same turn."""
    turns = (Message(role="user", content="Go"), Message(role="assistant", content="Well, "))
    out = body(chat(messages=turns, continue_final_message=True), resume=SHOWN)
    assert out["messages"][-1]["content"] == "Well, So far"
    assert body(chat(messages=turns, continue_final_message=True))["messages"][-1]["content"] == "Well, "
    with pytest.raises(BadRequest):
        body(chat(messages=turns, continue_final_message=True), "openai")


def test_a_prompt_is_continued_by_its_text() -> None:
    """On any server; one of ids only by none, as the text has no ids."""
    sampling = SamplingParams(max_tokens=10)
    out = body(GenerateRequest(model="m", prompt="Once ", sampling=sampling), "openai", SHOWN)
    assert (out["prompt"], out["max_tokens"]) == ("Once So far", 7)
    with pytest.raises(CannotContinue):
        body(GenerateRequest(model="m", prompt_token_ids=(1,)), resume=SHOWN)


def test_what_can_be_continued() -> None:
    """Text of one choice, where the server can; nothing shown can be asked for again; thoughts and calls cannot."""
    thought = ShownChoice(blocks=(BlockText(index=0, kind="thinking", text="Hm", is_open=True),), num_tokens=1)
    vllm, openai = SERVERS["vllm"], SERVERS["openai"]
    assert can_continue(chat(), SO_FAR, vllm)
    assert can_continue(chat(), ShownChoice(), openai)
    assert can_continue(chat(grammar=OBJECT), ShownChoice(), openai)
    assert not can_continue(chat(grammar=OBJECT), SO_FAR, vllm), "a grammar begins anew, in the middle of a text"
    assert not can_continue(chat(), SO_FAR, openai)
    assert not can_continue(chat(), thought, vllm)
    assert not can_continue(chat(n=2), SO_FAR, vllm)
