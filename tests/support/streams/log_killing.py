"""Kills processes that write logs with kill -9, and checks the logs afterwards."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from streamserve.protocol.events import Token
from streamserve.streams.log.base import EventLog
from tests.support.streams.logs import everything

_ROOT = Path(__file__).resolve().parents[3]
_START_SECONDS = 60.0
_CHUNK = 1 << 16


class Writer:
    """A `log_writer` process. `acknowledged`: the events it has acknowledged, as (log_id, fence, seq, text)."""

    def __init__(self, place: str, name: str, log_ids: Sequence[str], fences: str = "1,0") -> None:
        command = [sys.executable, "-m", "tests.support.streams.log_writer", place, name, ",".join(log_ids), fences]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE)
        self._output = bytearray()
        self._has_begun = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self) -> None:
        """Wait for the first acknowledgement."""
        assert self._has_begun.wait(_START_SECONDS), "the writer acknowledges nothing"

    def kill(self) -> None:
        """End it with kill -9."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    @property
    def acknowledged(self) -> list[tuple[str, int, int, str]]:
        whole = bytes(self._output).rpartition(b"\n")[0].decode()
        rows = (line.split(" ") for line in whole.splitlines())
        return [(log_id, int(fence), int(seq), text) for log_id, fence, seq, text in rows]

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := os.read(output.fileno(), _CHUNK):
                self._output += data
                self._has_begun.set()
        self._has_begun.set()


def kill_in_turn(writers: Sequence[Writer], rng: random.Random) -> None:
    """Kill each writer at a random moment of its work."""
    for writer in writers:
        writer.wait()
    for writer in writers:
        time.sleep(rng.uniform(0.0, 0.05))
        writer.kill()


async def check(log: EventLog, writers: Sequence[Writer]) -> int:
    """Check every log against the acknowledged events, and return how many these were.

    Each seq once, without a gap; each text once, in its writer's order, batches whole; acknowledged events under their
    seq; fences never decrease.
    """
    rows = [row for writer in writers for row in writer.acknowledged]
    for log_id in sorted({row[0] for row in rows}):
        found = await everything(log, log_id)
        assert [one.seq for one in found] == list(range(1, len(found) + 1))
        texts = [one.event.text for one in found if isinstance(one.event, Token)]
        acknowledged = {seq: text for row_log_id, _, seq, text in rows if row_log_id == log_id}
        assert {seq: texts[seq - 1] for seq in acknowledged} == acknowledged
        fences = [int(text.split(":")[1]) for text in texts]
        assert fences == sorted(fences)
        for name in {text.split(":")[0] for text in texts}:
            numbers = [int(text.split(":")[2]) for text in texts if text.split(":")[0] == name]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) in _whole_batches(len(numbers))
    return len(rows)


def _whole_batches(most: int) -> set[int]:
    """Return the lengths that a log without a torn batch can have: they grow by 1 + length % 3."""
    lengths = [0]
    while lengths[-1] < most:
        lengths.append(lengths[-1] + 1 + lengths[-1] % 3)
    return set(lengths)
