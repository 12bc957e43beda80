"""The pages of the HTTP API name every field, format and end of a stream that the dialects know."""

import re
from pathlib import Path
from typing import get_args

import pytest

from streamserve.dialects.asked import ON_DISCONNECT
from streamserve.dialects.messages import message_table
from streamserve.dialects.native import FORMATS
from streamserve.dialects.openai.request import body_fields
from streamserve.protocol import events
from streamserve.protocol.limits import Limits

DOCS = Path(__file__).parents[2] / "docs"
DOC = "".join((DOCS / f"{name}.md").read_text() for name in ("streams", "events", "resuming", "chat-completions"))
WITHOUT_BLOCKS = re.sub(r"```.*?```", "", DOC, flags=re.DOTALL)
NAMED = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`[^`]+`", WITHOUT_BLOCKS))))
SOURCES = {
    "fields": [*body_fields(Limits()), "format", "on_disconnect", *FORMATS, *ON_DISCONNECT],
    "message fields": message_table(Limits()),
    "finish reasons": events.FINISH_REASONS,
    "events": [*(event.type for event in get_args(events.Event)), "farewell"],
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_doc_names_it_all(source: str):
    """The pages name every field, event and end of the code."""
    assert not set(SOURCES[source]) - NAMED


def test_the_doc_states_the_default_limits():
    """Numbers in the pages are those of `Limits`."""
    limits = Limits()
    for number in (limits.max_prompt_chars, limits.max_tokens, limits.max_messages, limits.max_top_k, limits.max_n):
        assert f"{number:,}" in DOC
