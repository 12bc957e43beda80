"""The pipeline that a task of Django's framework queues."""

from __future__ import annotations

from streamserve import Run, pipeline


@pipeline()
async def review(run: Run) -> str:
    """Review an account."""
    return f"account {run.input['account']}"
