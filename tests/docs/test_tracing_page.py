"""docs/tracing.md: its five lines make a new site send spans to a collector; its table names every attribute."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.docs.doc_blocks import ROOT, blocks_of
from tests.support.docs.doc_site import DocSite
from tests.support.servers.collector import Collector

pytestmark = pytest.mark.proof

PAGE = "docs/tracing.md"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    site = DocSite(tmp_path_factory.mktemp("tracing"))
    [setup] = [block.code for block in blocks_of(PAGE, "Turn it on") if block.language == "python"]
    with (site.project / "mysite" / "settings.py").open("a") as settings:
        settings.write(f"\n{setup}\nSTREAMSERVE |= {{'ANONYMOUS': True, 'TRACING': True}}\n")
    yield site
    site.close()


def ask(url: str, **headers: str) -> str:
    """Ask, read the whole answer, and return its stream's id."""
    body = json.dumps({"prompt": "Hello", "max_tokens": 5}).encode()
    request = urllib.request.Request(f"{url}/streams", body, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=120) as response:
        assert b"event: done" in response.read()
        return str(response.headers["X-Stream-Id"])


def test_the_page_s_lines_send_spans(site: DocSite) -> None:
    """A request with a `traceparent` is a tree below it at the collector, of the service that the page names."""
    with Collector() as collector:
        site.env = {**collector.variables, "OTEL_SERVICE_NAME": "shop"}
        with site.serve("daphne mysite.asgi:application") as server:
            stream_id = ask(server.url, traceparent=PARENT)
            spans = collector.wait(lambda found: {"text_completion chat", "deliver"} <= {one.name for one in found})
    trace_id, parent_id = PARENT.split("-")[1:3]
    [answer] = [one for one in spans if one.name == "text_completion chat"]
    assert (answer.trace_id, answer.parent_id, answer.service) == (trace_id, parent_id, "shop")
    assert answer.attributes["streamserve.stream_id"] == stream_id
    below = [one for one in spans if one.parent_id == answer.span_id]
    assert {one.trace_id for one in below} == {trace_id}
    assert {"intake", "deliver"} <= {one.name for one in below}


BROKEN = """
from streamserve import pipeline


@pipeline()
async def broken(run):
    question = run.question
    await run.generate(question, max_tokens=3)
    raise ValueError("out of order")
"""


@pytest.fixture(scope="module")
def sentry_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    site = DocSite(tmp_path_factory.mktemp("sentry"))
    setup, sampler = [block.code for block in blocks_of(PAGE, "Sentry") if block.language == "python"]
    setup = setup.replace("sentry_sdk.init(", "sentry_sdk.init(traces_sampler=traces_sampler,")
    with (site.project / "mysite" / "settings.py").open("a") as settings:
        settings.write(f"\n{sampler.replace('0.1', '1.0')}\n{setup}\nSTREAMSERVE |= {{'ANONYMOUS': True}}\n")
    with (site.project / "mysite" / "urls.py").open("a") as urls:
        urls.write(BROKEN)
    yield site
    site.close()


def test_sentry_gets_errors_and_spans_and_no_prompt(sentry_site: DocSite) -> None:
    """A pipeline that raises is an event, in the trace of its run; nothing that is sent has the question."""
    secret = "a question of 4711"
    with Collector() as sentry:
        sentry_site.env = {"SENTRY_DSN": f"{sentry.url.replace('//', '//key@')}/1", **sentry.variables}
        with sentry_site.serve("daphne mysite.asgi:application") as server:
            urllib.request.urlopen(f"{server.url}/livez", timeout=60).read()
            messages = [{"role": "user", "content": secret}]
            assert b"pipeline_failed" in post(server.url, {"model": "broken", "messages": messages})
            sentry.wait(lambda found: "invoke_workflow broken" in {one.name for one in found})
        sentry.wait(lambda found: any("exception" in one for one in items(sentry)))  # sent at the end
    [run] = [one for one in sentry.spans if one.name == "invoke_workflow broken"]
    [event] = [one for one in items(sentry) if "exception" in one]
    assert event["logger"] == "streamserve.pipelines"
    assert event["exception"]["values"][-1]["value"] == "out of order"
    assert event["contexts"]["trace"]["trace_id"] == run.trace_id
    assert {one["transaction"] for one in items(sentry) if "spans" in one} == {"/streams"}
    assert not any(secret.encode() in body for _, body in sentry.received)


def post(url: str, body: Any) -> bytes:
    request = urllib.request.Request(f"{url}/streams", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return bytes(response.read())


def items(sentry: Collector) -> list[dict[str, Any]]:
    """Return the items of Sentry's envelopes that are JSON."""
    lines = [line for path, body in sentry.received if path.endswith("/envelope/") for line in body.splitlines()]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def test_the_table_names_every_attribute() -> None:
    """Each attribute and event in the code is on the page; the usual family's second name may be cut to `…name`."""
    page = (ROOT / PAGE).read_text()
    code = "".join(
        Path(ROOT, path).read_text()
        for path in (
            "streamserve/tracing/answers.py",
            "streamserve/streams/stream.py",
            "streamserve/rows/titles.py",
            "streamserve/clients/pipeline/run.py",
        )
    )
    named = set(re.findall(r'"((?:gen_ai|streamserve|server)\.[a-z_.]+)"', code))
    named -= {"streamserve.streams", "streamserve.pipelines"}  # loggers
    assert len(named) > 20
    for name in sorted(named):
        ends = [f"…{name.split('.', depth)[-1]}`" for depth in range(1, name.count(".") + 1)]
        assert f"`{name}`" in page or any(f"`{end}" in page for end in ends), name
