"""A pipeline that shows everything a page can show: steps, a note, sources, text."""

from __future__ import annotations

from streamserve import Run, pipeline, tool


@pipeline(model="echo")
async def bills(run: Run) -> None:
    """Answer from passages."""
    passages: list[str] = await run.step("Looking up", lambda: ["one two three"] * 5, of=2)
    run.cite("help", id="7", title="Prices", url="/help/7/")
    run.cite("help", id="7", title="Prices", url="/help/7/")
    run.cite("web", id="8", title="<b>Elsewhere</b>", url="https://example.com/a?b=c")
    for number, url in enumerate(("javascript:alert(1)", "//example.com/x", "/\\example.com", "data:text/html,x")):
        run.cite("bad", id=f"bad {number}", url=url)
    await run.trim(passages, max_tokens=30)
    await run.step("Writing", run.generate, "billing words", of=2)


@tool(confirm=lambda number, why: f"Cancel invoice {number}?")
def cancel_invoice(number: int, why: str) -> str:
    """Cancel an invoice."""
    return f"Invoice {number} is cancelled."


@pipeline(model="echo")
async def invoices(run: Run) -> None:
    """Cancel an invoice, after its user has allowed it."""
    await run.generate("invoice please", tools=[cancel_invoice], max_tokens=400)
