"""What each web process of the demo knows of the lab's answers, in files that the others read.

    <folder>/<pid>.json     written every `EVERY_SECONDS`

Not read are reports of a process that has ended, and reports older than `STALE_SECONDS`, of a loop that stands still.

How far a reader is, only the process knows that it is connected to, and the lab's page may ask another. A thread of
each process asks its event loop and writes: a loop that stands still stops to report, as an ended process does.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from django.conf import settings

from project.lab.trace import Trace
from streamserve.api.logs import get_logger
from streamserve.streams.readers import Attachment
from streamserve.streams.stream import Stream
from streamserve.web.site import get_site, running_loop

log = get_logger(__name__)

EVERY_SECONDS = 0.2
STALE_SECONDS = 5.0  # a busy machine is late
_ENGINE = ("running", "waiting", "blocks_used", "blocks_cached", "blocks_free", "blocks_total", "tokens_per_second")

Report = dict[str, Any]


class Reporter(threading.Thread):
    """Writes this process's reports, from the first request of its site until it ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="lab reports", daemon=True)
        self._folder = folder
        self._traces: dict[str, Trace] = {}  # of the answers that are made and read here, by their streams

    def run(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            loop = running_loop()
            try:
                if loop is not None:
                    report = asyncio.run_coroutine_threadsafe(_report(self._traces), loop).result(STALE_SECONDS)
                    write(self._folder, report)
            except Exception:  # the edge of a thread: a report is lost
                log.exception("lab_report_failed")
            time.sleep(EVERY_SECONDS)


async def _report(traces: dict[str, Trace]) -> Report:
    """Return what this process knows now."""
    site = get_site()
    streams = {stream.id: stream for stream in site.streams.all() if stream.model == settings.LAB_MODEL}
    follow(streams, traces)
    client = site.clients[settings.LAB_MODEL]
    stats = client.stats()
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "engine": {
            "pid": getattr(client, "engine_pid", None),
            "state": client.describe().state,
            **{name: getattr(stats, name) for name in _ENGINE},
        },
        "answers": {stream_id: answer_report(stream, traces.get(stream_id)) for stream_id, stream in streams.items()},
    }


def follow(streams: Mapping[str, Stream], traces: dict[str, Trace]) -> None:
    """Have a trace of each answer that is made here for a reader, and of no other."""
    wanted = {
        stream_id
        for stream_id, stream in streams.items()
        if stream.lease.is_held and stream.is_live and stream.readers.num_holding
    }
    for stream_id in traces.keys() - wanted:
        traces.pop(stream_id).end()
    for stream_id in wanted:
        trace = traces.get(stream_id) or traces.setdefault(stream_id, Trace(streams[stream_id]))
        trace.begin()


def answer_report(stream: Stream, trace: Trace | None = None) -> Report:
    """Return how far an answer is, whether this process makes it, its reader here, and its newest tokens' times."""
    summary = stream.summary()
    readers = [reader for reader in stream.readers.attached if not reader.is_watcher]
    return {
        "is_made_here": stream.lease.is_held and stream.is_live,
        "state": summary.state if stream.is_live else "ended",
        "reason": summary.park_reason,
        "tokens": summary.completion_tokens,
        "last_seq": stream.last_seq,
        "reader": _reader_report(readers[-1]) if readers else None,
        "trace": [] if trace is None else trace.report(),
    }


def _reader_report(reader: Attachment) -> Report:
    sent = getattr(reader, "sent_seq", reader.received_seq)
    return {"sent_seq": sent, "received_seq": reader.received_seq, "is_away": reader.is_away}


def write(folder: Path, report: Report) -> None:
    """Replace this process's file: another process reads the old report or the new one, whole."""
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
        json.dump(report, file)
    os.replace(file.name, folder / f"{report['pid']}.json")


def read(folder: Path) -> list[Report]:
    """Return the reports of the processes that live, the oldest process first; none without a folder."""
    found = []
    for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem)):
        try:
            if time.time() - path.stat().st_mtime <= STALE_SECONDS and is_alive(int(path.stem)):
                found.append(json.loads(path.read_text()))
        except FileNotFoundError:
            continue
    return found


def is_alive(pid: int) -> bool:
    """Whether that process has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is of another user
        pass
    return True


def merged(reports: Iterable[Report], stream_id: str) -> Report:
    """Return the web processes, the engine and the answer, from what each process reported.

    The answer is as its maker reported it, its reader as the process that the reader is connected to.
    """
    reports = list(reports)
    answers = {report["pid"]: report["answers"].get(stream_id) for report in reports}
    known = [answer for answer in answers.values() if answer is not None]
    maker = next((answer for answer in known if answer["is_made_here"]), None)
    best = maker or max(known, key=lambda answer: answer["last_seq"], default=None)
    reader = next((answer["reader"] for answer in known if answer["reader"]), None)
    web = [
        {
            "pid": pid,
            "makes": answer is not None and answer["is_made_here"],
            "is_read": answer is not None and answer["reader"] is not None,
        }
        for pid, answer in answers.items()
    ]
    engines = [report["engine"] for report in reports if report["engine"]["pid"] is not None]
    return {
        "web": web,
        "engine": engines[-1] if engines else (reports[-1]["engine"] if reports else None),
        "answer": None if best is None else {**best, "reader": reader, "is_made": maker is not None},
    }
