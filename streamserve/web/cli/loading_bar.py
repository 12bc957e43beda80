"""`LoadingBar`: the progress of a loading model, in one line of a terminal, elsewhere with a line for each stage.

For the commands and for `make run`. Knows neither engines nor HTTP, only `ModelDescription`.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from typing import Any, TextIO

from streamserve.protocol.engine import ModelDescription

_BAR_LEN = 24


class LoadingBar:
    """Draws on `out`, until `close`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.is_closed = False
        self._is_terminal = out.isatty()
        self._stage = ""

    def show(self, model: ModelDescription) -> None:
        """Show the progress in `model`."""
        stage = model.stage or model.state
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"\r{progress_line(model)[:width]:<{width}}")
        elif stage != self._stage:
            self._out.write(f"{progress_line(model, has_bar=False)}\n")
        self._out.flush()
        self._stage = stage

    def close(self) -> None:
        """End the line. Idempotent."""
        if self._is_terminal and self._stage and not self.is_closed:
            self._out.write("\n")
            self._out.flush()
        self.is_closed = True


def progress_line(model: ModelDescription, *, has_bar: bool = True) -> str:
    """Return "helpdesk: weights [████····] 42%, 227 of 540 MB, 3 s", and the engine's message."""
    done = int(_BAR_LEN * model.fraction)
    bar = f" [{'█' * done}{'·' * (_BAR_LEN - done)}]" if has_bar else ""
    parts = [f"{model.fraction:.0%}"]
    if model.total_bytes:
        parts.append(f"{model.loaded_bytes / 1e6:,.0f} of {model.total_bytes / 1e6:,.0f} MB")
    parts.append(f"{model.elapsed_seconds:.0f} s")
    message = f". {model.message}" if model.message else ""
    return f"{model.alias}: {model.stage or model.state}{bar} {', '.join(parts)}{message}"


def description_of(model: Mapping[str, Any]) -> ModelDescription:
    """Return an entry of `/readyz` as a description."""
    names = {field.name for field in dataclasses.fields(ModelDescription)}
    return ModelDescription(**{name: value for name, value in model.items() if name in names})
