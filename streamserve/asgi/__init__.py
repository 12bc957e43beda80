"""Plain ASGI, for any framework: `app` is the whole of it; `StreamMiddleware`, `respond` and FlowServer are its parts.

Imported on first use (PEP 562): the options of FlowServer, which every command of a site reads, need none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamserve.asgi.callers import Caller, anyone
    from streamserve.asgi.stream_app import StreamApp as app

__all__ = ["Caller", "anyone", "app"]

_NAMES = {
    "Caller": ("streamserve.asgi.callers", "Caller"),
    "anyone": ("streamserve.asgi.callers", "anyone"),
    "app": ("streamserve.asgi.stream_app", "StreamApp"),
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    return getattr(importlib.import_module(module), attribute)
