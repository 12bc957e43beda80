"""Plain ASGI, for any framework: `app` is the whole of it; `StreamMiddleware`, `respond` and FlowServer its parts."""

from streamserve.asgi.app import app
from streamserve.asgi.callers import Caller, anyone

__all__ = ["Caller", "anyone", "app"]
