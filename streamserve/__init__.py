"""streamserve: stream language-model answers from a Django site, with an engine of its own.

    from streamserve import acomplete, complete, stream      docs/python.md

They are imported on first use (PEP 562): the package itself imports neither Django nor the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamserve import _moved as _moved

if TYPE_CHECKING:
    from streamserve.web.calls.answers import acomplete as acomplete
    from streamserve.web.calls.answers import complete as complete
    from streamserve.web.calls.answers import stream as stream

__version__ = "0.1.0"

_CALLS = ("acomplete", "complete", "stream")


def __getattr__(name: str) -> Any:
    """Import a function of the Python API."""
    if name not in _CALLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamserve.web.calls import answers

    return getattr(answers, name)
