"""`tape`: an answer that a test writes while it is read. Each line of the file that the question names is said."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from streamserve import Run, pipeline
from streamserve.api import durable

TAPES = Path(os.environ["STREAMSERVE_STATE_DIR"]) / "tapes"
END = "end\n"

# Readers without news are answered soon, so that the tests of that do not wait.
durable.POLL_SECONDS = 2.0


@pipeline()
async def tape(run: Run) -> None:
    """Say the lines of the tape as they come, until the line END."""
    path, num_said = TAPES / run.question, 0
    while True:
        text = path.read_text() if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        for line in lines[num_said:]:
            if line == END:
                return
            await run.say(line)
        num_said = len(lines)
        await asyncio.sleep(0.01)
