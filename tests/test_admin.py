"""Laws of the admin: rows to view, keys to revoke, and the live page with its permissions."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.test import AsyncClient, Client
from django.test.utils import override_settings
from django.utils import timezone

from streamserve.models import ApiKey, Watch
from streamserve.models import Stream as StreamRow
from streamserve.protocol.history import POINT_SECONDS
from streamserve.rows.work import Job
from streamserve.streams.lease.liveness import Liveness
from streamserve.web import site
from streamserve.web.live.delivery import LiveDelivery
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.streams.log_lines import captured_events

pytestmark = pytest.mark.django_db(transaction=True)

LIVE = "/admin/streamserve/live/"


@pytest.fixture
def admin(root: Any) -> Client:
    client = Client()
    client.force_login(root)
    return client


@pytest.mark.parametrize("page", ["conversation", "attachment", "apikey"])
def test_a_number_that_no_column_holds_is_a_wrong_filter(page: str, admin: Client) -> None:
    """The list is shown without it, as for any filter that Django does not know."""
    response = admin.get(f"/admin/streamserve/{page}/?user={9**30}")
    assert (response.status_code, response["Location"]) == (302, f"/admin/streamserve/{page}/?e=1")


def test_the_lists_open(admin: Client, alice_key: str) -> None:
    """The lists of keys and streams have their useful columns, but no key's secret and no stream's text."""
    StreamRow.objects.create(id="0" * 32, log_id="a" * 12, owner="user:1", tenant="user:1", model="m", text="canary")
    keys = admin.get("/admin/streamserve/apikey/").content.decode()
    assert ApiKey.objects.get().prefix in keys
    assert ApiKey.objects.get().digest not in keys
    assert admin.get("/admin/streamserve/stream/?q=user").status_code == 200
    page = admin.get(f"/admin/streamserve/stream/{'0' * 32}/change/").content.decode()
    assert "canary" not in page


def test_the_times_of_a_reader_stand_beside_the_phases(admin: Client) -> None:
    """The first token and the answer as its reader saw them, hop by hop, and the tail of the gaps with its budget."""
    StreamRow.objects.create(
        id="0" * 32,
        log_id="a" * 12,
        owner="user:1",
        tenant="user:1",
        model="m",
        state="finished",
        latency_class="chat",
        ttft_seconds=0.25,
        phases={"queue": 0.05, "prefill": 0.2, "generation": 1.0},
        reader={
            "headers": 0.3,
            "first_delta": 0.5,
            "first_paint": 0.6,
            "ended": 2.0,
            "last_paint": 2.25,
            "gap_p95": 0.7,
        },
    )
    page = admin.get(f"/admin/streamserve/stream/{'0' * 32}/change/").content.decode()
    assert "600 ms: server 250 ms, network 250 ms, render 100 ms" in page
    assert "2.2 s: queue 50 ms, prefill 200 ms, generation 1.0 s, network 750 ms, render 250 ms" in page
    assert "700 ms of 500 ms" in page


def test_rows_cannot_be_made_or_changed(admin: Client, alice_key: str) -> None:
    """Rows record what happened, so the admin cannot add or change them."""
    assert admin.get("/admin/streamserve/stream/add/").status_code == 403
    pk = ApiKey.objects.get().pk
    assert admin.post(f"/admin/streamserve/apikey/{pk}/change/", {"name": "x"}).status_code == 403
    assert admin.post(f"/admin/streamserve/apikey/{pk}/delete/", {"post": "yes"}).status_code == 403


def test_keys_are_revoked_by_an_action(admin: Client, staff: Any, alice_key: str) -> None:
    """A user with the view permission alone has no revoke action."""
    pk = ApiKey.objects.get().pk
    staff.user_permissions.add(Permission.objects.get(codename="view_apikey"))
    looker = Client()
    looker.force_login(staff)
    data = {"action": "revoke", "_selected_action": [pk]}
    looker.post("/admin/streamserve/apikey/", data)
    assert ApiKey.objects.get().state == "active"
    admin.post("/admin/streamserve/apikey/", data)
    assert ApiKey.objects.get().state == "revoked"


def test_a_key_is_made_and_shown_once(admin: Client, root: Any, alice: Any) -> None:
    """The page that answers the form has the key, which works; nothing else has it, and no cache keeps it."""
    asked = {"name": "nightly", "user": alice.pk, "scopes": ["chat", "ops"], "expires_at_0": "", "expires_at_1": ""}
    assert b"ops: read /metrics" in admin.get("/admin/streamserve/apikey/add/").content
    made = admin.post("/admin/streamserve/apikey/add/", asked)
    assert made.status_code == 200
    assert "no-store" in made["Cache-Control"]
    key = made.context["key"]
    assert key in made.content.decode()
    row = ApiKey.objects.find_active(key)
    assert row is not None
    assert (row.name, row.user, row.scopes, row.expires_at) == ("nightly", alice, ["chat", "ops"], None)
    assert key not in admin.get("/admin/streamserve/apikey/").content.decode()
    assert key not in admin.get(f"/admin/streamserve/apikey/{row.pk}/change/").content.decode()
    assert not [entry for entry in LogEntry.objects.all() if key in f"{entry.object_repr} {entry.change_message}"]


def test_a_key_is_made_for_some_models(admin: Client, review: None) -> None:
    """The form offers the site's models and pipelines, and takes no other; the list and the key's page show them."""
    form = "/admin/streamserve/apikey/add/"
    asked = {"name": "narrow", "scopes": ["chat"], "allowed_models": ["echo", "review"]}
    assert b'value="review"' in admin.get(form).content
    assert b"nemo" in admin.post(form, {**asked, "allowed_models": ["nemo"]}).content
    assert not ApiKey.objects.exists()
    assert "echo, review" in admin.post(form, asked).content.decode()
    assert ApiKey.objects.get().allowed_models == ["echo", "review"]
    assert "chat: echo, review" in admin.get("/admin/streamserve/apikey/").content.decode()


def test_a_key_needs_a_scope_and_a_permission(admin: Client, staff: Any, alice: Any) -> None:
    """Without `add_apikey` there is no form; with it, staff make keys for themselves only."""
    assert admin.post("/admin/streamserve/apikey/add/", {"name": "x"}).status_code == 200  # the form again
    client = Client()
    client.force_login(staff)
    assert client.get("/admin/streamserve/apikey/add/").status_code == 403
    staff.user_permissions.add(Permission.objects.get(codename="add_apikey"))
    asked = {"name": "x", "user": alice.pk, "scopes": ["chat"]}
    client.post("/admin/streamserve/apikey/add/", asked)
    assert not ApiKey.objects.exists()
    client.post("/admin/streamserve/apikey/add/", {**asked, "user": staff.pk})
    assert ApiKey.objects.get().user == staff


def test_lists_and_pages_speak_in_human_units(admin: Client) -> None:
    """Times have units, counts have separators, and what ended how is one column."""
    began = timezone.now()
    row = {"log_id": "a" * 12, "owner": "user:1", "tenant": "user:1", "model": "m", "created_at": began}
    figures = {"prompt_tokens": 1200, "cached_tokens": 1024, "completion_tokens": 3456, "ttft_seconds": 0.1884}
    ended = {"state": "finished", "finish_reason": "length", "finished_at": began + timedelta(seconds=83)}
    StreamRow.objects.create(id="0" * 32, **row, **figures, **ended)
    failed = {**row, "log_id": "b" * 12, "state": "finished", "error_code": "timeout"}
    StreamRow.objects.create(id="1" * 32, **failed)
    page = admin.get("/admin/streamserve/stream/").content.decode()
    for words in ("3,456", "188 ms", "1 min 23 s", "length", "error: timeout"):
        assert words in page
    assert (
        "3,456 (prompt 1,200, 1,024 cached)"
        in admin.get(f"/admin/streamserve/stream/{'0' * 32}/change/").content.decode()
    )


def test_the_times_of_keys_and_steps_are_short(admin: Client, alice_key: str) -> None:
    """A key's scopes are words, its times have no year; the steps of a job say how long they took."""
    ApiKey.objects.update(
        scopes=["chat", "ops"], latency_class="batch", last_used_at=datetime(2026, 3, 4, 12, 6, 7, tzinfo=UTC)
    )
    keys = admin.get("/admin/streamserve/apikey/").content.decode()
    for words in ("chat, ops, batch", "4 Mar, ", ":06:07"):
        assert words in keys
    job = Job.objects.create(id="2" * 32, pipeline="p", owner="user:1", tenant="user:1", stream_id="3" * 32)
    job.steps.create(name="Searching", ordinal=0, result="{}", seconds=11.1115970)
    assert "11.1 s" in admin.get(f"/admin/streamserve/job/{job.pk}/change/").content.decode()


def test_an_unknown_row_leads_back_to_the_index(admin: Client) -> None:
    """Also an id that no stream can have."""
    for stream_id in ("0" * 32, "abc"):
        page = admin.get(f"/admin/streamserve/stream/{stream_id}/change/")
        assert (page.status_code, page["Location"]) == (302, "/admin/")


def test_the_answer_is_for_those_who_may_watch(admin: Client, staff: Any) -> None:
    """The stream's page has the button for them only; a stored text is shown by the watch page, recorded."""
    row = {"log_id": "a" * 12, "owner": "user:1", "tenant": "user:1", "model": "m", "state": "finished"}
    StreamRow.objects.create(id="0" * 32, **row, finish_reason="stop", text="<b>canary</b>", last_seq=9)
    staff.user_permissions.add(Permission.objects.get(codename="view_stream"))
    looker = Client()
    looker.force_login(staff)
    page = f"/admin/streamserve/stream/{'0' * 32}"
    assert "Show the answer" not in looker.get(f"{page}/change/").content.decode()
    assert looker.get(f"{page}/watch/").status_code == 403
    assert "Show the answer" in admin.get(f"{page}/change/").content.decode()
    assert not Watch.objects.exists()
    shown = admin.get(f"{page}/watch/").content.decode()
    assert "&lt;b&gt;canary&lt;/b&gt;" in shown
    assert "watch.js" not in shown
    watch = Watch.objects.get()
    assert (watch.stream_id, watch.username, watch.last_seq) == ("0" * 32, "root", 9)
    assert watch.ended_at is not None


async def login(user: Any, **options: Any) -> AsyncClient:
    client = AsyncClient(**options)
    await client.aforce_login(user)
    return client


async def test_the_live_page_needs_its_permission(engine: None, root: Any, staff: Any, alice: Any) -> None:
    """A superuser gets page, events and buttons; staff without the permission, a user and a visitor do not."""
    paths = [("GET", LIVE), ("GET", f"{LIVE}events"), ("POST", f"{LIVE}stop/{'0' * 32}")]
    paths += [("POST", f"{LIVE}control/resume/echo")]
    expected = [(await login(root), [200, 200, 404, 200]), (await login(staff), [403, 403, 403, 403])]
    expected += [(await login(alice), [302, 403, 403, 403]), (AsyncClient(), [302, 403, 403, 403])]
    for client, statuses in expected:
        got = []
        for method, path in paths:
            response = await client.generic(method, path)
            got.append(response.status_code)
            response.close()
        assert got == statuses


async def test_the_permission_alone_opens_the_page(engine: None, staff: Any) -> None:
    """`view_live` views, `stop_stream` stops, `control_engine` pauses: none includes another."""
    await staff.user_permissions.aadd(await Permission.objects.aget(codename="view_live"))
    client = await login(staff)
    page = await client.get(LIVE)
    assert page.status_code == 200
    assert (page.context["can_stop"], page.context["can_control"]) == (False, False)
    assert page.context["events_url"] == f"{LIVE}events"
    assert "script-src 'self'" in page["Content-Security-Policy"]
    assert (await client.post(f"{LIVE}stop/{'0' * 32}")).status_code == 403
    await staff.user_permissions.aadd(await Permission.objects.aget(codename="control_engine"))
    assert (await client.post(f"{LIVE}stop/{'0' * 32}")).status_code == 403
    assert (await client.post(f"{LIVE}control/pause/echo")).status_code == 200


async def test_the_buttons_need_the_csrf_token(engine: None, root: Any) -> None:
    """The buttons are ordinary Django views behind its CSRF middleware."""
    client = await login(root, enforce_csrf_checks=True)
    for button in (f"stop/{'0' * 32}", "control/pause/echo"):
        assert (await client.post(f"{LIVE}{button}")).status_code == 403
    assert site.get_site().clients["echo"].describe().state == "ready"


async def test_a_model_is_paused_and_resumed(engine: None, root: Any) -> None:
    """/readyz shows the pause, and the log its user; an unknown model or action is a 404."""
    client = await login(root)
    with captured_events() as logs:
        paused = await client.post(f"{LIVE}control/pause/echo")
    [line] = [line for line in logs if line["event"] == "engine_controlled_by_staff"]
    assert (line["action"], line["model"], line["user_id"]) == ("pause", "echo", root.pk)
    assert paused.json() == {"model": "echo", "state": "paused"}
    entry = await LogEntry.objects.aget()
    assert (entry.user_id, entry.change_message) == (root.pk, "Pause of model echo: it is paused")
    reply = await client.get("/readyz")
    assert reply.status_code == 503
    assert "echo is paused" in reply.json()["reason"].split(", ")  # and each pipeline that asks it
    assert reply.json()["models"][0]["message"] != ""
    metrics = (await client.get("/metrics")).content.decode()
    assert 'streamserve_engine_paused{model_name="echo"} 1' in metrics
    assert (await client.post(f"{LIVE}control/resume/echo")).json()["state"] == "ready"
    assert (await AsyncClient().get("/readyz")).status_code == 200
    for wrong in ("pause/nope", "explode/echo"):
        assert (await client.post(f"{LIVE}control/{wrong}")).status_code == 404
    assert (await client.get(f"{LIVE}control/pause/echo")).status_code == 405


async def test_a_draining_model_takes_nothing_new(engine: None, root: Any, alice_key: str) -> None:
    """A caller gets a 503 with Retry-After, and /readyz has the reason."""
    client = await login(root)
    assert (await client.post(f"{LIVE}control/drain/echo")).json()["state"] == "draining"
    refused = await Caller(key=alice_key).post("/streams", {"prompt": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_draining")
    assert int(refused["Retry-After"]) >= 1
    assert "echo is draining" in (await client.get("/readyz")).json()["reason"].split(", ")


async def test_the_live_page_shows_loading(engine: None, root: Any) -> None:
    """The page shows state, stage, bytes and seconds of every model, and the engine's counts of parks and faults."""
    [model] = (await site.get_site().live.snapshot()).as_json()["models"]
    assert {"state", "stage", "fraction", "loaded_bytes", "total_bytes", "elapsed_seconds", "message"} <= set(model)
    assert {"num_parks", "queue_seconds", "num_out_of_memory", "num_quarantines"} <= set(model["figures"])


async def test_streams_of_other_processes_are_seen(root: Any, tmp_path: Path) -> None:
    """A stream of another process and a parked one are shown; a finished one is not."""
    log = {"LOG": "file", "STATE_DIR": str(tmp_path), "MODELS": {"echo": {"PATH": "echo"}}, "CLIENT": "thread"}
    other = Liveness(tmp_path / "workers")
    kinds = {"a": {"producer": other.own_id}, "b": {"released_at": timezone.now()}, "c": {"state": "finished"}}
    for name, fields in kinds.items():
        row = {"id": name * 32, "log_id": name * 12, "model": "echo", "owner": "user:9", "tenant": "user:9"}
        await StreamRow.objects.acreate(**row, **fields)
    with override_settings(STREAMSERVE=log):
        try:
            figures = (await site.get_site().live.snapshot()).as_json()
        finally:
            await site.reset()
            other.close()
    assert [(one["id"][0], one["state"]) for one in figures["streams"]] == [("a", "running"), ("b", "parked")]
    assert {one["owner_name"] for one in figures["streams"]} == {"user 9, deleted"}
    [model] = figures["models"]
    assert (model["streams"], model["by_state"]) == (2, {"starting": 0, "running": 1, "parked": 1})


async def test_a_running_stream_is_seen_and_stopped(root: Any, alice_key: str) -> None:
    """The metrics name the stream; POST stop ends it as cancelled."""
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        ask = {"prompt": "hi", "max_tokens": 1000, "ignore_eos": True}
        answer = aiter(await Caller(key=alice_key).post("/streams", ask))
        await anext(answer)
        client = await login(root)
        events = aiter(await client.get(f"{LIVE}events"))
        figures: dict[str, Any] = {"streams": [{"state": "starting"}]}
        while [row["state"] for row in figures["streams"]] == [
            "starting"
        ]:  # the answer's head is sent before its first token
            event = await anext(events)
            if b"event: figures" in event:
                figures = json.loads(event.partition(b"data: ")[2])
        await events.aclose()
        [shown] = figures["streams"]
        assert shown["state"] == "running"
        blocks = {name: figures["models"][0]["figures"][f"kv_blocks_{name}"] for name in ("used", "cached", "free")}
        assert figures["models"][0]["figures"]["kv_blocks_total"] == sum(blocks.values())
        stopped = await client.post(f"{LIVE}stop/{shown['id']}")
        entry = await LogEntry.objects.aget(object_id=shown["id"])
        assert (entry.user_id, entry.change_message) == (root.pk, f"Stopped stream {shown['id']}")
        assert stopped.json() == {"id": shown["id"], "state": "finished"}
        rest = b"".join([chunk async for chunk in answer])
        assert b'"finish_reason":"cancelled"' in rest
        await site.reset()


async def test_all_viewers_share_one_making_of_the_figures(engine: None) -> None:
    """Ten pages that are open at once get the same bytes, made once."""
    live = site.get_site().live
    viewers = [aiter(LiveDelivery(live)) for _ in range(10)]
    await asyncio.gather(*(anext(viewer) for viewer in viewers))  # the first bytes
    got = await asyncio.gather(*(anext(viewer) for viewer in viewers))
    assert live.num_made == 1
    assert len(set(got)) == 1
    for viewer in viewers:
        await viewer.aclose()


async def test_the_history_is_the_servers(engine: None, alice_key: str) -> None:
    """A page that opens has the points from before; what answers took is there after the first one."""
    live = site.get_site().live
    await until(lambda: bool(live._histories["echo"].points()))
    before = live._histories["echo"].points()[0]
    await body_of(await Caller(key=alice_key).post("/streams", {"prompt": "hi", "max_tokens": 9, "ignore_eos": True}))
    await until(lambda: not any(stream.is_live for stream in site.get_site().streams.all()))
    [model] = (await live.snapshot()).as_json()["models"]
    assert model["points"]["at"][0] == before.slot * POINT_SECONDS
    first_token, gap = (side["server"] for side in model["recent"]["sides"][:2])
    assert first_token[1] >= first_token[0] > 0
    assert gap[0] is not None
    assert sum(model["recent"]["by_minute"]["request_success"]) >= 1


async def test_a_stream_at_rest_has_no_speed(engine: None, alice_key: str) -> None:
    """A parked answer shows 0 tokens a second, and the model's card counts it as its row does."""
    ask = {"prompt": "hi", "max_tokens": 900, "ignore_eos": True}
    answer = aiter(await Caller(key=alice_key).post("/streams", ask))
    await anext(answer)
    await answer.aclose()
    live = site.get_site().live
    await until(lambda: all(stream.state == "parked" for stream in site.get_site().streams.all()))
    figures = (await live.snapshot()).as_json()
    [shown] = figures["streams"]
    assert (shown["state"], shown["tokens_per_second"]) == ("parked", 0.0)
    assert figures["models"][0]["by_state"] == figures["by_state"] == {"starting": 0, "running": 0, "parked": 1}
