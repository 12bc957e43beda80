"""Old import paths that documents named, for one version: each gives the module at its new path and a warning.

An old path that is now a folder (`streamserve.streams.log`) needs no line here: its `__init__.py` has the names.
Any thread. Knows modules by name only. Source: docs.python.org/3/reference/import.html#the-meta-path.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

# Old path -> new path.
MOVED = {
    "streamserve.asgi.flow_server": "streamserve.asgi.flow.install",
    "streamserve.asgi.harden": "streamserve.asgi.hardening",
    "streamserve.asgi.callers": "streamserve.api.call",
    "streamserve.asgi.respond": "streamserve.asgi.handover",
    "streamserve.clients.host": "streamserve.clients.process.server",  # so a running 0.1.0 starts its engine
    "streamserve.runtime": "streamserve.web.site",
    "streamserve.streams.delivery": "streamserve.streams.reader.delivery",
    "streamserve.streams.directory": "streamserve.streams.registry",
    "streamserve.streams.file_log": "streamserve.streams.log.file_log",
    "streamserve.streams.redis_log": "streamserve.streams.log.redis_log",
    "streamserve.views": "streamserve.web.chat_page",
}
# What `python -m <old path>` runs.
COMMANDS = {"streamserve.asgi.flow_server": "streamserve.asgi.flow"}


class MovedModules:
    """Finds and loads the modules of MOVED. Stands last in `sys.meta_path`: asked only for what is not there.

    It does not derive from importlib.abc, whose import takes 30 ms.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module that has moved. Its origin becomes `sys.argv[0]` of `python -m`."""
        loader: Any = self
        return ModuleSpec(name, loader, origin=name) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave the making of a module to importlib; `exec_module` replaces it."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module at its new path into the old one's place, where the import statement takes it from."""
        old = module.__name__
        warnings.warn(f"{old} has moved to {MOVED[old]}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(MOVED[old])

    def get_code(self, name: str) -> CodeType:
        """Return the program that `python -m <old path>` runs. The warning is shown as the main program's own."""
        message = f"python -m {name} is now python -m {COMMANDS[name]}"
        warnings.warn_explicit(message, DeprecationWarning, filename=name, lineno=1, module="__main__")
        program = f"{COMMANDS[name]}.__main__"
        loader: Any = getattr(importlib.util.find_spec(program), "loader", None)
        code: CodeType = loader.get_code(program)
        return code


_FINDER: Any = MovedModules()
sys.meta_path.append(_FINDER)
