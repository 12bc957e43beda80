"""Fields that users of vLLM, llama-server and the SDKs send, on every route that has them; cuts at every frame."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import Run, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.clients.pipeline.filters import Redaction
from streamserve.engine.echo import EchoTokenizer
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.message_checks import check_message
from tests.support.checks.stream_checks import Frame, parse_sse

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("shared")]

HI = [{"role": "user", "content": "The quiet river"}]
TOKENIZER = EchoTokenizer()
THOUGHT = "<think>\nHm, let me see.\n</think>\n\nHello!"
SHARED = {"MODELS": {"echo": {"PATH": "echo"}, "thinker": {"PATH": "echo", "FORMAT": "qwen3"}}}  # one has thoughts


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": HI, "max_tokens": 24, "seed": 7, "ignore_eos": True, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "The quiet river", "max_tokens": 24, "seed": 7, "ignore_eos": True, **fields}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": HI, "max_tokens": 24, "seed": 7, **fields}


ROUTES = {"/v1/chat/completions": chat, "/v1/completions": completion, "/streams": completion}
OTHERS = {**ROUTES, "/v1/completions/stream": completion, "/v1/messages": message}


def text_in(path: str, response: dict[str, Any]) -> str:
    choice = response["choices"][0]
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])


@pytest.mark.parametrize("path", OTHERS)
async def test_a_maximum_is_lowered_on_every_route(caller: Caller, path: str) -> None:
    """An agent's 32,000, or all there are, is no error; a prompt that does not fit is one everywhere."""
    for most in (32_000, 2**53):
        body = OTHERS[path](max_tokens=most, stop="")
        if path == "/v1/messages":
            body["stop_sequences"] = [body.pop("stop")]
        else:
            body["ignore_eos"] = False
        response = await caller.post(path, body)
        assert response.status_code == 200, response.content
        if not response.streaming:
            continue
        assert b"error" not in await body_of(response)
    long = OTHERS[path]()
    words = "x " * 100_000
    long |= {"prompt": words} if "prompt" in long else {"messages": [{"role": "user", "content": words}]}
    refused = await caller.post(path, long)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_more_stop_strings_and_choices(caller: Caller) -> None:
    """Sixteen of either; one more is a 400 with its name."""
    stop = [f"never {number}" for number in range(15)]
    whole = (await caller.post("/v1/chat/completions", chat())).json()
    text = text_in("chat", whole)
    cut = (await caller.post("/v1/chat/completions", chat(stop=[*stop, text[5:8]]))).json()
    assert text_in("chat", cut) == text[: text.index(text[5:8])]
    several = (await caller.post("/v1/completions", completion(n=16, max_tokens=2))).json()
    assert [choice["index"] for choice in several["choices"]] == list(range(16))
    assert several["usage"]["completion_tokens"] == 32
    for fields, param in (({"stop": [*stop, "a", "b"]}, "stop"), ({"n": 17}, "n")):
        refused = await caller.post("/v1/chat/completions", chat(**fields))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_ids_of_tokens(caller: Caller, path: str) -> None:
    """`return_token_ids`: the prompt's and the answer's, whole and streamed; they are those of the text."""
    body = ROUTES[path](return_token_ids=True, logprobs=None)
    whole = (await caller.post(path, body)).json()
    [choice] = whole["choices"]
    prompt_ids = choice["prompt_token_ids"] if path == "/v1/completions" else whole["prompt_token_ids"]
    assert len(prompt_ids) == whole["usage"]["prompt_tokens"]
    assert TOKENIZER.decode(prompt_ids) == "The quiet river"
    assert len(choice["token_ids"]) == 24
    assert TOKENIZER.decode(choice["token_ids"]).strip("\ufffd ") == text_in(path, whole).strip()
    streamed = parse_sse(await body_of(await caller.post(path, {**body, "stream": True})))
    chunks = [json.loads(one.data) for one in streamed[:-1]]
    assert [number for one in chunks for number in one["choices"][0]["token_ids"]] == choice["token_ids"]
    shown = [one.get("prompt_token_ids") or one["choices"][0].get("prompt_token_ids") for one in chunks]
    assert [one for one in shown if one] == [prompt_ids]
    assert "token_ids" not in (await caller.post(path, ROUTES[path]())).json()["choices"][0]


async def test_ids_of_the_sites_own_prompt_are_not_shown(caller: Caller) -> None:
    """Where the site puts a system prompt before the messages, `return_token_ids` is a 400; before others not."""
    await site.reset()
    conf = {"MODELS": {"echo": {"PATH": "echo", "SYSTEM": "A secret."}}, "CLIENT": "thread"}
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        refused = await caller.post("/v1/chat/completions", chat(return_token_ids=True))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_ids")
        await until(lambda: all(stream.ended.is_set() for stream in site.get_site().streams.all()))
        own = [{"role": "system", "content": "Mine."}, *HI]
        shown = (await caller.post("/v1/chat/completions", chat(messages=own, return_token_ids=True))).json()
        assert TOKENIZER.decode(shown["prompt_token_ids"]) == "Mine.The quiet river"
        assert (await caller.post("/v1/completions", completion(return_token_ids=True))).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
async def test_the_end_of_a_prompt_is_kept(caller: Caller, path: str) -> None:
    """`truncate_prompt_tokens` on every route that has sampling fields."""
    body = ROUTES[path](truncate_prompt_tokens=5)
    response = await caller.post(path, body)
    if path == "/streams":
        *_, done = parse_sse(await body_of(response))
        usage = done.json["usage"]
    else:
        usage = response.json()["usage"]
    assert usage["prompt_tokens"] == 5
    refused = await caller.post(path, {**body, "truncate_prompt_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_counts_in_every_chunk(caller: Caller, path: str) -> None:
    """`continuous_usage_stats`: the prompt's tokens in the first chunk, the answer's so far in each."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await caller.post(path, ROUTES[path](stream=True, stream_options=options))
    *chunks, last = [json.loads(one.data)["usage"] for one in parse_sse(await body_of(response))[:-1]]
    counts = [one["completion_tokens"] for one in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], last["completion_tokens"]) == (24, 24)
    assert {one["prompt_tokens"] for one in (*chunks, last)} == {last["prompt_tokens"]}


async def test_a_kept_stop_string(caller: Caller) -> None:
    """vLLM's name for it, on its routes and on the plain stream."""
    text = text_in("chat", (await caller.post("/v1/chat/completions", chat())).json())
    stop = text[5:8]
    kept = text[: text.index(stop) + len(stop)]
    for fields in ({"include_stop_str_in_output": True}, {"include_stop": True}):
        assert text_in("chat", (await caller.post("/v1/chat/completions", chat(stop=stop, **fields))).json()) == kept
    for path in ("/v1/completions", "/v1/completions/stream"):
        response = await caller.post(path, completion(stop="e", include_stop_str_in_output=True))
        shown = await body_of(response) if response.streaming else response.content
        assert b"error" not in shown


async def test_a_grammar_of_llama_server(caller: Caller) -> None:
    """A GBNF text in `grammar`, and a schema beside the type."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install streamserve[grammar]")
    for path in ("/v1/chat/completions", "/v1/completions"):
        asked = ROUTES[path](grammar='root ::= "yes" | "no"', ignore_eos=False)
        assert text_in(path, (await caller.post(path, asked)).json()) in ("yes", "no")
        wrong = await caller.post(path, {**asked, "grammar": 'root ::= "yes" | other'})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "grammar")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    asked = chat(response_format={"type": "json_object", "schema": schema}, ignore_eos=False)
    assert json.loads(text_in("chat", (await caller.post("/v1/chat/completions", asked)).json())) == {"a": 1}


async def test_unknown_fields_are_still_named(caller: Caller) -> None:
    """At the top of a body a slip of the pen is a 400 that names the nearest field."""
    refused = await caller.post("/v1/chat/completions", chat(skip_special_token=True))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_field")
    assert "skip_special_tokens" in refused.json()["error"]["message"]
    spaced = await caller.post("/v1/completions", completion(cache_prompt=True, spaces_between_special_tokens=False))
    assert (spaced.status_code, spaced.json()["error"]["code"]) == (400, "unsupported_parameter")


SHAPES: dict[str, tuple[str, Any, dict[str, str]]] = {
    "chat": ("/v1/chat/completions", chat, {}),
    "counted": (
        "/v1/chat/completions",
        lambda **fields: chat(n=2, stream_options={"include_usage": True}, **fields),
        {"include_usage": "true"},
    ),
    "completions": ("/v1/completions", completion, {"format": "completions"}),
    "messages": ("/v1/messages", message, {"format": "anthropic"}),
}


def said(frames: list[Frame]) -> list[Any]:
    """Return what frames say, in order by choice, with neighbouring pieces of one text joined."""
    out: list[Any] = []
    for one in frames:
        data: Any = one.data if one.data == "[DONE]" else json.loads(one.data)
        text, where = None, data
        if isinstance(data, dict) and data.get("type") == "content_block_delta":
            text, where = data["delta"].pop("text"), {"index": data["index"]}
        elif isinstance(data, dict) and data.get("choices") and data["choices"][0]["finish_reason"] is None:
            choice = data["choices"][0]
            if "text" in choice:
                text, where = choice["text"], {"choice": choice["index"]}
            elif choice["delta"].get("content") and "role" not in choice["delta"]:
                text, where = choice["delta"]["content"], {"choice": choice["index"]}
        known = next((place for place, (at, _) in enumerate(out) if text is not None and at == where), None)
        if known is None:
            out.append((where, text))
        else:
            out[known] = where, out[known][1] + text
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_an_answer_is_resumed_after_any_frame(caller: Caller, shape: str, elsewhere: bool) -> None:
    """Each frame has an id; cut after any, here and in another process: what follows repeats and loses nothing."""
    path, ask, query = SHAPES[shape]
    response = await caller.post(path, ask(stream=True), **{"Idempotency-Key": "a-key"})
    whole = parse_sse(await body_of(response))
    assert all(frame.id for frame in whole)
    assert len({frame.id for frame in whole}) == len(whole)
    if elsewhere:
        await site.reset()
        await until_ready()
    address = f"/v1/streams/{response['X-Stream-Id']}/events?" + "&".join(f"{one}={two}" for one, two in query.items())
    for place, frame in enumerate(whole[:-1]):
        rest = parse_sse(await body_of(await caller.get(address, **{"last-event-id": frame.id})))
        assert said([*whole[: place + 1], *rest]) == said(whole)
    assert (await caller.get(address, **{"last-event-id": whole[-1].id})).status_code == 204


async def test_thoughts_are_left_out_where_they_are_not_wanted(caller: Caller) -> None:
    """`include_reasoning` false, and `display: omitted`: whole, streamed, and resumed by the option's name."""
    messages = [{"role": "user", "content": THOUGHT}]
    ask = {"model": "thinker", "messages": messages, "max_tokens": 200, "seed": 7}
    plain = (await caller.post("/v1/chat/completions", ask)).json()["choices"][0]["message"]
    assert plain["reasoning"] == plain["reasoning_content"]
    bare = (await caller.post("/v1/chat/completions", {**ask, "include_reasoning": False})).json()
    assert bare["choices"][0]["message"] == {"role": "assistant", "content": plain["content"], "refusal": None}
    response = await caller.post(
        "/v1/messages", {**ask, "stream": True, "thinking": {"type": "adaptive", "display": "omitted"}}
    )
    shown = check_message(await body_of(response))
    assert [block["thinking"] for block in shown["content"] if block["type"] == "thinking"] == [""]
    assert [block["text"] for block in shown["content"] if block["type"] == "text"] == [plain["content"]]


def no_mail() -> Redaction:
    return Redaction(r"[a-z]+@[a-z.]+")


async def test_models_without_ids_refuse_them(caller: Caller) -> None:
    """A pipeline and a model with filters: `return_token_ids` is a 400 with its name, and nothing goes on."""

    @pipeline
    async def shout(run: Run) -> None:
        await run.say("HI")

    try:
        await site.reset()
        conf = {"MODELS": {"echo": {"PATH": "echo", "FILTERS": [f"{__name__}.no_mail"]}}, "CLIENT": "thread"}
        with override_settings(STREAMSERVE=conf):
            await until_ready()
            for model in ("shout", "echo"):
                refused = await caller.post("/v1/chat/completions", chat(model=model, return_token_ids=True))
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["param"]) == (
                    400, "unsupported_parameter", "return_token_ids"
                )  # fmt: skip
            await until(lambda: all(stream.ended.is_set() for stream in site.get_site().streams.all()))
    finally:
        forget("shout")
