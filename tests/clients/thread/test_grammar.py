"""Laws of a request with a grammar: accepted or refused before the engine sees it, continued after parks."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest

from streamserve.clients.factory import echo_client
from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.protocol.errors import BadRequest, StreamserveError
from streamserve.protocol.events import BlockStart, ChoiceDone, Done, Token
from streamserve.protocol.requests import Grammar, Message, Resume, Tool, ToolChoice
from tests.support.bodies.grammars import SLOW_SCHEMA, choice, regex, schema
from tests.support.engines.clients import ask, collect, ids, ready, serving, text, until

pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")

FORCED = ToolChoice(mode="required", names=("weather",))
HI = (Message(role="user", content="Hi"),)
WORDS = regex("( [a-z]+){4}")


async def test_the_last_text_of_a_complete_answer_is_shown() -> None:
    """The engine ends it without an end token: the last token is text, counted as one."""
    async with serving() as client:
        events = await collect(await client.generate(ask(grammar=choice("yes", "no"), temperature=1.0)))
    done = events[-1]
    assert isinstance(done, Done)
    assert text(events) in ("yes", "no")
    assert (done.finish_reason, done.usage.completion_tokens) == ("stop", len(ids(events)))
    assert len(ids(events)) == len(text(events))


async def test_an_answer_that_is_cut_says_length() -> None:
    """max_tokens is no end of the grammar."""
    async with serving() as client:
        events = await collect(await client.generate(ask(grammar=regex("a{30}"), max_tokens=7)))
    done = events[-1]
    assert isinstance(done, Done)
    assert (text(events), done.finish_reason) == ("a" * 7, "length")


async def test_each_choice_matches() -> None:
    """Each has a matcher of its own."""
    async with serving() as client:
        events = await collect(await client.generate(ask(grammar=WORDS, n=3, temperature=1.0, max_tokens=60)))
    texts = [text(events, choice) for choice in range(3)]
    assert all(re.fullmatch("( [a-z]+){4}", one) for one in texts)
    assert len(set(texts)) > 1
    assert sum(isinstance(event, ChoiceDone) for event in events) == 3


@pytest.mark.parametrize("n", [1, 2])
async def test_a_readmitted_answer_is_the_same(n: int) -> None:
    """Cut anywhere, its last token and the ended choices included: the rest comes, and nothing twice."""
    request = ask(grammar=regex("a{2,5}b?"), n=n, temperature=1.0, max_tokens=30)
    async with serving() as client:
        whole = await collect(await client.generate(request))
        all_ids = [ids(whole, choice) for choice in range(n)]
        for cut in range(max(map(len, all_ids)) + 1):
            shown = tuple(one[:cut] for one in all_ids)
            rest = await collect(await client.generate(request, resume=Resume(output_token_ids=shown)))
            assert [shown[choice] + ids(rest, choice) for choice in range(n)] == all_ids
            assert isinstance(rest[-1], Done)
            assert rest[-1].finish_reason == whole[-1].finish_reason  # type: ignore[union-attr]


async def test_stop_strings_cut_a_grammar_as_any_answer() -> None:
    """The stop string is no part of the text; what is left begins a text that matches."""
    async with serving() as client:
        events = await collect(await client.generate(ask(grammar=regex("(abc){20}"), stop=("ca",), max_tokens=60)))
    done = events[-1]
    assert isinstance(done, Done)
    assert (text(events), done.finish_reason, done.stop_string) == ("ab", "stop", done.stop_string)


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        (regex("(a"), "invalid_grammar"),
        (schema({"not": {}}), "unsupported_grammar"),
        (schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "invalid_grammar"),
        (Grammar(kind="xml"), "invalid_grammar"),
    ],
    ids=str,
)
async def test_a_bad_grammar_reaches_no_engine(grammar: Grammar, code: str) -> None:
    """It is refused like any other wrong field: nothing was added, and the next request is served."""
    async with serving() as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate(ask(grammar=grammar))
        assert (caught.value.code, caught.value.param) == (code, "grammar")
        assert client.stats().steps == 0
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_a_slow_grammar_delays_no_other_request() -> None:
    """It is compiled in another process, and waited for apart from those that tokenise."""
    async with serving() as client:
        engine = client._thread.engine
        assert engine is not None
        engine.grammars.limits = GrammarLimits(compile_seconds=60.0)  # it takes seconds of CPU in any case
        slow = asyncio.create_task(client.generate(ask(grammar=schema(SLOW_SCHEMA))))
        others = [await collect(await client.generate(ask(f"Question {n}"))) for n in range(3)]
        assert not slow.done()
        assert all(isinstance(events[-1], Done) for events in others)
        await until(lambda: any(prover.pid for prover in engine.grammars._provers))
        await client.aclose()  # ends it: no process is left behind
        with pytest.raises(StreamserveError):
            await slow
        assert [prover.pid for prover in engine.grammars._provers] == [None, None]


async def test_a_warm_request_compiles_nothing() -> None:
    """It generates no text."""
    async with serving() as client:
        await client.warm(ask(grammar=schema(SLOW_SCHEMA)))


async def test_scripted_answers_obey_too() -> None:
    """The echo engine that repeats questions gives what the grammar allows."""
    client = await ready(echo_client(answers={}))
    try:
        events = await collect(await client.generate(ask("yes indeed", grammar=choice("yes", "no"))))
        other = await collect(
            await client.generate(ask("anything", grammar=Grammar(kind="json_object"), max_tokens=300))
        )
    finally:
        await client.aclose()
    assert text(events) == "yes"
    done = other[-1]
    assert isinstance(done, Done)
    if done.finish_reason == "stop":
        assert isinstance(json.loads(text(other)), dict)
    assert all(isinstance(event, Token | Done) or event for event in other)


async def test_strict_tools_are_a_grammar_of_the_whole_output() -> None:
    """A forced call comes in the model's markup, its arguments by the tool's schema, and the answer ends with it."""
    parameters = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
    tool = Tool(name="weather", parameters=parameters, strict=True)
    client = echo_client(format_name="hermes")
    try:
        await ready(client)
        for seed in range(8):
            how = {"max_tokens": 200, "seed": seed, "temperature": 1.0, "parallel_tool_calls": False}
            request = ask(prompt=None, messages=HI, tools=(tool,), tool_choice=FORCED, **how)
            events = await collect(await client.generate(request))
            done = events[-1]
            assert isinstance(done, Done)
            assert done.finish_reason == "tool_calls"
            [block] = [event for event in events if isinstance(event, BlockStart)]
            assert (block.kind, block.name) == ("tool_use", "weather")
            arguments = "".join(e.text for e in events if isinstance(e, Token) and e.index == block.index)
            assert json.loads(arguments)["unit"] in ("c", "f")
        wrong = ask(prompt=None, messages=HI, tools=(replace(tool, parameters={"not": {}}),), tool_choice=FORCED)
        with pytest.raises(BadRequest) as caught:
            await client.generate(wrong)
        assert (caught.value.code, caught.value.param) == ("unsupported_grammar", "tools[0]")
        with pytest.raises(BadRequest) as caught:
            await client.generate(ask(prompt=None, messages=HI, tools=(tool,), grammar=schema({"not": {}})))
        assert (caught.value.code, caught.value.param) == ("unsupported_grammar", "grammar")
    finally:
        await client.aclose()


async def calling(parameters: dict[str, object], **how: object) -> tuple[list[str], Done]:
    """Return the arguments of the calls in an answer that must call a tool that is not strict, and its end."""
    tool = Tool(name="weather", parameters=parameters)
    client = echo_client(format_name="hermes")
    try:
        await ready(client)
        how = {"max_tokens": 200, "temperature": 1.0, "parallel_tool_calls": False, **how}
        request = ask(prompt=None, messages=HI, tools=(tool,), tool_choice=FORCED, **how)
        events = await collect(await client.generate(request))
    finally:
        await client.aclose()
    blocks = [event.index for event in events if isinstance(event, BlockStart)]
    done = events[-1]
    assert isinstance(done, Done)
    texts = ["".join(e.text for e in events if isinstance(e, Token) and e.index == index) for index in blocks]
    return texts, done


@pytest.mark.parametrize("seed", range(4))
async def test_a_forced_call_matches_its_schema_though_not_strict(seed: int) -> None:
    """Its caller reads the arguments by the schema, as instructor does, which never says `strict`."""
    properties = {"unit": {"enum": ["c", "f"]}, "days": {"type": "integer", "maximum": 9}}
    texts, done = await calling({"properties": properties, "required": ["unit", "days"]}, seed=seed)
    assert done.finish_reason == "tool_calls"
    [arguments] = [json.loads(text) for text in texts]
    assert arguments["unit"] in ("c", "f")
    assert arguments["days"] <= 9


@pytest.mark.parametrize("parameters", [{"not": {}}, {"properties": {"a": {"type": "strange"}}}])
async def test_a_schema_that_cannot_be_enforced_does_not_refuse_a_call(parameters: dict[str, object]) -> None:
    """Without `strict` the arguments are then free: an object, or what max_tokens left of one."""
    texts, done = await calling(parameters)
    assert done.finish_reason in ("tool_calls", "length")
    assert texts[0].startswith("{")


async def test_the_tool_at_fault_is_named() -> None:
    """A strict tool with a schema that does not compile is named, with a grammar of the answer or without one."""
    good = Tool(name="weather", parameters={"properties": {"unit": {"enum": ["c"]}}}, strict=True)
    wrong = Tool(name="clock", parameters={"properties": {"a": {"type": "strange"}}}, strict=True)
    client = echo_client(format_name="hermes")
    try:
        await ready(client)
        for grammar in (None, Grammar(kind="json_object")):
            with pytest.raises(BadRequest, match="clock") as caught:
                await client.generate(ask(prompt=None, messages=HI, tools=(good, wrong), grammar=grammar))
            assert (caught.value.code, caught.value.param) == ("invalid_grammar", "tools[1]")
        with pytest.raises(BadRequest) as caught:
            await client.generate(ask(prompt=None, messages=HI, tools=(good,), grammar=schema({"type": "strange"})))
        assert caught.value.param == "grammar"
    finally:
        await client.aclose()


async def test_the_echo_engine_without_a_format_refuses_a_forced_call() -> None:
    """It would not call; the error names the way out."""
    async with serving() as client:
        tool = Tool(name="weather", parameters={})
        with pytest.raises(BadRequest, match="FORMAT") as caught:
            await client.generate(ask(prompt=None, messages=HI, tools=(tool,), tool_choice=FORCED))
        assert (caught.value.code, caught.value.param) == ("tools_unsupported", "tool_choice")


async def test_a_gbnf_grammar_holds_beside_calls_and_thoughts() -> None:
    """With a format it is a part of the whole output's grammar; what is wrong with it is said of it alone."""
    client = echo_client(format_name="hermes")
    await ready(client)
    try:
        tools = (Tool(name="weather"),)
        request = ask(
            messages=HI, prompt=None, tools=tools, grammar=Grammar(kind="gbnf", value='root ::= "yes" | "no"')
        )
        events = await collect(
            await client.generate(replace(request, sampling=replace(request.sampling, max_tokens=60)))
        )
        kinds = {event.index: event.kind for event in events if isinstance(event, BlockStart)}
        shown = "".join(e.text for e in events if isinstance(e, Token) and kinds.get(e.index, "text") == "text")
        assert shown.strip() in ("yes", "no") or "tool_use" in kinds.values()
        for wrong in ('root ::= "a" | b', "root ::= [z-a]"):
            with pytest.raises(BadRequest) as caught:
                await client.generate(replace(request, grammar=Grammar(kind="gbnf", value=wrong)))
            assert caught.value.code == "invalid_grammar"
            assert not {"tool_call", "think", "%lark", "start: "} & set(caught.value.message.split())
    finally:
        await client.aclose()
