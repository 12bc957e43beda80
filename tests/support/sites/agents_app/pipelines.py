"""A pipeline that shows all that AG-UI has, and a pipeline that fails."""

from __future__ import annotations

from streamserve import Run, pipeline, tool


@tool(confirm=lambda number: f"Cancel invoice {number}?")
def cancel_invoice(number: int) -> str:
    """Cancel an invoice."""
    return f"Invoice {number} is cancelled."


def find(city: str) -> str:
    """Return the weather of a city."""
    return f"Weather report of {city}: sunny"


@pipeline
async def guide(run: Run) -> None:
    """Look, and answer."""
    run.state["asked"] = run.question
    run.state["found"] = []
    found = await run.step("Look", lambda: [1, 2])
    run.cite("help", id="7", title="Prices", url="/help/7/")
    for number in found:
        run.state["found"].append(number)
    run.emit("chart", {"points": found})
    await run.step("Write", run.generate, run.question, tools=[find, cancel_invoice], max_tokens=200)


@pipeline
async def broken(run: Run) -> None:
    """Fail in the middle of a text and a step."""
    await run.step("Look", run.say, "It is ")
    raise RuntimeError("broken")
