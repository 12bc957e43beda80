"""A pipeline whose tool asks its user first."""

from __future__ import annotations

from streamserve import Run, pipeline, tool


@tool(confirm=lambda euros: f"Pay {euros} euros?")
def pay(euros: int) -> str:
    """Pay a bill."""
    return f"Paid {euros} euros."


@pipeline(model="payer")
async def shop(run: Run) -> None:
    """Pay a bill."""
    await run.generate([{"role": "user", "content": run.question}], tools=[pay], max_tokens=200)
