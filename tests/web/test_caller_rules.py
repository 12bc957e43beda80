"""Who may use which model or pipeline: for anyone else it does not exist, on whatever way it is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission as DjangoPermission
from django.test import RequestFactory
from django.test.utils import override_settings

from streamserve import Run, acomplete, aenqueue_job, pipeline, run_pipeline
from streamserve.api.call import Caller as ApiCaller
from streamserve.clients.pipeline.client import PIPELINES, forget
from streamserve.conf import get_settings
from streamserve.models import ApiKey, Job
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import NotFound, RuleFailed
from streamserve.protocol.identity import Identity
from streamserve.protocol.requests import BATCH
from streamserve.web import site
from streamserve.web.auth import KNOWN_SECONDS
from streamserve.web.caller_rules import SiteRules
from streamserve.web.chat_page import widget_config
from tests.conftest import Caller, body_of, until_ready
from tests.support.sites.batch_runs import Tenant, jsonl, line, without_worker
from tests.web.conftest import communicator, make_caller

pytestmark = pytest.mark.django_db(transaction=True)

ASK = {"max_tokens": 3, "seed": 7, "ignore_eos": True}
CHAT = [{"role": "user", "content": "hello"}]
_ECHO = {"PATH": "echo", "ANSWERS": None}
SITE = {
    "TESTING": True,
    "ANONYMOUS": True,
    "MODELS": {
        "open": _ECHO,
        "members": {**_ECHO, "PERMISSION": "authenticated"},
        "staff": {**_ECHO, "PERMISSION": "staff"},
        "live": {**_ECHO, "PERMISSION": "streamserve.view_live"},
        "bobs": {**_ECHO, "PERMISSION": "tests.web.test_caller_rules.is_bob"},
    },
}
_OF_THE_DEMO = set(PIPELINES)  # which anyone may use
ruled: list[tuple[Any, Identity]] = []  # what the function was asked


def is_bob(user: Any, caller: Identity) -> bool:
    """The site's own rule, which may ask the database: it is not run on the event loop."""
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    ruled.append((user, caller))
    return user is not None and type(user).objects.get(pk=user.pk).username == "bob"


def fails(user: Any, caller: Identity) -> bool:
    raise ZeroDivisionError("a rule that fails")


async def review(run: Run) -> None:
    """Review an account, by a model that few may ask themselves."""
    await run.generate("hello", max_tokens=3, seed=7, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_ruled() -> None:
    ruled.clear()


@pytest.fixture
def pipelines() -> Iterator[None]:
    pipeline("review", model="staff", permission="authenticated")(review)
    pipeline("audit", permission="staff")(review)
    yield
    forget("review")
    forget("audit")


@pytest.fixture
async def ready(transactional_db: Any, pipelines: None) -> AsyncIterator[None]:
    with override_settings(STREAMSERVE=SITE):
        await until_ready()
        yield
        await site.reset()


async def seen_by(caller: Caller) -> set[str]:
    """Return what the caller's lists show, which must be the same in each."""
    models = {one["id"] for one in (await caller.get("/v1/models")).json()["data"]}
    theirs = await caller.get("/v1/models", **{"anthropic-version": "2023-06-01"})
    ready = {one["alias"] for one in (await caller.get("/readyz")).json()["models"]}
    named = {one["name"]: one["model"] for one in (await caller.get("/pipelines")).json()["pipelines"]}
    unknown = (await caller.post("/streams", {"prompt": "x", "model": "?"})).json()["error"]["message"]
    told = set(unknown.partition("It serves: ")[2].rstrip(".").split(", "))
    assert models == {one["id"] for one in theirs.json()["data"]} == ready == told
    assert {model for model in named.values() if model} <= models
    assert named.keys() <= models
    return models - _OF_THE_DEMO


async def test_each_caller_sees_what_it_may_use(
    ready: None, alice: Any, bob: Any, staff: Any, root: Any, lonely_key: str
) -> None:
    """In every list: models, pipelines, readiness, and the message of an unknown model."""
    given = await DjangoPermission.objects.aget(codename="view_live")
    await alice.user_permissions.aadd(given)
    visitor = {"open"}
    member = visitor | {"members", "review"}
    assert await seen_by(Caller()) == visitor
    assert await seen_by(Caller(key=lonely_key)) == member
    assert await seen_by(await make_caller(alice)) == member | {"live"}
    assert await seen_by(await make_caller(bob)) == member | {"bobs"}
    assert await seen_by(await make_caller(staff)) == member | {"staff", "audit"}
    assert await seen_by(await make_caller(root)) == member | {"staff", "audit", "live"}
    assert {(user and user.pk, caller.kind) for user, caller in ruled} == {
        *((user.pk, "user") for user in (alice, bob, staff, root)),
        (None, "key"),
        (None, "anonymous"),
    }


async def test_a_key_has_its_users_models_and_its_list_narrows_them(ready: None, staff: Any, alice: Any) -> None:
    """What the list names beyond that stays hidden."""
    key = (await sync_to_async(ApiKey.objects.make)(user=staff))[1]
    assert await seen_by(Caller(key=key)) == {"open", "members", "staff", "review", "audit"}
    narrow = (await sync_to_async(ApiKey.objects.make)(user=staff, allowed_models=["staff", "review"]))[1]
    assert await seen_by(Caller(key=narrow)) == {"staff", "review"}
    beyond = (await sync_to_async(ApiKey.objects.make)(user=alice, allowed_models=["staff", "open"]))[1]
    assert await seen_by(Caller(key=beyond)) == {"open"}


WAYS: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("/streams", {"prompt": "hi", **ASK}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "stream": True}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 3}),
    ("/v1/completions/stream", {"prompt": "hi", "max_tokens": 3}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": CHAT}),
    ("/pipelines/{}", {"messages": CHAT}),
    ("/pipelines/{}", {"messages": CHAT, "stream": True}),
    ("/jobs", {"messages": CHAT, "pipeline": "{}"}),
    ("/v1/models/{}", None),
)


async def test_a_hidden_model_is_refused_as_an_unknown_model(ready: None, alice: Any) -> None:
    """The same status and the same words, in every dialect; nothing is begun."""
    caller = await make_caller(alice)
    for path, body in WAYS:
        unknown = await refusal(caller, path, body, "nemo")
        for hidden in ("staff", "audit"):
            assert await refusal(caller, path, body, hidden) == unknown, path
        assert unknown[0] == 404
    assert await StreamRow.objects.acount() == 0


async def refusal(caller: Caller, path: str, body: dict[str, Any] | None, name: str) -> tuple[int, str]:
    """Return the status, and the body without the name and the request's id."""
    if body is None:
        response = await caller.get(path.format(name))
    else:
        named = {"pipeline": name} if "pipeline" in body else {} if "{}" in path else {"model": name}
        response = await caller.post(path.format(name), {**body, **named})
    told = response.json()
    told.pop("request_id", None)
    return response.status_code, json.dumps(told).replace(f"'{name}'", "NAME")


async def test_a_socket_is_refused_the_same(ready: None, alice_key: str) -> None:
    """A start of a hidden model, and of an unknown model."""
    socket = communicator([(b"authorization", f"Bearer {alice_key}".encode())])
    assert (await socket.connect())[0]
    told = [await _start(socket, model) for model in ("staff", "nemo")]
    assert told[0]["error"]["code"] == "model_not_found"
    assert json.dumps(told[0]) == json.dumps(told[1]).replace("nemo", "staff")
    await socket.disconnect()


async def _start(socket: WebsocketCommunicator, model: str) -> dict[str, Any]:
    await socket.send_json_to({"type": "start", "request": {"prompt": "hi", "model": model}})
    return dict(json.loads(await socket.receive_from(timeout=30)))


async def test_python_calls_ask_for_their_user(ready: None, alice: Any, staff: Any) -> None:
    """Code of the site that asks in its own name may use every model."""
    for user, model in ((alice, "staff"), (alice, "audit"), (alice, "bobs")):
        with pytest.raises(NotFound) as caught:
            await acomplete("hi", user=user, model=model, **ASK)
        assert caught.value.code == "model_not_found"
    with pytest.raises(NotFound):
        await run_pipeline("audit", "hi", user=alice)
    with pytest.raises(NotFound):
        await aenqueue_job("audit", "hi", user=alice)
    assert (await acomplete("hi", user=staff, model="staff", **ASK)).text
    assert (await acomplete("hi", tenant="newsletter", model="bobs", **ASK)).text
    assert (await acomplete("hi", model="staff", **ASK)).text
    assert str(await run_pipeline("review", "hi", user=alice))


async def test_a_pipeline_asks_the_models_that_it_needs(ready: None, alice: Any) -> None:
    """Its caller may use the pipeline, and not its model; the list does not name the model either."""
    caller = await make_caller(alice)
    run = await caller.post("/pipelines/review", {"messages": CHAT})
    assert (run.status_code, run.json()["usage"]["completion_tokens"]) == (200, 3)
    [listed] = (await caller.get("/pipelines")).json()["pipelines"]
    assert (listed["name"], listed["model"]) == ("review", None)


async def test_who_names_no_model_gets_one_that_it_may_use(transactional_db: Any, alice: Any, staff: Any) -> None:
    """The site's default, else the first; its name is told only to callers who may use it."""
    models = {"big": {**_ECHO, "PERMISSION": "staff"}, "small": _ECHO}
    with override_settings(STREAMSERVE={"TESTING": True, "MODELS": models}):
        await until_ready()
        for user, model in ((staff, "big"), (alice, "small")):
            response = await (await make_caller(user)).post("/streams", {"prompt": "hi", **ASK})
            assert f'"model":"{model}"' in (await body_of(response)).decode()
        await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "MODELS": {"big": models["big"]}}):
        await until_ready()
        refused = await (await make_caller(alice)).post("/streams", {"prompt": "hi", **ASK})
        assert refused.status_code == 404
        assert "big" not in refused.content.decode()
        await site.reset()


async def test_an_answer_is_read_by_who_may_use_its_model(ready: None, staff: Any) -> None:
    """A key of the same user without the model finds neither the stream, nor its job's events."""
    caller = await make_caller(staff)
    response = await caller.post("/streams", {"prompt": "hi", "model": "staff", **ASK})
    await body_of(response)
    stream = f"/streams/{response['X-Stream-Id']}"
    key = (await sync_to_async(ApiKey.objects.make)(user=staff, allowed_models=["open"]))[1]
    for path in (stream, f"{stream}/events"):
        assert (await caller.get(path)).status_code == 200
        found = await Caller(key=key).get(path)
        unknown = await Caller(key=key).get(path.replace(response["X-Stream-Id"], "0" * 32))
        assert (found.status_code, found.json()["error"]["message"]) == (404, unknown.json()["error"]["message"])
    assert (await Caller(key=key).post(f"{stream}/stop", {})).status_code == 404


async def test_a_job_asks_again_when_it_runs(ready: None, staff: Any) -> None:
    """Its owner has lost the permission meanwhile: it fails as unknown, and is not tried again."""
    await without_worker()
    caller = await make_caller(staff)
    job_id = (await caller.post("/jobs", {"pipeline": "audit", "messages": CHAT})).json()["job_id"]
    staff.is_staff = False
    await staff.asave()
    worker = site.get_site().work.new_worker()
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        while (job := await Job.objects.aget(pk=job_id)).state in ("queued", "running"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    worker.stop()
    await running
    assert (job.state, job.error_code, job.attempts) == ("failed", "pipeline_not_found", 1)
    assert "audit" in job.error_message
    assert (await StreamRow.objects.aget(pk=job.stream_id)).completion_tokens == 0


async def test_a_row_of_a_batch_is_refused_as_a_request_is(ready: None, alice_key: str) -> None:
    """The other rows are answered; a batch for a hidden pipeline's address is refused as a whole."""
    tenant = Tenant(alice_key)
    rows = [line("good"), line("hidden"), line("unknown")]
    for row, model in zip(rows, ("members", "staff", "nemo"), strict=True):
        row["body"]["model"] = model
    batch = await tenant.run(jsonl(rows))
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    told = [one["response"] for one in await tenant.lines(batch["error_file_id"])]
    assert [one["status_code"] for one in told] == [404, 404]
    assert [one["body"]["error"]["code"] for one in told] == ["model_not_found"] * 2
    file_id = await tenant.file(jsonl([line("a", "/pipelines/audit", messages=CHAT)]))
    asked = {"input_file_id": file_id, "endpoint": "/pipelines/audit", "completion_window": "24h"}
    refused = await tenant.post("/v1/batches", asked)
    assert refused.status_code == 400
    assert "/pipelines/audit'" in refused.json()["error"]["message"]
    assert "/pipelines/audit," not in refused.json()["error"]["message"]


async def test_a_change_in_this_process_counts_at_once(ready: None, alice: Any) -> None:
    """Of the user, of the user's permissions, and of a key."""
    caller = await make_caller(alice)
    assert "staff" not in await seen_by(caller)
    alice.is_staff = True
    await alice.asave()
    assert "staff" in await seen_by(caller)
    assert "live" not in await seen_by(caller)
    await alice.user_permissions.aadd(await DjangoPermission.objects.aget(codename="view_live"))
    assert "live" in await seen_by(caller)
    row, key = await sync_to_async(ApiKey.objects.make)(user=alice)
    assert "members" in await seen_by(Caller(key=key))
    row.allowed_models = ["open"]
    await row.asave()
    assert await seen_by(Caller(key=key)) == {"open"}


def test_a_page_offers_what_its_visitor_may_use(transactional_db: Any, bob: Any, staff: Any) -> None:
    """Of the models that it names, or of all; where none is left, it asks for another login."""
    given = {"open": "Open", "staff": "Experts", "bobs": "Bob's"}

    def shown(user: Any, **options: Any) -> dict[str, Any]:
        return widget_config(RequestFactory().get("/"), user, **options)

    with override_settings(STREAMSERVE=SITE):
        assert shown(None)["models"] == {"open": "open"}
        assert shown(staff, models=given)["models"] == {"open": "Open", "staff": "Experts"}
        page = shown(bob, models="staff|bobs")
        assert (page["models"], page["default_model"], page["needs_sign_in"]) == ({"bobs": "bobs"}, "bobs", False)
        page = shown(None, model="staff")
        assert (page["models"], page["default_model"], page["needs_sign_in"]) == ({}, "", True)


async def test_a_change_elsewhere_counts_after_some_seconds(transactional_db: Any, alice: Any) -> None:
    """What was decided is known for as long as a key is: another process tells nothing of its changes."""
    now = [1000.0]
    caller = ApiCaller(f"user:{alice.pk}")
    with override_settings(STREAMSERVE=SITE):
        rules = SiteRules(get_settings(), clock=lambda: now[0])
        hidden = await rules.hidden_from(caller)
        assert hidden == {"staff", "live", "bobs"}
        await get_user_model().objects.filter(pk=alice.pk).aupdate(is_staff=True)  # no signal is sent
        now[0] += KNOWN_SECONDS - 1
        assert await rules.hidden_from(caller) == hidden
        now[0] += 1
        assert await rules.hidden_from(caller) == hidden - {"staff"}
        assert len(ruled) == 2


async def test_a_rule_that_fails_serves_nothing(transactional_db: Any, alice: Any, caplog: Any) -> None:
    """503 where it is asked, the cause in the log alone; a probe has its answer, without the models."""
    models = {"open": _ECHO, "ruled": {**_ECHO, "PERMISSION": "tests.web.test_caller_rules.fails"}}
    with override_settings(STREAMSERVE={"TESTING": True, "MODELS": models}):
        await until_ready()
        caller = await make_caller(alice)
        refused = await caller.post("/streams", {"prompt": "hi", "model": "open"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "rule_failed")
        assert "ruled" not in refused.content.decode()
        assert refused["Retry-After"]
        assert (await caller.get("/v1/models")).status_code == 503
        assert (await caller.get("/readyz")).json()["models"] == []
        with pytest.raises(RuleFailed):
            await acomplete("hi", user=alice)
        await site.reset()
    assert "ZeroDivisionError" in caplog.text


def team(user: Any, key: ApiKey | None) -> str:
    """Alice and bob are one team; the key `broken` cannot be placed."""
    if key is not None and key.name == "broken":
        raise ZeroDivisionError("no team")
    return "shop" if user is not None and user.username in ("alice", "bob") else ""


TEAMS = {
    "TESTING": True,
    "MODELS": {"echo": _ECHO},
    "TENANT": "tests.web.test_caller_rules.team",
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 2, "MAX_QUEUED_PER_PRINCIPAL": 0},
    "ECHO_STEP_SECONDS": 0.005,
}
LONG = {"prompt": "word " * 100, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
async def teams(transactional_db: Any) -> AsyncIterator[None]:
    with override_settings(STREAMSERVE=TEAMS):
        await until_ready()
        yield
        await site.reset()


async def _cached(caller: Caller) -> int:
    response = await caller.post("/streams", {"prompt": "word " * 100, **ASK})
    done = (await body_of(response)).decode().rpartition("data: ")[2]
    return int(json.loads(done)["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_team_shares_its_prefix_cache(teams: None, alice: Any, bob: Any, staff: Any, alice_key: str) -> None:
    """And nobody else reads it; what its members make stays their own."""
    assert await _cached(await make_caller(alice)) == 0
    assert await _cached(await make_caller(staff)) == 0
    assert await _cached(await make_caller(bob)) > 0
    assert await _cached(Caller(key=alice_key)) > 0
    [mine, *_] = [row async for row in StreamRow.objects.filter(owner=f"user:{alice.pk}")]
    assert (mine.tenant, mine.counted_as) == (f"user:{alice.pk}", "team:shop")
    assert (await (await make_caller(bob)).get(f"/streams/{mine.pk}")).status_code == 404


async def test_a_team_has_one_callers_limits(teams: None, alice: Any, bob: Any, staff: Any) -> None:
    """Two answers of alice's take bob's places too, and not those of anybody else."""
    running = [await (await make_caller(alice)).post("/streams", LONG) for _ in range(2)]
    assert [one.status_code for one in running] == [200, 200]
    refused = await (await make_caller(bob)).post("/streams", LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
    assert (await (await make_caller(staff)).post("/streams", {"prompt": "hi", **ASK})).status_code == 200


async def test_a_caller_without_a_known_team_is_refused(teams: None, alice: Any, caplog: Any) -> None:
    """Rather than served under a wrong team; the log has the cause, and other callers are served."""
    key = (await sync_to_async(ApiKey.objects.make)(name="broken"))[1]
    refused = await Caller(key=key).post("/streams", {"prompt": "hi", **ASK})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "rule_failed")
    assert "tenant_failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert await StreamRow.objects.acount() == 0
    assert (await (await make_caller(alice)).post("/streams", {"prompt": "hi", **ASK})).status_code == 200


async def test_a_row_of_a_batch_is_its_teams(teams: None, alice_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a request is: the worker asks for the team of the batch's owner."""
    seen, client = [], site.get_site().clients["echo"]
    generate = client.generate

    async def watched(request: Any, admission: Any, *rest: Any) -> Any:
        seen.append((request.latency_class, admission.counted_as))
        return await generate(request, admission, *rest)

    monkeypatch.setattr(client, "generate", watched)
    await Tenant(alice_key).run(jsonl([line("a")]))
    assert seen == [(BATCH, "team:shop")]
