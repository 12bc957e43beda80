"""`story`: a long run with steps. `invoices`: a short run with a schema. `broken`: a run that fails."""

from __future__ import annotations

from streamserve import Run, pipeline

YEAR = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}


@pipeline()
async def story(run: Run) -> None:
    """Tell a story."""
    for part in (1, 2, 3):
        await run.step(f"Part {part}", run.generate, f"{run.question} {part}", of=3, max_tokens=30, ignore_eos=True)


@pipeline(input_schema=YEAR)
async def invoices(run: Run) -> str:
    """List a year's invoices."""
    return f"None in {run.input['year']}."


@pipeline()
async def broken(run: Run) -> None:
    """Fail."""
    raise ValueError("a reason")
