"""Laws of chat completion bodies: what each field becomes."""

import json
from typing import Any

import pytest

from streamserve.dialects.openai import request as openai_request
from streamserve.dialects.openai.body import _ELSEWHERE, IGNORED
from streamserve.dialects.openai.request import _REFUSED, ChatRequest
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import (
    MODEL_DEFAULTS,
    GenerateRequest,
    Grammar,
    Message,
    SamplingParams,
    Tool,
    ToolChoice,
)

HI = [{"role": "user", "content": "Hi"}]


def parse(**body: Any) -> ChatRequest:
    """Return the request that a body becomes."""
    return openai_request.parse({"messages": HI, **body}, Limits(), default_model="echo")


def test_messages_alone_are_enough():
    """Every field but the messages has a default, the model too."""
    generate = GenerateRequest(model="echo", messages=(Message(role="user", content="Hi"),), unset=MODEL_DEFAULTS)
    assert parse() == ChatRequest(generate=generate)


def test_every_honoured_field_arrives():
    """The public names, and the extra fields that load tools send, are in the request."""
    asked = parse(
        model="helpdesk",
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True},
        max_completion_tokens=64,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop="END",
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        logprobs=True,
        top_logprobs=5,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[2],
        chat_template_kwargs={"enable_thinking": True},
        timeout_seconds=30,
    )
    assert (asked.stream, asked.include_usage) == (True, True)
    assert asked.generate.sampling == SamplingParams(
        max_tokens=64,
        temperature=0.5,
        top_p=0.9,
        stop=("END",),
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        logprobs=5,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(2,),
    )
    generate = asked.generate
    assert (generate.model, generate.n, generate.timeout_seconds) == ("helpdesk", 2, 30)
    assert generate.chat_template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_are_a_switch_and_a_count(fields: dict[str, Any], logprobs: int | None):
    """The request has one number: None is off, 0 the chosen token, k the k likeliest as well."""
    assert parse(**fields).generate.sampling.logprobs == logprobs


@pytest.mark.parametrize(("asked", "used"), [(0, 0), (7, 7), (-1, 2**63 - 1), (-(2**63), 0), (2**63 - 1, 2**63 - 1)])
def test_any_64_bit_seed_is_a_seed(asked: int, used: int):
    """Negative seeds are valid in this API; the request has 63 bits of them."""
    assert parse(seed=asked).generate.sampling.seed == used


def test_both_names_of_max_tokens_may_agree():
    """A body may have both names with one value."""
    assert parse(max_tokens=5, max_completion_tokens=5).generate.sampling.max_tokens == 5


def test_a_prompt_replaces_messages():
    """A prompt is for models without a chat template; the official client sends an empty list beside it."""
    for body in ({"messages": [], "prompt": "Once"}, {"messages": None, "prompt": "Once"}):
        assert parse(**body).generate == GenerateRequest(model="echo", prompt="Once", unset=MODEL_DEFAULTS)


@pytest.mark.parametrize(
    ("effort", "kwargs"),
    [
        ("none", {"enable_thinking": False, "thinking": False}),
        ("minimal", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        ("medium", {"enable_thinking": True, "thinking": True, "reasoning_effort": "medium"}),
        ("xhigh", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_reasoning_effort_is_for_the_template(effort: str, kwargs: dict[str, Any]):
    """The seven words of the API become a switch and the three of templates; a bare prompt has no template."""
    assert parse(reasoning_effort=effort).generate.chat_template_kwargs == kwargs
    assert parse(messages=None, prompt="Hi", reasoning_effort=effort).generate.chat_template_kwargs == {}


def test_template_kwargs_go_before_reasoning_effort():
    """The more exact field has precedence."""
    asked = parse(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high", "thinking": False})
    expected = {"enable_thinking": True, "thinking": False, "reasoning_effort": "high"}
    assert asked.generate.chat_template_kwargs == expected


@pytest.mark.parametrize(
    ("tier", "name"),
    [("auto", None), ("default", "chat"), ("scale", "chat"), ("priority", "completion"), ("flex", "batch")],
)
def test_a_tier_names_a_class(tier: str, name: str | None):
    """The tiers of the public API are latency classes; auto leaves the choice to the site."""
    asked = parse(service_tier=tier)
    assert (asked.latency_class, asked.generate.latency_class) == (name, name or "chat")
    assert parse(service_tier=tier, latency_class=name or "document").latency_class == (name or "document")


def test_a_tier_and_a_class_must_agree():
    """Two fields with different values are refused; so is a tier that the public API lacks."""
    with pytest.raises(BadRequest, match="differ"):
        parse(service_tier="flex", latency_class="chat")
    with pytest.raises(BadRequest, match="priority"):
        parse(service_tier="gold")


IGNORABLE: dict[str, Any] = {
    "user": "u1",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "verbosity": "low",
    "cache_control": {"type": "ephemeral"},
    "cache_prompt": True,
    "cache_salt": "s",
    "id_slot": -1,
    "keep_alive": "5m",
    "priority": 0,
    "provider": {"order": ["a"]},
    "request_id": "r1",
    "return_progress": True,
    "session_id": "s1",
    "timings_per_token": True,
    "usage": {"include": True},
}
ASKING_NOTHING: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "functions": [],
    "function_call": "auto",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "moderation": None,
    "web_search_options": None,
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "best_of": 1,
    "dry_multiplier": 0,
    "include_reasoning": True,
    "length_penalty": 1.0,
    "mirostat": 0,
    "reasoning_format": "auto",
    "repeat_penalty": 1,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "safe_prompt": False,
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stream_reasoning": True,
    "transforms": [],
    "typical_p": 1.0,
    "use_beam_search": False,
    "xtc_probability": 0.0,
}


@pytest.mark.parametrize("name", [*IGNORABLE, *ASKING_NOTHING])
def test_what_asks_for_nothing_changes_nothing(name: str):
    """Ignored fields, and unsupported ones at their neutral value, leave the request unchanged."""
    assert parse(**{name: {**IGNORABLE, **ASKING_NOTHING}[name]}) == parse()


def test_the_ignore_list_is_tested_whole():
    """A name that is added to either list needs a case above."""
    assert set(IGNORED) == set(IGNORABLE)
    honoured = {"tools", "tool_choice", "parallel_tool_calls", "response_format", "add_generation_prompt"}
    honoured |= {"include_reasoning", "return_token_ids", "skip_special_tokens"}
    assert {*_REFUSED, *_ELSEWHERE, *honoured} == set(ASKING_NOTHING)


def test_store_and_metadata_are_for_the_site():
    """They say what becomes of the answer, and change nothing in how it is made."""
    stored = parse(store=True, metadata={"a": "b"})
    assert (stored.store, stored.metadata) == (True, {"a": "b"})
    assert (parse().store, parse(metadata=None).metadata) == (False, {})
    assert stored.generate == parse().generate


def test_every_field_of_the_official_client_has_a_fate():
    """Each parameter of the official client is honoured, ignored or refused."""
    from openai.types.chat import completion_create_params as params

    from streamserve.dialects.openai.request import body_fields

    names = set(params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert names <= set(body_fields(Limits()))


WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Look.", "parameters": WEATHER, "strict": True},
    },
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "roll-2.dice", "parameters": None, "strict": None}},
]
NAMED = {"type": "function", "function": {"name": "now"}}


def test_tools_arrive():
    """A function has a name, and perhaps a description, a schema and `strict`."""
    generate = parse(tools=TOOLS).generate
    assert generate.tools == (
        Tool(name="weather", description="Look.", parameters=WEATHER, strict=True),
        Tool(name="now"),
        Tool(name="roll-2.dice"),
    )
    assert (generate.tool_choice, generate.parallel_tool_calls) == (ToolChoice(), True)
    assert parse(tools=TOOLS, parallel_tool_calls=False).generate.parallel_tool_calls is False
    hinted = [{**one, "cache_control": {"type": "ephemeral"}} for one in TOOLS]
    assert parse(tools=hinted).generate.tools == generate.tools


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ("none", ToolChoice(mode="none")),
        ("auto", ToolChoice(mode="auto")),
        ("required", ToolChoice(mode="required")),
        (NAMED, ToolChoice(mode="required", names=("now",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            ToolChoice(mode="auto", names=("now",)),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED, TOOLS[0] | NAMED]}},
            None,
        ),
    ],
)
def test_each_tool_choice(asked: Any, choice: ToolChoice | None):
    """A mode, a name, or some names with a mode; a name that stands twice is refused."""
    if choice is None:
        with pytest.raises(BadRequest, match="must differ"):
            parse(tools=TOOLS, tool_choice=asked)
    else:
        assert parse(tools=TOOLS, tool_choice=asked).generate.tool_choice == choice


def test_each_response_format():
    """Text asks for nothing; an object or a schema is the grammar of the answer's text, the order of keys kept."""
    assert parse(response_format={"type": "text"}).generate.grammar is None
    assert parse(response_format={"type": "json_object"}).generate.grammar == Grammar(kind="json_object")
    schema = {"properties": {"b": {"type": "integer"}, "a": {"enum": ["x", "\u00e9"]}}, "type": "object"}
    for more in ({}, {"strict": True}, {"strict": None, "description": "A row."}):
        asked = parse(response_format={"type": "json_schema", "json_schema": {"name": "row", "schema": schema, **more}})
        grammar = asked.generate.grammar
        assert grammar is not None
        assert grammar.kind == "json_schema"
        assert list(json.loads(grammar.value).items()) == list(schema.items())
    open_schema = {"type": "json_schema", "json_schema": {"name": "row"}}
    assert parse(response_format=open_schema).generate.grammar == Grammar(kind="json_object")


def test_a_format_may_stand_beside_tools():
    """The grammar is that of the text; calls stand beside it. A bare prompt may have a format, and no tools."""
    both = parse(tools=TOOLS, response_format={"type": "json_object"}).generate
    assert (len(both.tools), both.grammar) == (3, Grammar(kind="json_object"))
    bare = parse(messages=None, prompt="Hi", response_format={"type": "json_object"}).generate
    assert bare.grammar == Grammar(kind="json_object")


def test_old_functions_name_their_successor():
    """The refusal of the deprecated fields says what to send."""
    for name, value, successor in (("functions", [{"name": "f"}], "send tools"), ("function_call", {}, "tool_choice")):
        with pytest.raises(BadRequest, match=successor):
            parse(**{name: value})


def test_a_grammar_is_taken_here_too():
    """The native field is an extension of this API; beside `response_format` it would be dropped, and is refused."""
    asked = parse(grammar={"type": "regex", "pattern": "[0-9]+"})
    assert asked.generate.grammar == Grammar(kind="regex", value="[0-9]+")
    with pytest.raises(BadRequest) as caught:
        parse(grammar={"type": "json_object"}, response_format={"type": "json_object"})
    assert (caught.value.code, caught.value.param) == ("conflicting_fields", "grammar")
    large = {"name": "row", "schema": {"description": "a" * 65_536}}
    with pytest.raises(BadRequest) as caught:
        parse(response_format={"type": "json_schema", "json_schema": large})
    assert caught.value.param == "response_format.json_schema.schema"


def test_fields_of_vllms_users():
    """Names and values that vLLM's, llama-server's and the SDKs' users send mean here what they mean there."""
    assert parse(include_stop_str_in_output=True).generate.sampling.include_stop
    assert parse(top_k=-1).generate == parse(top_k=0).generate
    assert parse(stop="").generate.sampling.stop == parse(stop=[]).generate.sampling.stop == ()
    assert parse(stop=["", "END"]).generate.sampling.stop == ("END",)
    assert parse(stop=[str(number) for number in range(16)], n=16).generate.n == 16
    assert not parse(skip_special_tokens=False).generate.sampling.skip_special_tokens
    assert parse(truncate_prompt_tokens=5).generate.sampling.truncate_prompt_tokens == 5
    asked = parse(include_reasoning=False, return_token_ids=True)
    assert (asked.include_reasoning, asked.return_token_ids) == (False, True)
    assert (parse().include_reasoning, parse().return_token_ids) == (True, False)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse(tools=tools, tool_choice="any").generate == parse(tools=tools, tool_choice="required").generate
    begun = [*HI, {"role": "assistant", "content": "It is"}]
    plain = parse(messages=begun, continue_final_message=True)
    assert parse(messages=begun, continue_final_message=True, add_generation_prompt=False) == plain


def test_a_name_and_its_alias_must_agree():
    """Both names of one field are accepted if they say the same."""
    assert parse(include_stop=True, include_stop_str_in_output=True).generate.sampling.include_stop
    with pytest.raises(BadRequest, match="differ") as caught:
        parse(include_stop=True, include_stop_str_in_output=False)
    assert caught.value.param == "include_stop_str_in_output"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_maximum_above_the_sites_is_the_sites(name: str):
    """What a client has as its default, 32,000 or all there are, is lowered to LIMITS' MAX_TOKENS."""
    for value in (16_385, 32_000, 2**63 - 1):
        assert parse(**{name: value}).generate.sampling.max_tokens == 16_384


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"continuous_usage_stats": True}, (False, False)),
        ({"include_usage": True}, (True, False)),
    ],
)
def test_counts_in_every_chunk_need_those_of_the_last(options: dict[str, bool], expected: tuple[bool, bool]):
    """As in vLLM, `continuous_usage_stats` alone shows nothing."""
    asked = parse(stream=True, stream_options=options)
    assert (asked.include_usage, asked.continuous_usage) == expected


@pytest.mark.parametrize(
    "format_",
    [
        {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        {"type": "json_schema", "schema": {"type": "object"}},
        {"type": "json_object", "schema": {"type": "object"}},
    ],
)
def test_a_schema_binds_wherever_it_stands(format_: dict[str, Any]):
    """A `json_schema` without a name, and llama-server's place for the schema, beside the type."""
    assert parse(response_format=format_).generate.grammar == Grammar(kind="json_schema", value='{"type":"object"}')


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ('root ::= "yes" | "no"', "gbnf"),
        ("# one\n  my-rule ::= [a-z]+\nroot ::= my-rule", "gbnf"),
        ('start: "yes" | "no"', "lark"),
        ('start: "a ::= b"', "lark"),
    ],
)
def test_a_grammar_that_is_text_is_gbnf_or_lark(source: str, kind: str):
    """In llama-server's field, in vLLM's, old and new; an object says its type."""
    expected = Grammar(kind=kind, value=source)
    for fields in ({"grammar": source}, {"guided_grammar": source}, {"structured_outputs": {"grammar": source}}):
        assert parse(**fields).generate.grammar == expected
    assert parse(grammar={"type": kind, "grammar": source}).generate.grammar == expected


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": "content", "content": "def total():"}, "def total():"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"type": "content", "content": ""}, ""),
    ],
)
def test_what_an_answer_is_expected_to_be(given, text):
    """A text, or parts of text."""
    assert parse(prediction=given).generate.prediction == text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("text", "prediction"),
        ({}, "prediction.content"),
        ({"type": "tokens", "content": "a"}, "prediction.type"),
        ({"content": 3}, "prediction.content"),
        ({"content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"content": [{"type": "text", "text": 1}]}, "prediction.content[0].text"),
        ({"content": "x" * 500_000}, "prediction.content"),
    ],
)
def test_a_prediction_that_is_none(given, param):
    """It is named."""
    with pytest.raises(BadRequest) as caught:
        parse(prediction=given)
    assert caught.value.param == param
