"""`get_logger`: log lines that are an event with fields, in the standard library's logging tree.

    log = get_logger(__name__)
    log.info("stream_finished", stream_id=..., ttft_ms=...)

The line is "stream_finished stream_id=… ttft_ms=…"; the record also has `event` and `fields`, for formatters that write
JSON. A site's `LOGGING` rules it by the logger's name, "streamserve" and below. The site's configuration of structlog
does not matter; fields that it has bound (`structlog.contextvars`) are in the line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import MutableMapping
from typing import Any, cast

import structlog

_ABOVE = 4  # frames from logging's method up to the line that logs: structlog's
_NEEDS_QUOTES = frozenset(' "=')


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger of events below "streamserve"."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    return cast(structlog.stdlib.BoundLogger, logger)


def _to_record(
    logger: logging.Logger, method: str, fields: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """Return the arguments of logging's own method. The last processor."""
    event = fields.pop("event")
    options = {name: fields.pop(name) for name in ("exc_info", "stack_info") if name in fields}
    given = dict(fields)
    text = " ".join([event, *(f"{name}={_quoted(value)}" for name, value in given.items() if value is not None)])
    above = _ABOVE + (method == "error" and options.get("exc_info") is True)  # `exception` calls `error`
    return (text,), {**options, "stacklevel": above, "extra": {"event": event, "fields": given}}


def _quoted(value: object) -> str:
    text = str(value)
    if not text.isprintable():  # escapes of terminals, and line ends that are not ASCII
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if not text or _NEEDS_QUOTES.intersection(text) else text
