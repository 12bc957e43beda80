"""The pages that lead here from another design: what they show for afterwards runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from streamserve import conf
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.docs.doc_blocks import Block, blocks_of
from tests.support.docs.doc_site import DocSite
from tests.support.servers.web_servers import Server, wait_until_ready

pytestmark = pytest.mark.proof

STREAMING, CELERY = "docs/from-streaming-response.md", "docs/from-celery-channels.md"
FASTAPI, AG_UI = "docs/from-vllm-fastapi.md", "docs/from-django-ag-ui.md"
PAGES = [STREAMING, CELERY, FASTAPI, AG_UI]
URLS = """
from django.urls import path
from shop import views
urlpatterns += [path(name, getattr(views, name)) for name in ("tell", "begin", "review")]
"""
SETTINGS = """
INSTALLED_APPS += ["shop"]
STREAMSERVE["ANONYMOUS"] = True
STREAMSERVE["ENGINE"] = {"DEFAULT_MAX_TOKENS": 96}
STREAMSERVE["JOBS"] = {"EMBEDDED": True}
"""


def after(page: str) -> list[Block]:
    """Return the blocks of a page that do not show what was before."""
    return [block for block in blocks_of(page) if block.heading != "Before"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    """A site with the files of all pages that have Django's."""
    site = DocSite(tmp_path_factory.mktemp("moved"))
    for name, text in (("settings.py", SETTINGS), ("urls.py", URLS)):
        with (site.project / "mysite" / name).open("a") as file:
            file.write(text)
    for block in (block for page in (STREAMING, CELERY, AG_UI) for block in after(page)):
        if block.file_name.startswith("shop/"):
            site.write(block)
    yield site
    site.close()


@pytest.fixture(scope="module")
def server(site: DocSite) -> Iterator[Server]:
    """The site, served."""
    with site.serve("daphne mysite.asgi:application") as server:
        wait_until_ready(server.url)
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A visitor."""
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_is_python(page: str) -> None:
    """Also what was before."""
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, page, "exec")


def test_the_settings_are_right() -> None:
    """The settings of all pages together have no problem."""
    names: dict[str, Any] = {"STREAMSERVE": {"MODELS": {"chat": {"PATH": "echo"}}}}
    for page in PAGES:
        for block in after(page):
            if block.file_name == "settings.py":
                exec(block.code, names)  # noqa: S102  (the page is ours)
                assert conf.read(names["STREAMSERVE"], base_dir="/srv", debug=True)[1] == ()
    assert names["STREAMSERVE"]["HARDEN_EVENT_STREAMS"] is True


def test_the_view_hands_the_answer_over(client: httpx.Client) -> None:
    """It answers in the format of its page: tokens, then [DONE]."""
    answer = client.get("/tell", params={"what": "boats"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert 'data: {"token":' in answer.text.replace('{"token": ', '{"token":')
    assert answer.text.rstrip().endswith("data: [DONE]")


def test_the_page_can_come_back(client: httpx.Client) -> None:
    """The address that the view gives is read twice, with the same text."""
    url = client.get("/begin", params={"what": "boats"}).json()["url"]
    first, again = (text_of(check_native(client.get(url).content)) for _ in range(2))
    assert first == again != ""


def test_the_job_is_done(client: httpx.Client) -> None:
    """The view answers 202, and the job's events have its steps and its end."""
    queued = client.get("/review", params={"order": 7})
    assert queued.status_code == 202
    events = client.get(queued.json()["url"]).content
    assert b"Reading the order" in events
    assert "two lamps" in text_of(check_native(events))


def test_the_agent_answers(client: httpx.Client) -> None:
    """The pipeline with the tool runs by its route."""
    question = {"messages": [{"role": "user", "content": "How many users are active?"}], "stream": True}
    assert text_of(check_native(client.post("/pipelines/agent", json=question).content)).strip()


async def test_the_gateway_answers(site: DocSite, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI with the app mounted asks the model elsewhere, which is our own site here."""
    monkeypatch.setenv("VLLM_KEY", site.run("python manage.py streamserve_key create").split()[-1])
    (block,) = [block for block in after(FASTAPI) if block.file_name == "gateway.py"]
    code = block.code.replace("http://10.0.0.5:8000", server.url).replace("org/name", "chat")
    names: dict[str, Any] = {"user_of": lambda scope: "ann"}
    exec(code, names)  # noqa: S102  (the page is ours)
    gateway = names["gateway"]
    async with gateway.router.lifespan_context(gateway):
        transport = httpx.ASGITransport(gateway)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            answer = await client.post("/ai/streams", json={"messages": [{"role": "user", "content": "Hello"}]})
            assert text_of(check_native(answer.content)).strip()
