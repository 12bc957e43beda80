"""`CODES` has every error code that the sources write, with the status of its class."""

from __future__ import annotations

import re
from pathlib import Path

import streamserve
from streamserve.clients.thread.client import _REFUSALS
from streamserve.clients.thread.source import ERRORS
from streamserve.protocol import errors
from streamserve.protocol.codes import CODES, STREAM
from streamserve.protocol.errors import StreamserveError
from tests.support.bodies.bad_bodies import bad_bodies

SOURCES = sorted(Path(streamserve.__file__).parent.rglob("*.py"))
WRITTEN = {code for path in SOURCES for code in re.findall(r'\bcode(?::\s*str)?\s*=\s*"([a-z_]+)"', path.read_text())}
CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, StreamserveError)]


def test_every_written_code_is_in_the_table() -> None:
    """Codes that are written where an error is made, or that a class has."""
    assert len(WRITTEN) > 90
    assert sorted(WRITTEN - CODES.keys()) == []


def test_every_code_of_a_stream_is_in_the_table() -> None:
    """An engine's reasons, and what an engine that does not serve answers."""
    assert {*ERRORS, *(f"engine_{state}" for state in _REFUSALS)} <= CODES.keys()
    assert [code for code in ERRORS if STREAM not in CODES[code].places] == ["never_fits"]


def test_a_class_has_the_status_of_its_code() -> None:
    """Each class of errors comes with one of its code's statuses."""
    for cls in CLASSES:
        assert cls.http_status in CODES[cls.code].places, cls


def test_a_wrong_body_has_the_status_of_its_code() -> None:
    """The bodies that every dialect refuses."""
    for bad in bad_bodies():
        assert bad.status in CODES[bad.code].places, bad.name


def test_no_code_is_explained_twice() -> None:
    """One meaning for each code."""
    assert len({code.meaning for code in CODES.values()}) == len(CODES)
