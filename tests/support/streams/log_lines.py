"""`captured_events`: the log lines below "streamserve" while a block runs, as dicts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        event = getattr(record, "event", record.getMessage())
        line = {**fields, "event": event, "log_level": record.levelname.lower(), "logger": record.name}
        if record.exc_info:
            line["cause"] = str(record.exc_info[1])
        self.lines.append(line)


@contextlib.contextmanager
def captured_events() -> Iterator[list[dict[str, Any]]]:
    """Yield the list of the lines so far: `event`, `log_level`, `logger`, the `cause` of a failure, and the fields."""
    collector, logger = _Collector(), logging.getLogger("streamserve")
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.DEBUG)
    try:
        yield collector.lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
