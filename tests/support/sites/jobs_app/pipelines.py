"""`audit`: a pipeline of every kind of step, which notes each call in the state folder, and waits at two gates."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from streamserve import Run, pipeline
from streamserve.models import JobStep

FOLDER = Path(os.environ.get("STREAMSERVE_STATE_DIR", "/nonexistent"))
GENERATE = {"max_tokens": 40, "ignore_eos": True}


@pipeline()
async def audit(run: Run) -> None:
    """Audit an account."""
    name = await run.step("read", note, run.stream_id, "read", run.question, of=4)
    run.cite("accounts", id="7", title=name)
    await run.generate(f"{name} one", **GENERATE)
    plan = await run.step("plan", run.generate, f"{name} plan", show=False, of=4, **GENERATE)
    await run.step("check", wait, run.stream_id, of=4)
    await run.say(f" [{len(plan.text)}] ")
    _, hidden = await asyncio.gather(  # of two shown ones, the first to begin would be the first to be shown
        run.step("write", run.generate, f"{name} two", of=4, **GENERATE),
        run.generate(f"{name} three", show=False, **GENERATE),
    )
    while (FOLDER / "last_gate").exists():  # noqa: ASYNC110  (a file of another process)
        await asyncio.sleep(0.05)
    await run.say(f" {hidden} The end.")


def note(stream_id: str, step: str, result: str) -> str:
    """Note the call, and whether a result of this step was kept before: then it must not be called."""
    is_kept = JobStep.objects.filter(job__stream_id=stream_id, name=step).exists()
    with (FOLDER / "calls").open("a") as calls:
        calls.write(f"{stream_id} {step} {'repeated' if is_kept else 'called'}\n")
    return result


def wait(stream_id: str) -> str:
    """Note the call, and wait while there is a gate."""
    note(stream_id, "check", "")
    while (FOLDER / "gate").exists():
        time.sleep(0.05)
    return "checked"
