"""Laws of log lines: a site's LOGGING controls them, whatever it does with structlog."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import structlog

from streamserve.api.logs import get_logger

NAME = "streamserve.tests.logs"


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=NAME)


def test_a_line_is_an_event_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    """Readable as text, and with its values for a formatter that writes JSON; None is left out of the text."""
    get_logger(NAME).info("stream_finished", stream_id="a1", ttft_ms=1.5, error_code=None, user="a b")
    [record] = caplog.records
    assert record.getMessage() == 'stream_finished stream_id=a1 ttft_ms=1.5 user="a b"'
    assert vars(record)["event"] == "stream_finished"
    assert vars(record)["fields"] == {"stream_id": "a1", "ttft_ms": 1.5, "error_code": None, "user": "a b"}
    assert (record.name, record.levelname, record.filename) == (NAME, "INFO", "test_logs.py")


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[2Jb", "a\x85b", "a\u2028b", "a\x9b2Jb"])
def test_a_value_begins_no_line_and_reaches_no_terminal(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """What a caller sends cannot look like another line, nor move the cursor of who reads the log."""
    get_logger(NAME).info("request_failed", path=text)
    assert caplog.records[0].getMessage().isprintable()


def test_the_sites_level_holds(caplog: pytest.LogCaptureFixture) -> None:
    """A line below the level of LOGGING is not even rendered."""
    caplog.set_level(logging.WARNING, logger=NAME)
    get_logger(NAME).info("stream_finished")
    get_logger(NAME).warning("stream_log_lost")
    assert [vars(record)["event"] for record in caplog.records] == ["stream_log_lost"]


def test_an_exception_brings_its_traceback_and_place(caplog: pytest.LogCaptureFixture) -> None:
    """`exception` is an error with the traceback, logged at the line that calls it."""
    try:
        raise ValueError("on purpose")
    except ValueError:
        get_logger(NAME).exception("request_failed", path="/streams")
    [record] = caplog.records
    assert record.exc_info is not None
    assert (record.exc_info[0], record.levelname, record.filename) == (ValueError, "ERROR", "test_logs.py")


def test_bound_fields_are_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    """Fields that a site binds for a request, by structlog's context variables, are in our lines too."""
    with structlog.contextvars.bound_contextvars(trace="t1"):
        get_logger(NAME).info("stream_watched")
    assert caplog.records[0].getMessage() == "stream_watched trace=t1"


def test_nothing_is_printed_without_a_configuration() -> None:
    """No line goes to stdout, where a command's output is; without any LOGGING only warnings go to stderr."""
    code = f"from streamserve.api.logs import get_logger as g; g('{NAME}').info('a'); g('{NAME}').warning('b', c=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "b c=1\n")
