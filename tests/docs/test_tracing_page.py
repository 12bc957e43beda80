"""docs/tracing.md: its five lines make a new site send spans to a collector; its table names every attribute."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docs.doc_blocks import ROOT, blocks_of
from tests.support.docs.doc_site import DocSite
from tests.support.servers.collector import Collector

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


def test_the_table_names_every_attribute() -> None:
    """Each attribute and event in the code is on the page; the usual family's second name may be cut to `…name`."""
    page = (ROOT / PAGE).read_text()
    code = "".join(
        Path(ROOT, path).read_text()
        for path in (
            "streamserve/tracing/answers.py",
            "streamserve/streams/stream.py",
            "streamserve/clients/pipeline/run.py",
        )
    )
    named = set(re.findall(r'"((?:gen_ai|streamserve|server)\.[a-z_.]+)"', code))
    named -= {"streamserve.streams", "streamserve.pipelines"}  # loggers
    assert len(named) > 20
    for name in sorted(named):
        ends = [f"…{name.split('.', depth)[-1]}`" for depth in range(1, name.count(".") + 1)]
        assert f"`{name}`" in page or any(f"`{end}" in page for end in ends), name
