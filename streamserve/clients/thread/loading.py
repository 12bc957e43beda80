"""`Loading`: how far an engine is, from its idle state to ready or failed, as its description shows it.

Changed by the thread that loads; read on any thread, as the description is replaced whole. Knows no core and no step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from streamserve.clients.thread.acceptance import LoadedEngine
from streamserve.protocol.engine import ModelDescription


class Loading:
    """idle → loading → ready, and from each of these → failed."""

    def __init__(self, alias: str, clock: Callable[[], float]) -> None:
        self.description = ModelDescription(alias=alias, state="idle", created=int(time.time()))
        self._clock = clock
        self._began_at = 0.0
        self._over = threading.Event()

    @property
    def is_idle(self) -> bool:
        """Whether loading has not begun."""
        return self.description.state == "idle"

    def begin(self) -> None:
        """Start to count the time."""
        self._began_at = self._clock()
        self._change(state="loading", stage="starting")

    def report(self, stage: str, fraction: float, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
        """Show what is being loaded, and how much of it there is."""
        self._change(stage=stage, fraction=fraction, loaded_bytes=loaded_bytes, total_bytes=total_bytes)

    def succeed(self, engine: LoadedEngine) -> None:
        """Describe the engine that serves from now on."""
        self._change(
            state="ready",
            stage="ready",
            fraction=1.0,
            elapsed_seconds=self._clock() - self._began_at,
            max_model_len=engine.max_tokens,
            has_chat_template=engine.tokenizer.has_chat_template,
            dtype=engine.facts.dtype,
            device=engine.facts.device,
            linears=engine.facts.linears,
            num_parameters=engine.facts.num_parameters,
        )
        self._over.set()

    def fail(self, message: str) -> None:
        """Show why there is no engine, or none any more."""
        self._change(state="failed", message=message)
        self._over.set()

    def wait(self) -> None:
        """Wait until it is over, in either way. Blocks."""
        self._over.wait()

    def describe(self) -> ModelDescription:
        """Return the description; while loading, with the seconds it has taken so far."""
        description = self.description
        if description.state != "loading":
            return description
        return replace(description, elapsed_seconds=self._clock() - self._began_at)

    def _change(self, **changes: object) -> None:
        self.description = replace(self.description, **changes)  # type: ignore[arg-type]
