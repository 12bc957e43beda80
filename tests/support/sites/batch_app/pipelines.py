"""Pipelines that append the name of each run to the file LEDGER before they ask their model."""

from __future__ import annotations

import os
from typing import Any

from streamserve.clients.pipeline.client import pipeline


def _note(name: str) -> None:
    """One write of a short line to a file opened for appending is whole or not there."""
    ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(ledger, f"{name}\n".encode())
    finally:
        os.close(ledger)


async def _answer(run: Any) -> None:
    _note(str(run.input["name"]))
    most = int(run.input["max_tokens"])
    await run.generate(str(run.input["question"]), max_tokens=most, ignore_eos=True, temperature=0.0)


@pipeline(model="echo")
async def counted_echo(run: Any) -> None:
    """Count the run, then let the echo engine answer."""
    await _answer(run)


@pipeline(model="helpdesk")
async def counted_help(run: Any) -> None:
    """Count the run, then let the demo model answer."""
    await _answer(run)
