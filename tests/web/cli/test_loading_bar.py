"""How loading is shown: one line on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import io
import json

from streamserve.protocol.engine import ModelDescription
from streamserve.web.cli.loading_bar import LoadingBar, description_of, progress_line

WEIGHTS = ModelDescription(
    alias="helpdesk",
    state="loading",
    stage="weights",
    fraction=0.5,
    loaded_bytes=270_000_000,
    total_bytes=540_000_000,
    elapsed_seconds=3.2,
)
READY = ModelDescription(alias="helpdesk", state="ready", stage="ready", fraction=1.0, elapsed_seconds=4.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_drawn_over() -> None:
    """The line on a terminal ends with one newline, at the end of loading."""
    out = Terminal()
    bar = LoadingBar(out)
    bar.show(WEIGHTS)
    bar.show(READY)
    bar.close()
    bar.close()
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().count("\r") == 2
    assert "weights [████████████············] 50%, 270 of 540 MB, 3 s" in out.getvalue()


def test_a_log_gets_a_line_for_each_stage() -> None:
    """Each stage has one line, however often the state is polled."""
    out = io.StringIO()
    bar = LoadingBar(out)
    for model in (WEIGHTS, WEIGHTS, READY, READY):
        bar.show(model)
    bar.close()
    assert out.getvalue() == "helpdesk: weights 50%, 270 of 540 MB, 3 s\nhelpdesk: ready 100%, 4 s\n"


def test_a_message_is_shown() -> None:
    """The message of an engine, for example that there is none, ends the line."""
    alone = ModelDescription(alias="m", state="loading", stage="waiting", message="Start it: manage.py ...")
    assert progress_line(alone).endswith("Start it: manage.py ...")


def test_a_description_is_read_from_readyz() -> None:
    """The description is read from /readyz, and unknown keys are left alone."""
    sent = json.loads('{"alias": "m", "state": "loading", "fraction": 0.25, "is_new": true}')
    assert description_of(sent) == ModelDescription(alias="m", state="loading", fraction=0.25)
