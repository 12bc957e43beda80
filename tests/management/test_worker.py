"""`manage.py streamserve_worker`: what it refuses. Real workers run in tests/proofs/jobs and tests/work."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test.utils import override_settings

from streamserve.management.commands.streamserve_worker import Command, _show
from streamserve.models import Job
from tests.conftest import until


def conf(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    return {"MODELS": {"echo": {"PATH": "echo"}}, "STATE_DIR": str(tmp_path), **keys}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kinds": "jobs,tea"}, "no kind of work 'tea'"),
        ({"concurrency": 0}, "1 at least"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    """By name, with what there is."""
    with override_settings(STREAMSERVE=conf(tmp_path)), pytest.raises(CommandError, match=text):
        call_command("streamserve_worker", **options)


@pytest.mark.django_db(transaction=True)
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """With the setting that names it, and without a traceback."""
    (tmp_path / "file").touch()
    given = conf(tmp_path / "file")
    with override_settings(STREAMSERVE=given), pytest.raises(CommandError, match=r"file/workers.*STATE_DIR"):
        call_command("streamserve_worker", drain=True)


def test_a_log_in_memory_has_no_other_worker(tmp_path: Path) -> None:
    """Its events are in the web process, which runs the jobs."""
    with override_settings(STREAMSERVE=conf(tmp_path, LOG="memory")), pytest.raises(CommandError, match="memory"):
        call_command("streamserve_worker")


def test_its_help_says_what_it_does() -> None:
    """Every option has a sentence."""
    out = io.StringIO()
    parser = Command(stdout=out).create_parser("manage.py", "streamserve_worker")
    text = parser.format_help()
    assert "SIGTERM" in text
    for option in ("--concurrency", "--kinds", "--drain"):
        assert option in text


@pytest.mark.django_db(transaction=True)
async def test_a_terminal_has_a_line_of_progress() -> None:
    """What runs here, what waits in all processes, what was done; it is cleared at the end."""
    kinds = [SimpleNamespace(name="jobs"), SimpleNamespace(name="batch")]
    worker: Any = SimpleNamespace(kinds=kinds, claims=[SimpleNamespace(kind="batch")] * 2, num_done=1041)
    await Job.objects.acreate(id="1" * 32, stream_id="1" * 32, pipeline="p", owner="o", tenant="t")
    out = io.StringIO()
    showing = asyncio.create_task(_show(worker, out))
    await until(lambda: out.getvalue().count("\r") >= 1)
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    _, shown, cleared = out.getvalue().split("\r\x1b[K")
    assert (shown, cleared) == ("jobs: 0 running, 1 waiting; batch: 2 running; 1,041 done", "")
