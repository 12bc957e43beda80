"""docs/api.md names every field, event and error code that the dialects know."""

import re
from pathlib import Path
from typing import get_args

import pytest

import streamserve
from streamserve.clients.thread.client import _REFUSALS
from streamserve.clients.thread.source import ERRORS
from streamserve.dialects.asked import ON_DISCONNECT
from streamserve.dialects.messages import _message_table
from streamserve.dialects.native import FORMATS
from streamserve.dialects.openai.request import _table
from streamserve.protocol import errors, events
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.limits import Limits
from streamserve.protocol.metrics import BREAKDOWN, PHASES
from tests.support.bodies.bad_bodies import bad_bodies

PACKAGE = Path(streamserve.__file__).parent
# Every code that is written out where an error is made.
WRITTEN = {code for path in PACKAGE.rglob("*.py") for code in re.findall(r'\bcode="([a-z_]+)"', path.read_text())}
DOC = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
WITHOUT_BLOCKS = re.sub(r"```.*?```", "", DOC, flags=re.DOTALL)
NAMED = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`[^`]+`", WITHOUT_BLOCKS))))
CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, StreamserveError)]
SOURCES = {
    "fields": [*_table(Limits()), "format", "on_disconnect", *FORMATS, *ON_DISCONNECT],
    "message fields": _message_table(Limits()),
    "error codes": [*(cls.code for cls in CLASSES), *(bad.code for bad in bad_bodies())],
    "codes in the source": [*WRITTEN, *ERRORS, *(f"engine_{state}" for state in _REFUSALS)],
    "finish reasons": events.FINISH_REASONS,
    "events": [*(event.type for event in get_args(events.Event)), "farewell"],
    "breakdown of done": BREAKDOWN,
    "phases of done": PHASES,
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_doc_names_it_all(source: str):
    """The page names every field, event, code and metric of the code."""
    assert not set(SOURCES[source]) - NAMED


def test_the_doc_states_the_default_limits():
    """Numbers in the page are those of `Limits`."""
    limits = Limits()
    for number in (limits.max_prompt_chars, limits.max_tokens, limits.max_messages, limits.max_top_k, limits.max_n):
        assert f"{number:,}" in DOC
