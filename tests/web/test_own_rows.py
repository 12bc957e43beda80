"""A pipeline answers from its caller's own rows: nothing of another user's reaches a prompt, or is found in a cache."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.admin.models import CHANGE, LogEntry
from django.test.utils import override_settings

from streamserve import Run, pipeline, run_pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.engine.echo import EchoTokenizer
from streamserve.models import ApiKey
from streamserve.protocol.identity import Identity
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.sites.batch_runs import Tenant, jsonl, line
from tests.support.streams.hand_made import Gate
from tests.web.conftest import make_caller

pytestmark = pytest.mark.django_db(transaction=True)

ASKED = {"messages": [{"role": "user", "content": "What is open?"}], "seed": 7}
callers: list[tuple[Identity, Any]] = []  # who each run was told that asks


def rows_of(user: Any) -> str:
    """Return what stands for a user's invoices: Django's own log entries."""
    return "; ".join(LogEntry.objects.filter(user=user).values_list("object_repr", flat=True))


async def invoices(run: Run) -> None:
    """Answer from the caller's invoices."""
    user = await run.auser()
    callers.append((run.caller, user))
    found = await run.step("Reading your invoices", rows_of, user)
    await run.generate(f"Invoices of the caller: {found}. " + "Be brief. " * 20 + run.question, max_tokens=4)


async def by_tool(run: Run) -> None:
    """Have the model look the invoices up itself."""

    def lookup() -> str:
        """Return the caller's invoices."""
        return LogEntry.objects.get(user_id=run.caller.user_id).object_repr

    await run.generate("Look my invoices up.", tools=[lookup], max_tokens=40)


@pytest.fixture(autouse=True)
def pipelines() -> Iterator[None]:
    pipeline("invoices")(invoices)
    pipeline("by_tool", model="caller")(by_tool)
    callers.clear()
    yield
    forget("invoices")
    forget("by_tool")


SITE = {
    "TESTING": True,
    "ANONYMOUS": True,
    "MODELS": {
        "echo": {"PATH": "echo", "ANSWERS": None},
        "caller": {
            "PATH": "echo",
            "FORMAT": "hermes",
            "ANSWERS": {"Look my": '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'},
        },
    },
}


@pytest.fixture
async def ready(transactional_db: Any, site_gate: Gate) -> AsyncIterator[Gate]:
    with override_settings(STREAMSERVE=SITE):
        await until_ready()
        yield site_gate
        await site.reset()


async def invoice(user: Any, text: str) -> None:
    entry = {"object_id": "1", "object_repr": text, "action_flag": CHANGE, "change_message": ""}
    await LogEntry.objects.acreate(user=user, **entry)


async def asks(caller: Caller, gate: Gate) -> tuple[int, str]:
    """Ask the pipeline; return how many tokens of its prompt were cached, and what the engine has computed for it."""
    before = len(gate.plans)
    answer = (await caller.post("/pipelines/invoices", ASKED)).json()
    computed = [token for plan in gate.plans[before:] for chunk in plan.chunks for token in chunk.token_ids]
    text = b"".join(map(EchoTokenizer().token_bytes, computed)).decode(errors="replace")
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], text


async def test_a_users_rows_are_in_that_users_prompts_alone(
    ready: Gate, alice: Any, bob: Any, alice_key: str, lonely_key: str
) -> None:
    """By what the engine has computed for each run; her key is answered as she is."""
    await invoice(alice, "alice owes 111 for boats")
    await invoice(bob, "bob owes 222 for trains")
    by = {"alice": await make_caller(alice), "bob": await make_caller(bob), "visitor": Caller()}
    by |= {"her key": Caller(key=alice_key), "a key": Caller(key=lonely_key)}
    found = {name: (await asks(caller, ready))[1] for name, caller in by.items()}
    assert {name for name, text in found.items() if "111" in text} == {"alice"}  # her key's prompt is in her cache
    assert {name for name, text in found.items() if "222" in text} == {"bob"}
    key, lonely = [row async for row in ApiKey.objects.order_by("pk")]
    owner = f"user:{alice.pk}"
    assert [(one.kind, one.tenant, one.user_id, one.key_id, user) for one, user in callers] == [
        ("user", owner, str(alice.pk), None, alice),
        ("user", f"user:{bob.pk}", str(bob.pk), None, bob),
        ("anonymous", callers[2][0].owner, None, None, None),
        ("key", owner, str(alice.pk), key.pk, alice),
        ("key", f"key:{lonely.pk}", None, lonely.pk, None),
    ]


async def test_nobody_finds_anothers_rows_in_the_cache(ready: Gate, alice: Any, bob: Any, alice_key: str) -> None:
    """Word for word the same prompt: cached for her who has asked it before, and for nobody else."""
    for user in (alice, bob):
        await invoice(user, "the caller owes 333 for planes")
    her, him = await make_caller(alice), await make_caller(bob)
    assert (await asks(her, ready))[0] == 0
    cached, computed = await asks(him, ready)
    assert cached == 0
    assert "333" in computed
    cached, computed = await asks(her, ready)
    assert cached > 100
    assert "333" not in computed
    assert (await asks(Caller(key=alice_key), ready))[0] == cached


async def test_a_tool_reads_the_callers_rows(ready: Gate, alice: Any, bob: Any) -> None:
    """A plain function, on a thread, by the caller's user id."""
    await invoice(alice, "alice owes 444")
    await invoice(bob, "bob owes 555")
    for user, owed, other in ((alice, "444", "555"), (bob, "555", "444")):
        response = await (await make_caller(user)).post("/pipelines/by_tool", {**ASKED, "stream": True})
        events = [json.loads(data) for data in re.findall("^data: (.*)$", (await body_of(response)).decode(), re.M)]
        shown = "".join(event.get("text", "") for event in events)
        assert f"owes {owed}" in shown
        assert other not in shown


async def test_python_jobs_and_rows_have_the_same_caller(ready: Gate, alice: Any, alice_key: str) -> None:
    """A call for a user, in the site's name, a job, and a row of a batch."""
    await run_pipeline("invoices", "What is open?", user=alice)
    await run_pipeline("invoices", "What is open?", tenant="nightly")
    caller = Caller(key=alice_key)
    await caller.post("/jobs", {"pipeline": "invoices", **ASKED})
    await until(lambda: len(callers) == 3)
    await Tenant(alice_key).run(jsonl([line("a", "/pipelines/invoices", **ASKED)]), "/pipelines/invoices")
    key = await ApiKey.objects.aget()
    by_key = Identity.of(f"key:{key.pk}", f"user:{alice.pk}")
    assert callers == [
        (Identity.of(f"user:{alice.pk}", f"user:{alice.pk}"), alice),
        (Identity.of("site:nightly", "site:nightly"), None),
        (by_key, alice),
        (by_key, alice),
    ]
    assert [one.kind for one, _ in callers] == ["user", "site", "key", "key"]


async def test_another_process_continues_for_the_same_caller(
    transactional_db: Any, tmp_path: Path, site_gate: Gate, alice: Any
) -> None:
    """The first process ends in the middle; in the next the run is told the same, of its row."""
    await invoice(alice, "alice owes 666")
    conf = {**SITE, "TESTING": False, "CLIENT": "thread", "STATE_DIR": tmp_path}
    key = (await sync_to_async(ApiKey.objects.make)(user=alice))[1]
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        site_gate.allow(2)
        response = await Caller(key=key).post("/pipelines/invoices", {**ASKED, "stream": True})
        chunks = aiter(response)
        seen = b""
        while b"event: token" not in seen:
            seen += await anext(chunks)
        await site.reset()
        seen += b"".join([chunk async for chunk in chunks])
        assert b"event: done" not in seen
        site_gate.open()
        await until_ready()
        events = await Caller(key=key).get(f"/streams/{response['X-Stream-Id']}/events")
        rest = (await body_of(events)).decode()
        await site.reset()
    assert "event: done" in rest
    assert json.loads(rest.rpartition("data: ")[2])["finish_reason"] == "length"
    assert len(callers) == 2
    assert all(before == after for before, after in pairwise(callers))
    assert callers[0][1] == alice


async def test_a_deactivated_user_is_no_user(ready: Gate, alice: Any) -> None:
    """Also in a run that had begun: a run asks each time."""
    run_user = site.get_site().clients["invoices"]._user_of  # type: ignore[attr-defined]
    who = Identity.of(f"user:{alice.pk}", f"user:{alice.pk}")
    assert await run_user(who) == alice
    alice.is_active = False
    await alice.asave()
    assert await run_user(who) is None
    assert await run_user(Identity.of("user:bob", "user:bob")) is None  # as an application may name its owners


@pytest.mark.parametrize(
    ("owner", "tenant", "expected"),
    [
        ("user:5", "user:5", ("user", "5", None)),
        ("user:5f0e-uuid", "user:5f0e-uuid", ("user", "5f0e-uuid", None)),
        ("key:3", "user:5", ("key", "5", 3)),
        ("key:3", "key:3", ("key", None, 3)),
        ("key:three", "key:three", ("other", None, None)),
        ("anon:x", "anon:x", ("anonymous", None, None)),
        ("site:", "site:", ("site", None, None)),
        ("user:", "user:", ("other", None, None)),
        ("site", "site", ("other", None, None)),
        ("site:nightly", "user:5", ("site", None, None)),
        ("nobody", "nobody", ("other", None, None)),
    ],
)
def test_an_identity_is_read_from_owner_and_tenant(owner: str, tenant: str, expected: tuple[Any, ...]) -> None:
    """Only a user's owner, and a key of a user's tenant, name a user."""
    found = Identity.of(owner, tenant)
    assert (found.kind, found.user_id, found.key_id) == expected
