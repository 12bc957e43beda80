"""Plain ASGI, for any framework: `app` serves all routes; `StreamMiddleware`, `respond` and FlowServer are its parts.

Names are imported on first use (PEP 562), because every command of a site imports FlowServer's config from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamserve.api.answers import Defaults
    from streamserve.api.call import Caller
    from streamserve.asgi.application import StreamApp as app
    from streamserve.asgi.application import anyone

__all__ = ["Caller", "Defaults", "anyone", "app"]

_NAMES = {
    "Caller": ("streamserve.api.call", "Caller"),
    "Defaults": ("streamserve.api.answers", "Defaults"),
    "anyone": ("streamserve.asgi.application", "anyone"),
    "app": ("streamserve.asgi.application", "StreamApp"),
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    return getattr(importlib.import_module(module), attribute)
