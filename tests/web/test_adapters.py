"""Adapters as callers see them: models of their own, with rules of their own, whose engine is their model's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test.utils import override_settings

from streamserve import acomplete
from streamserve.clients.adapter import AdapterClient
from streamserve.clients.pipeline.filters import Blocklist
from streamserve.conf import get_problems, get_settings
from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, until_ready

pytestmark = pytest.mark.django_db(transaction=True)

ADAPTERS: dict[str, Any] = {
    "legal": "/srv/adapters/legal",
    "house-style": {
        "PATH": "/srv/adapters/style",
        "TITLE": "In our words",
        "SYSTEM": "Be brief.",
        "PERMISSION": "staff",
    },
}
MODELS = {
    "base": {"PATH": "echo", "ANSWERS": None, "SYSTEM": "You help.", "LATENCY_CLASS": "document", "ADAPTERS": ADAPTERS},
    "other": {"PATH": "echo", "ANSWERS": None},
}
ASK = {"max_tokens": 6, "seed": 7, "ignore_eos": True, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(autouse=True)
async def adapted(transactional_db: Any) -> AsyncIterator[None]:
    """A site with a model, its two adapters, and another model."""
    with override_settings(STREAMSERVE={"TESTING": True, "ANONYMOUS": True, "MODELS": MODELS}):
        await site.reset()
        await until_ready()
        yield
        await site.reset()


async def complete(model: str, caller: Caller | None = None, **fields: Any) -> Any:
    return await (caller or Caller()).post("/v1/chat/completions", {**ASK, "model": model, **fields})


def text_of(response: Any) -> str:
    assert response.status_code == 200, response.content
    body = response.json()
    return f"{body['model']}: {body['choices'][0]['message']['content']}"


async def test_an_adapter_is_chosen_by_its_name() -> None:
    """It answers in its own words under its own name, also in Python; its stream's row is its own."""
    own, base, other = [text_of(await complete(model)) for model in ("legal", "base", "other")]
    assert own.startswith("legal: ")
    assert len({one.partition(": ")[2] for one in (own, base, other)}) == 3
    assert text_of(await complete("legal")) == own
    found = await acomplete(model="legal", **ASK)
    assert f"legal: {found.text}" == own
    assert {one.model async for one in StreamRow.objects.all()} >= {"legal", "base"}


@pytest.fixture
def boss(staff: Any) -> Caller:
    return Caller(user=staff)


async def test_it_is_listed_with_its_model(boss: Caller) -> None:
    """The list names the parent, as other servers do; a rule of its own hides it, and the model's is its default."""
    listed = {one["id"]: one.get("parent") for one in (await Caller().get("/v1/models")).json()["data"]}
    assert {name: listed.get(name) for name in ("base", "legal", "other")} == {
        "base": None,
        "legal": "base",
        "other": None,
    }
    assert "house-style" not in listed
    assert (await complete("house-style")).status_code == 404
    seen = (await boss.get("/v1/models")).json()["data"]
    assert {one["id"] for one in seen} >= {"base", "legal", "house-style"}
    assert text_of(await complete("house-style", boss)).startswith("house-style: ")


async def test_it_has_what_its_model_has_but_for_what_it_says_itself() -> None:
    """System prompt and class; title and system prompt of its own."""
    models = get_settings().models
    assert (models["legal"].system, models["legal"].default_class, models["legal"].title) == (
        "You help.",
        "document",
        "",
    )
    assert (models["house-style"].system, models["house-style"].title) == ("Be brief.", "In our words")
    assert set(get_settings().engines) == {"base", "other"}
    assert dict(models["base"].model.adapters) == {"legal": "/srv/adapters/legal", "house-style": "/srv/adapters/style"}


async def test_there_is_one_engine_for_all() -> None:
    """The live page has the models alone, and no figure is counted twice; an operator's action is for all of them."""
    own = site.get_site()
    assert isinstance(own.clients["legal"], AdapterClient)
    assert set((await own.live.snapshot()).models) == {"base", "other"}
    await complete("legal")
    assert own.clients["base"].stats().steps > own.clients["other"].stats().steps
    assert own.clients["legal"].stats().steps == 0
    await own.services.ops.control("base", "pause")
    assert (await complete("legal")).status_code == 503
    assert (await complete("other")).status_code == 200
    await own.services.ops.control("legal", "resume")
    assert (await complete("base")).status_code == 200


async def test_the_same_question_of_another_adapter_is_not_cached() -> None:
    """What one computes of a prompt is no other's."""
    long = {"messages": [{"role": "user", "content": "word " * 200}]}
    caller, cached = Caller(), []
    for model in ("base", "legal", "base", "legal"):
        usage = (await complete(model, caller, **long)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, True, True]


async def test_texts_are_tokenized_for_it() -> None:
    response = await Caller().post("/tokenize", {"model": "legal", "prompt": "hello"})
    assert (
        response.json()["tokens"]
        == (await Caller().post("/tokenize", {"model": "base", "prompt": "hello"})).json()["tokens"]
    )


def no_bluebird() -> Blocklist:
    return Blocklist(["bluebird"])


async def test_the_filters_of_its_model_are_its_own_too() -> None:
    """An answer of the adapter is filtered like one of its model, and token ids are refused for both."""
    filtered = {**MODELS["base"], "ANSWERS": {"": "A bluebird sings."}, "FILTERS": [f"{__name__}.no_bluebird"]}
    with override_settings(
        STREAMSERVE={"ANONYMOUS": True, "CLIENT": "thread", "LOG": "memory", "MODELS": {"base": filtered}}
    ):
        await site.reset()
        await until_ready()
        for model in ("base", "legal"):
            assert "bluebird" not in text_of(await complete(model, ignore_eos=False, max_tokens=40))
            asked = {"model": model, "prompt": "hello", "max_tokens": 3, "return_token_ids": True}
            refused = await Caller().post("/v1/completions", asked)
            assert refused.status_code == 400, model
            assert refused.json()["error"]["code"] == "unsupported_parameter"


async def test_no_body_names_an_adapter_beside_the_model() -> None:
    """The field is the server's own."""
    response = await Caller().post("/streams", {**ASK, "model": "base", "adapter": "legal"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "adapter"


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ({"other": "/srv/a"}, "has the name of another model"),
        ({"base": "/srv/a"}, "has the name of another model"),
        ({"": "/srv/a"}, "needs a PATH"),
        ({"a": {}}, "needs a PATH"),
        ({"a": {"PATH": "/srv/a", "SCALE": 2}}, "SCALE"),
        ({"a": {"PATH": "/srv/a", "TITLE": 3}}, "TITLE"),
        ({"a": {"PATH": "/srv/a", "PERMISSION": "no"}}, "PERMISSION"),
        ("/srv/a", "ADAPTERS"),
    ],
)
def test_settings_that_cannot_be_are_named(adapters: Any, words: str) -> None:
    models = {"base": {"PATH": "echo", "ADAPTERS": adapters}, "other": {"PATH": "echo"}}
    with override_settings(STREAMSERVE={"MODELS": models}):
        assert any(words in f"{problem.message} {problem.hint}" for problem in get_problems()), get_problems()


def test_two_models_cannot_have_an_adapter_of_one_name() -> None:
    models = {name: {"PATH": "echo", "ADAPTERS": {"legal": "/srv/a"}} for name in ("base", "other")}
    with override_settings(STREAMSERVE={"MODELS": models}):
        assert any("has the name of another model" in problem.message for problem in get_problems())


def test_commands_know_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of models has them; an engine is its model's, and so is its memory."""
    call_command("streamserve_models", "--json")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["legal"]["support"] == "adapter of base"
    with pytest.raises(CommandError, match="adapter of the model 'base'"):
        call_command("streamserve_capacity", "legal")
    process = {"CLIENT": "process", "MODELS": MODELS}
    with override_settings(STREAMSERVE=process), pytest.raises(CommandError, match="adapter of the model 'base'"):
        call_command("streamserve_engine", "legal", "--status")
