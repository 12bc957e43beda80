"""Laws of the lab's reports: what several processes know becomes one picture, and the dead are not in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from project.lab.reports import STALE_SECONDS, merged, read, write

ID = "a" * 32


def report(pid: int, *, parent: int = 1, engine: int | None = 7, **answer: Any) -> dict[str, Any]:
    """Return what a process says, of an answer if there are `answer`'s fields."""
    known = {"is_made_here": False, "state": "running", "reason": None, "tokens": 3, "last_seq": 5, "reader": None}
    answers = {ID: {**known, **answer}} if answer else {}
    return {"pid": pid, "parent": parent, "engine": {"pid": engine, "state": "ready"}, "answers": answers}


def test_the_maker_knows_the_answer_and_the_readers_process_its_reader() -> None:
    """Two processes, of which the other is read from: the newest events are the maker's, the cursors the reader's."""
    reader = {"sent_seq": 4, "received_seq": 2, "is_away": False}
    picture = merged([report(1, is_made_here=True, last_seq=9), report(2, last_seq=8, reader=reader)], ID)
    assert picture["answer"] == {
        **report(1, is_made_here=True, last_seq=9)["answers"][ID],
        "reader": reader,
        "is_made": True,
    }
    assert picture["web"] == [{"pid": 1, "makes": True, "is_read": False}, {"pid": 2, "makes": False, "is_read": True}]


def test_an_answer_whose_maker_is_dead_is_still_known() -> None:
    """Another process follows it; no process makes it now."""
    picture = merged([report(2, last_seq=8)], ID)
    assert (picture["answer"]["last_seq"], picture["answer"]["is_made"]) == (8, False)
    assert merged([report(2)], ID)["answer"] is None
    assert merged([], ID) == {"web": [], "engine": None, "answer": None}


def test_a_lost_engine_is_shown_as_it_starts() -> None:
    """The first process that is connected again names the new engine; until then its state is shown."""
    lost = report(1, engine=None)
    lost["engine"]["state"] = "loading"
    assert merged([lost, report(2, engine=8)], ID)["engine"] == {"pid": 8, "state": "ready"}
    assert merged([lost], ID)["engine"]["state"] == "loading"


def test_reports_of_ended_processes_are_not_read(tmp_path: Path) -> None:
    """A process that has ended is not in the picture, nor is a file that is not renewed; a file is replaced whole."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    alive = sorted([os.getpid(), os.getppid()])
    for pid in (*alive, ended.pid):
        write(tmp_path, report(pid))
    assert [one["pid"] for one in read(tmp_path)] == alive
    old = time.time() - STALE_SECONDS - 1
    os.utime(tmp_path / f"{alive[0]}.json", (old, old))
    assert [one["pid"] for one in read(tmp_path)] == alive[1:]
    assert {path.name for path in tmp_path.iterdir()} == {f"{pid}.json" for pid in (*alive, ended.pid)}
    assert json.loads((tmp_path / f"{alive[1]}.json").read_text()) == report(alive[1])
    assert read(tmp_path / "none") == []
