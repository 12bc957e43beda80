"""Laws of `streamserve_openapi`: the text of /openapi.json, with all pipelines of the site, and no engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test.utils import override_settings
from openapi_spec_validator import validate

from streamserve import Run, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.web import site
from tests.conftest import Caller

SCHEMA = {"type": "object", "properties": {"order": {"type": "integer"}}}


@pytest.fixture
def pipelines() -> Iterator[None]:
    """A pipeline with an input, and one that few may use."""

    async def order(run: Run) -> None:
        """Find an order."""

    async def payroll(run: Run) -> None:
        """Read the payroll."""

    pipeline(input_schema=SCHEMA)(order)
    pipeline(permission="auth.add_user")(payroll)
    yield
    forget("payroll")
    forget("order")


def written(*arguments: str) -> str:
    out = StringIO()
    call_command("streamserve_openapi", *arguments, stdout=out, stderr=StringIO())
    return out.getvalue()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("more", [{}, {"CONVERSATIONS": True, "SHARE_LINKS": True, "MCP_ENDPOINT": True}])
async def test_it_is_the_text_of_the_address(more: dict[str, Any], root: Any, pipelines: None) -> None:
    """To the character, for a caller who may use everything, with every setting that leaves routes out."""
    with override_settings(STREAMSERVE={"TESTING": True, **more}):
        await site.reset()
        caller = Caller()
        await caller.client.aforce_login(root)
        reply = await caller.get("/openapi.json")
        await site.reset()
        assert written() == reply.content.decode() + "\n"


def test_it_shows_every_pipeline(pipelines: None) -> None:
    """Also the pipelines that a visitor may not use, with their inputs; the document is valid."""
    shown = json.loads(written())
    validate(shown)
    assert {"/pipelines/order", "/pipelines/payroll"} <= shown["paths"].keys()
    assert shown["components"]["schemas"]["orderInput"] == SCHEMA


def test_it_writes_a_file(tmp_path: Path) -> None:
    """With --output into a file, which may be there; with --indent over many lines; else it is one line."""
    path = tmp_path / "openapi.json"
    path.write_text("old")
    assert written("--output", str(path), "--indent", "2") == ""
    assert path.read_text().startswith('{\n  "openapi": "3.1.1",\n')
    assert json.loads(path.read_text()) == json.loads(written())
    assert written().count("\n") == 1


def test_it_says_what_is_wrong(tmp_path: Path) -> None:
    """A file that cannot be written, an indent that is none, and a site without streamserve's routes."""
    with pytest.raises(CommandError, match="cannot be written: No such file or directory"):
        written("--output", str(tmp_path / "nowhere" / "openapi.json"))
    with pytest.raises(CommandError, match="--indent"):
        written("--indent", "9")
    with override_settings(ROOT_URLCONF="django.contrib.auth.urls"), pytest.raises(CommandError, match="include"):
        written()
