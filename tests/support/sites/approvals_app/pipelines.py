"""`till`: a pipeline that asks before it pays, and notes each call in the state folder."""

from __future__ import annotations

import os
from pathlib import Path

from streamserve import Run, pipeline, tool

FOLDER = Path(os.environ.get("STREAMSERVE_STATE_DIR", "/nonexistent"))


@pipeline()
async def till(run: Run) -> None:
    """Look at a bill, pay it if the user allows it, and say goodbye."""

    @tool(confirm=True)
    def pay(euros: int) -> str:
        """Pay."""
        return note(run.question, "pay", f"Paid {euros} euros.")

    await run.step("look", note, run.question, "look", "found", of=1)
    await run.generate(f"first {run.question}", max_tokens=20, ignore_eos=True)
    await run.generate("please pay", tools=[pay], max_tokens=200)
    await run.generate(f"last {run.question}", max_tokens=60, ignore_eos=True)


def note(of: str, step: str, result: str) -> str:
    with (FOLDER / "calls").open("a") as calls:
        calls.write(f"{of}: {step}\n")
    return result
