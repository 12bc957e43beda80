"""A pipeline that shows everything a page can show: steps, a note, sources, text."""

from __future__ import annotations

from streamserve import Run, pipeline


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
