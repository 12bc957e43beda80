"""Pipelines: with an input of a schema of its own, and for the users of a permission alone."""

from __future__ import annotations

from streamserve import Run, pipeline

SCHEMA = {
    "type": "object",
    "properties": {"order": {"$ref": "#/$defs/Order"}},
    "required": ["order"],
    "additionalProperties": False,
    "$defs": {"Order": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}},
}


@pipeline(input_schema=SCHEMA)
async def order(run: Run) -> None:
    """Find an order."""
    await run.say(f"Order {run.input.get('order')}")


@pipeline(permission="auth.add_user")
async def payroll(run: Run) -> None:
    """Read the payroll."""
    await run.say("100")
