"""Laws of chat templates: all of a conversation that was accepted is in the prompt; the rest is a 400 that names it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.dialects import messages as dialect
from streamserve.engine.text.chat_template import Form, answered, arguments_object, arguments_text, variables
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.engine.text.tokenizer import PublicPrefixes
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import RESERVED_TEMPLATE_NAMES, GenerateRequest, Message, Tool, with_system
from tests.support.models.tagged import tagged_tokenizer
from tests.support.models.templates import SHAPES

MARK = "\U000f0000"  # of transformers, before a control token that is text
CALLS = (("1", "a"), ("", "b"), ("3", "c"))
TOOLS = (Tool(name="get_weather", description="Now.", parameters={"type": "object", "properties": {}}),)
CONTENTS = {
    "string": ("Bergen", ["Bergen"]),
    "parts": ([{"type": "text", "text": "Narvik"}, {"type": "text", "text": "Molde"}], ["Narvik", "Molde"]),
    "empty": ("", []),
    "null": (None, []),
}
TURNS = [
    (role, content)
    for role in dialect.ROLES
    for content in CONTENTS
    if content != "null" or role in ("assistant", "tool", "function")
]
ARGUMENTS: dict[str, tuple[Any, list[str]]] = {
    "object": ({"city": "Bergen"}, ["Bergen"]),
    "text": ('{"city": "Bergen", "days": [1, 2.5]}', ["Bergen", "2.5"]),
    "none": ("{}", []),
    "empty": ("", []),
    "null": (None, []),
    "null as text": ("null", []),
    "cut": ('{"city": "Berg', ["Berg"]),
    "no object": ('["Bergen"]', ["Bergen"]),
    "duplicate keys": ('{"city": "Bergen", "city": "Narvik"}', ["Bergen", "Narvik"]),
    "lone surrogate": (r'{"city": "Bergen\ud83d"}', ["Bergen"]),
    "30 digits": ('{"n": ' + 3 * "1234567890" + "}", [3 * "1234567890"]),
    "5,000 digits": ('{"n": ' + 5_000 * "7" + "}", [5_000 * "7"]),
    "NaN": ('{"n": NaN, "city": "Bergen"}', ["NaN", "Bergen"]),
    "nested deeply": ('{"a":' * 200 + '"Bergen"' + "}" * 200, ["Bergen"]),
    "nested beyond reading": ("[" * 9_000 + "Bergen", ["Bergen"]),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFTokenizer]:
    """A tokenizer of bytes for each template."""
    folder = tmp_path_factory.mktemp("templates")
    return {name: tagged_tokenizer(folder / name, template=shape.template) for name, shape in SHAPES.items()}


def request_of(*turns: dict[str, Any], **fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", messages=dialect.messages(Limits())(list(turns), "messages"), **fields)


def text_of(tokenizer: HFTokenizer, request: GenerateRequest) -> str:
    return b"".join(map(tokenizer.token_bytes, tokenizer.encode(request).token_ids)).decode()


def turn(role: str, content: Any = "Hello there", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def calling(arguments: Any, content: Any = None, name: str = "get_weather", call_id: str = "call_1") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return turn("assistant", content, tool_calls=[call])


def result(content: Any = "Nine degrees", call_id: str = "call_1") -> dict[str, Any]:
    return turn("tool", content, tool_call_id=call_id, name="get_weather")


def conversation(role: str, content: Any) -> tuple[list[dict[str, Any]], int]:
    """Return a conversation with such a turn, and its number."""
    if role in ("system", "developer"):
        return [turn(role, content), turn("user")], 0
    if role == "user":
        return [turn(role, content)], 0
    if role == "assistant":
        return [turn("user"), turn(role, content), turn("user")], 1
    answer = turn(role, content, name="get_weather", **({"tool_call_id": "call_1"} if role == "tool" else {}))
    return [turn("user"), calling('{"city": "Bodo"}'), answer], 2


LOOP = (calling('{"city": "Bodo"}'), result())


def check(tokenizer: HFTokenizer, request: GenerateRequest, words: list[str], params: tuple[str, ...]) -> None:
    """Assert that the prompt has the words; with `params`, that the request is refused and these are to blame."""
    if params:
        with pytest.raises(BadRequest) as caught:
            tokenizer.encode(request)
        assert (caught.value.code, caught.value.param in params) == ("template_error", True), caught.value.param
        return
    text = text_of(tokenizer, request)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(("role", "content"), TURNS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_turn_is_shown_or_refused(tokenizers: Any, name: str, role: str, content: str) -> None:
    """Of each role, with content as a string or parts, and beside what is empty the other turns."""
    value, words = CONTENTS[content]
    turns, number = conversation(role, value)
    refuses = SHAPES[name].refuses
    blamed = [number] if role in refuses else []
    if role in ("tool", "function") and "calls" in refuses:
        blamed.append(1)
    hello = ["Hello there"] * (role != "user")
    check(tokenizers[name], request_of(*turns), [*words, *hello], tuple(f"messages[{one}]" for one in blamed))


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_call_is_shown_or_refused(tokenizers: Any, name: str, arguments: str) -> None:
    """Whatever a model has written as arguments: the second turn of an agent's loop, and the third."""
    value, words = ARGUMENTS[arguments]
    begun = [turn("user"), calling(value, name="look_up_weather"), result()]
    refused = ("messages[1]",) if "calls" in SHAPES[name].refuses else ()
    for turns in (begun, [*begun, turn("assistant", "Cold."), turn("user", "Thanks.")]):
        found = [*words, "look_up_weather", "Nine degrees", "Hello there"]
        check(tokenizers[name], request_of(*turns), found, refused)


@pytest.mark.parametrize("name", SHAPES)
def test_tools_are_shown_or_refused(tokenizers: Any, name: str) -> None:
    """They are the first to be blamed; without them the same question passes."""
    refused = ("tools",) if "tools" in SHAPES[name].refuses else ()
    check(tokenizers[name], request_of(turn("user"), tools=TOOLS), ["get_weather", "Hello there"], refused)
    check(tokenizers[name], request_of(turn("user")), ["Hello there"], ())


@pytest.mark.parametrize("name", [name for name in SHAPES if "calls" not in SHAPES[name].refuses])
def test_text_beside_a_call_is_shown(tokenizers: Any, name: str) -> None:
    """Where a template drops it, it is a turn of its own; where turns must alternate, it joins the answer."""
    begun = [turn("user"), calling('{"city": "Bodo"}', "I will look."), result()]
    check(tokenizers[name], request_of(*begun), ["I will look.", "Bodo", "Nine degrees"], ())
    longer = [*begun, turn("assistant", "Cold."), turn("user", "Thanks.")]
    check(tokenizers[name], request_of(*longer), ["I will look.", "Bodo", "Cold.", "Thanks."], ())
    again = [*begun, calling('{"city": "Moss"}', "And there?", call_id="call_2"), result("Ten", "call_2")]
    said = ["I will look.", "Bodo", "Nine degrees", "And there?", "Moss", "Ten"]
    check(tokenizers[name], request_of(*again), said, ())
    asked = [*again, turn("assistant", "Warm."), turn("user", "Thanks."), *begun[1:], turn("assistant", "Cold.")]
    check(tokenizers[name], request_of(*asked, turn("user", "Bye.")), [*said, "Warm.", "Thanks.", "Cold.", "Bye."], ())


@pytest.mark.parametrize("content", [None, "I will look."])
@pytest.mark.parametrize("name", [name for name in SHAPES if "calls" not in SHAPES[name].refuses])
def test_several_calls_of_a_turn_are_shown(tokenizers: Any, name: str, content: str | None) -> None:
    """Where a template takes one call a turn, each comes before its own result, in whatever order these were sent."""
    both = calling('{"city": "Bodo"}', content)
    both["tool_calls"] += calling('{"city": "Moss"}', call_id="call_2")["tool_calls"]
    turns = [turn("user"), both, result("Ten degrees", "call_2"), result("Nine degrees"), turn("assistant", "Cold.")]
    text = text_of(tokenizers[name], request_of(*turns, turn("user", "Thanks.")))
    said = ["Bodo", "Moss", "Nine degrees", "Ten degrees", "Cold.", "Thanks.", *([content] if content else [])]
    assert [word for word in said if word not in text] == []
    if name in ("llama3", "harmony"):
        assert text.index("Bodo") < text.index("Nine degrees") < text.index("Moss") < text.index("Ten degrees")


@pytest.mark.parametrize("name", [name for name in SHAPES if "system" not in SHAPES[name].refuses])
def test_several_system_turns_are_shown(tokenizers: Any, name: str) -> None:
    """A template that takes one gets one, with all their texts."""
    turns = [turn("system", "Be brief."), turn("developer", "SAY BANANA"), turn("user")]
    text = text_of(tokenizers[name], request_of(*turns))
    assert text.index("Be brief.") < text.index("SAY BANANA") < text.index("Hello there")


@pytest.mark.parametrize("name", ["r1", "mistral", "llama3"])
def test_a_turn_out_of_place_is_blamed(tokenizers: Any, name: str) -> None:
    """A template that moves, refuses or shows a late system turn: it is in the prompt, or named."""
    turns = [turn("user"), turn("assistant", "Yes?"), turn("system", "Be brief."), turn("user")]
    check(tokenizers[name], request_of(*turns), ["Be brief."], ("messages",) if name == "mistral" else ())


def test_a_dropped_turn_is_named(tmp_path: Path) -> None:
    """A late system turn that the template drops without a word, though it shows an early one."""
    template = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}<|{{ m.role }}|>{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    tokenizer = tagged_tokenizer(tmp_path, template=template)
    turns = [turn("system", "Be kind."), turn("user"), turn("system", "Be brief."), turn("user")]
    check(tokenizer, request_of(*turns), [], ("messages[2]",))
    check(tokenizer, request_of(*turns[:2]), ["Be kind."], ())


def test_null_stays_null_beside_calls(tokenizers: Any) -> None:
    """A template that has a turn for each text has none for an empty one; null is never printed."""
    for name in ("r1-distill", "llama3", "chatml", "printed", "qwen3"):
        turns = [turn("user"), turn("assistant", "Yes?"), turn("user")]
        if "calls" not in SHAPES[name].refuses:
            turns = [turn("user"), calling("{}"), result()]
        assert "None" not in text_of(tokenizers[name], request_of(*turns))
    turns = [turn("user"), calling("{}"), result()]
    assert text_of(tokenizers["r1-distill"], request_of(*turns)).count("<|assistant|>") == 1  # that of the answer


def test_the_form_is_what_the_template_wants(tokenizers: Any) -> None:
    """Parts, text arguments, developers as the system or as themselves."""
    forms = {name: tokenizer.template.forms[True] for name, tokenizer in tokenizers.items()}
    assert {name for name, form in forms.items() if form.parts} == {"guard"}
    assert {name for name, form in forms.items() if form.arguments == "text"} == {"r1", "r1-distill", "printed"}
    assert {name for name, form in forms.items() if not form.arguments} == {"chatml", "guard", "gemma2"}
    assert {name for name, form in forms.items() if form.roles.get("developer") == "system"} == {
        "qwen3", "r1", "r1-distill", "qwen-xml", "mistral"
    }  # fmt: skip
    assert {name for name, form in forms.items() if form.silence is None} >= {"r1", "r1-distill"}
    assert list(forms["guard"].notes()) == ["roles user, assistant", "content as parts", "no tool calls", "no tools"]
    assert next(forms["qwen3"].notes()) == (
        "roles system, developer (as system), user, assistant, tool, function (as tool)"
    )


def test_arguments_stay_json_where_they_are_an_object(tokenizers: Any) -> None:
    """A template that prints them as they are gets text, not an object in Python's notation."""
    text = text_of(tokenizers["printed"], request_of(turn("user"), calling('{"city": "Bergen"}'), result()))
    assert '<call>get_weather {"city": "Bergen"}<end>' in text


def test_the_sites_own_system_prompt_is_not_the_callers_fault(tokenizers: Any) -> None:
    """No field is to blame where the template shows no system prompt; a caller's own is named by its place."""
    with pytest.raises(BadRequest) as caught:
        tokenizers["gemma2"].encode(with_system(request_of(turn("user")), "Be kind."))
    assert (caught.value.code, caught.value.param) == ("template_error", None)
    placed = GenerateRequest(model="m", messages=(Message(role="system", content="Hm.", param="system"),))
    with pytest.raises(BadRequest) as caught:
        tokenizers["gemma2"].encode(placed)
    assert caught.value.param == "system"


@pytest.mark.parametrize("name", SHAPES)
def test_kwargs_may_be_what_the_template_reads(tokenizers: Any, name: str) -> None:
    """Apart from what the server sets; an error lists what this template reads."""
    tokenizer, reads = tokenizers[name], SHAPES[name].reads
    assert tokenizer.template_variables == reads
    for variable in reads:
        tokenizer.encode(request_of(turn("user"), chat_template_kwargs={variable: "x"}))
    for variable in ("messages", "tools", "bos_token", "chat_template", "tokenize", "ns", "loop", "raise_exception"):
        with pytest.raises(BadRequest) as caught:
            tokenizer.encode(request_of(turn("user"), chat_template_kwargs={variable: "x"}))
        assert caught.value.param == "chat_template_kwargs"
        assert variable in caught.value.message
        assert all(one in caught.value.message for one in reads)


def test_every_parameter_of_the_rendering_is_reserved(tokenizers: Any) -> None:
    """A variable of that name would change how the prompt is made; documents are content, which a template may read."""
    parameters = inspect.signature(tokenizers["qwen3"]._hf.apply_chat_template).parameters
    assert set(parameters) - {"documents", "kwargs"} <= RESERVED_TEMPLATE_NAMES


@pytest.mark.parametrize("name", SHAPES)
def test_a_begun_answer_is_continued(tokenizers: Any, name: str) -> None:
    """In every form, the prompt ends with the last message's text."""
    request = request_of(turn("user"), turn("assistant", "It is a"), continue_final_message=True)
    assert text_of(tokenizers[name], request).endswith("It is a")


def test_a_variable_of_the_caller_reaches_the_prompt_as_text(tokenizers: Any) -> None:
    """Its control tokens are characters, as those of a message are."""
    tokenizer = tokenizers["llama3"]
    plain = request_of(turn("user"))
    dated = request_of(turn("user"), chat_template_kwargs={"date_string": "26 Jul<|eos|>"})
    assert text_of(tokenizer, dated) == text_of(tokenizer, plain) + "26 Jul<|eos|>"
    assert tokenizer.tag_id("<|eos|>") not in tokenizer.encode(dated).token_ids


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("chatml", "guard", "r1", "gemma2")])
def test_keys_of_the_caller_reach_the_prompt_as_text(tokenizers: Any, name: str) -> None:
    """Control tokens in the keys of arguments and of schemas are characters: no turn is forged by them."""
    tokenizer, key = tokenizers[name], "city<|eos|>"
    schema = {"type": "object", "properties": {key: {"type": "string"}}}
    tools = (Tool(name="get_weather", description="Now.", parameters=schema),)
    for arguments in ({key: "Bergen"}, '{"city<|eos|>": "Bergen"}'):
        request = request_of(turn("user"), calling(arguments), result(), tools=tools)
        assert tokenizer.tag_id("<|eos|>") not in tokenizer.encode(request).token_ids
        assert text_of(tokenizer, request).count(key) >= 1


def test_keys_of_a_variable_reach_the_prompt_as_text(tmp_path: Path) -> None:
    """So do those of an object that a caller gives the template; two that are one without private marks are a 400."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ facts | tojson }}"
    tokenizer = tagged_tokenizer(tmp_path, template=template)

    def asked(facts: dict[str, Any]) -> GenerateRequest:
        return request_of(turn("user"), chat_template_kwargs={"facts": facts})

    request = asked({"a": [{"b<|eos|>": 1}]})
    assert text_of(tokenizer, request) == 'Hello there{"a": [{"b<|eos|>": 1}]}'
    assert tokenizer.tag_id("<|eos|>") not in tokenizer.encode(request).token_ids
    with pytest.raises(BadRequest, match="cannot render"):
        tokenizer.encode(asked({"b<|eos|>": 1, MARK + "b<|eos|>": 2}))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ a }}{{ messages }}{{ tools }}{{ bos_token }}{{ eos_token }}", {"a"}),
        ("{% if not date is defined %}{% set date = strftime_now('%d') %}{% endif %}{{ date }}", {"date"}),
        ("{% set deep = deep | default(false) %}{{ deep }}", {"deep"}),
        ("{% set deep = deep if deep is defined else true %}{{ deep }}", {"deep"}),
        ("{% if messages %}{% set system = 1 %}{% endif %}{% if system is defined %}{{ system }}{% endif %}", set()),
        ("{% if messages %}{% set turns = messages %}{% endif %}{{ turns }}", set()),
        ("{% for m in messages %}{{ loop.index }}{% endfor %}{{ m }}", set()),
        ("{% macro f(x) %}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}{{ range(3) }}{% set ns = namespace(a=1) %}", {"y"}),
        ("{% generation %}{{ a }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}", {"a"}),
    ],
)
def test_the_variables_of_a_template(template: str, expected: set[str]) -> None:
    """Those that it reads from outside; what it sets by the messages is its own, though it may be undefined."""
    assert variables(template) - {"messages", "tools", "bos_token", "eos_token"} == expected


def test_results_know_their_calls() -> None:
    """Ids and names that a client left out are those of the calls, in order; given ones stay."""
    function = {"name": "a", "arguments": "{}"}
    calls = [{"id": one, "type": "function", "function": {**function, "name": name}} for one, name in CALLS]
    turns = (
        Message(role="assistant", content="", extra={"tool_calls": calls}),
        Message(role="function", content="", extra={"name": "b"}),
        Message(role="tool", content="", extra={"tool_call_id": "3"}),
        Message(role="tool", content=""),
        Message(role="tool", content="", extra={"tool_call_id": "x"}),
        Message(role="tool", content=""),
    )
    found = answered(turns)
    assert [call["id"] for call in found[0].extra["tool_calls"]] == ["1", "000000001", "3"]
    assert [one.extra for one in found[1:]] == [
        {"name": "b", "tool_call_id": "000000001"},
        {"tool_call_id": "3", "name": "c"},
        {"tool_call_id": "1", "name": "a"},
        {"tool_call_id": "x"},
        {},
    ]


@pytest.mark.parametrize(
    ("given", "as_text", "as_object"),
    [
        ("", "{}", {}),
        (" null\n", "{}", {}),
        (None, "{}", {}),
        ({"a": 1}, '{"a": 1}', {"a": 1}),
        ('{"a":1}', '{"a":1}', {"a": 1}),
        ("[1]", "[1]", {"partial_json": "[1]"}),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}', {"partial_json": '{"a": 1, "a": 2}'}),
        ("\ud83d", "?", {"partial_json": "?"}),
    ],
)
def test_arguments(given: Any, as_text: str, as_object: Any) -> None:
    """None are none; what is no object goes in as the text that it is."""
    assert (arguments_text(given), arguments_object(given)) == (as_text, as_object)


@pytest.mark.parametrize("name", [name for name in SHAPES if "system" not in SHAPES[name].refuses])
def test_the_sites_system_prompt_is_public(tokenizers: Any, name: str) -> None:
    """In every form, the prompt begins with the server's own words, up to the caller's first one."""
    tokenizer = tokenizers[name]
    loop = () if "calls" in SHAPES[name].refuses else LOOP
    request = with_system(request_of(turn("user"), *loop), "Be kind.")
    token_ids = tokenizer.encode(request).token_ids
    num_public = PublicPrefixes(tokenizer).num_tokens(request, token_ids)
    public = b"".join(map(tokenizer.token_bytes, token_ids[:num_public])).decode()
    assert "Be kind." in public
    assert "Hello" not in public


def test_a_template_that_shows_nothing_is_no_reason_to_fail(tmp_path: Path) -> None:
    """A model with a broken template loads; each chat is refused by name."""
    tokenizer = tagged_tokenizer(tmp_path, template="{{ raise_exception('not for chats') }}")
    assert tokenizer.template is not None
    assert tokenizer.template.forms[False] == Form()
    with pytest.raises(BadRequest, match="not for chats"):
        tokenizer.encode(request_of(turn("user")))
