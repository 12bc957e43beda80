"""FlowServer, daphne with flow control: its installation and its command line.

    python -m streamserve.asgi.flow app:app --host 127.0.0.1 --port 8000 --connection-bytes 262144

serves any ASGI app, and takes daphne's own options too. `install()` makes the `daphne` command and runserver use it in
place of daphne's stock `Server`. The parts:

    transport      a connection, its limits and flow      requests    HTTP requests and their ends
    server         the server itself                      apps        apps, their messages, lifespans and ends
    ../drain.py    the order of a shutdown

daphne is imported only when it is needed, because that installs Twisted's reactor. On a daphne other than the version
that this was written for (4.2.3), a warning names what is missing, and the stock server serves.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from streamserve.asgi.drain import Drain
from streamserve.asgi.flow.transport import FlowConfig

logger = logging.getLogger("streamserve.asgi")

# module, object, and the attributes of it that are overridden or read. Written for daphne 4.2.3 on Twisted 26.10.
_NEEDED = (
    (
        "daphne.server",
        "Server",
        "run stop protocol_connected protocol_disconnected create_application handle_reply application_checker "
        "timeout_checker kill_all_applications listen_success",
    ),
    (
        "daphne.http_protocol",
        "WebRequest",
        "process handle_reply handle_exception check_timeouts finish duration send_disconnect gotLength "
        "handleContentChunk requestReceived registerProducer unregisterProducer",
    ),
    ("daphne.http_protocol", "HTTPFactory", "buildProtocol"),
    ("daphne.ws_protocol", "WebSocketProtocol", "muted sendCloseFrame STATE_CONNECTING STATE_OPEN check_timeouts"),
    (
        "twisted.web.http",
        "HTTPChannel",
        "allHeadersReceived rawDataReceived allContentReceived requestDone resumeProducing setTimeout registerProducer "
        "forceAbortClient persistent",
    ),
    (
        "twisted.internet.abstract",
        "FileDescriptor",
        "write writeSequence writeSomeData bufferSize dataBuffer offset disconnecting _writeDisconnecting",
    ),
    ("twisted.internet.tcp", "Port", "doRead"),
)
# The names that `Server.run` must use: the factory that is replaced, and the hooks that it calls.
_RUN_NAMES = {"http_factory", "HTTPFactory", "application_checker", "timeout_checker", "kill_all_applications"}


def missing() -> list[str]:
    """Return the names that FlowServer relies on and this daphne lacks. Imports daphne."""
    try:
        lacks = [f"{owner}.{name}" for owner, name in _absent()]
        run = importlib.import_module("daphne.server").Server.run
    except (ImportError, AttributeError) as error:
        return [str(error)]
    return lacks + sorted(f"{name} in daphne.server.Server.run" for name in _RUN_NAMES - set(run.__code__.co_names))


def _absent() -> list[tuple[str, str]]:
    importlib.import_module("daphne.server")  # first: it installs the reactor
    out = []
    for module, name, attributes in _NEEDED:
        owner = getattr(importlib.import_module(module), name)
        out += [(f"{module}.{name}", attribute) for attribute in attributes.split() if not hasattr(owner, attribute)]
    return out


def server_class(options: FlowConfig | None = None, drain: Drain | None = None) -> Any:
    """Return a `Server` class for daphne. Imports daphne. Raises RuntimeError on a daphne that lacks something."""
    lacks = missing()
    if lacks:
        raise RuntimeError(f"FlowServer does not fit this daphne, which lacks {', '.join(lacks)}.")
    from streamserve.asgi.flow.server import FlowServer

    own = {"options": options or FlowConfig(), "drain": drain or Drain(), "__module__": FlowServer.__module__}
    return type("FlowServer", (FlowServer,), own)


def install(options: FlowConfig | None = None, drain: Drain | None = None) -> bool:
    """Make the `daphne` command and runserver use FlowServer; return whether they will.

    Replaces the stock class only: another class there was chosen by the site. Does nothing in a process that has not
    imported daphne's server (uvicorn, migrate), where the import would install Twisted's reactor.
    """
    holders = _holders()
    if not any(_is_stock(getattr(holder, name)) for holder, name in holders):
        return False
    try:
        ours = server_class(options, drain)
    except RuntimeError as error:
        logger.warning("%s Stock daphne serves: a slow reader costs unbounded memory.", error)
        return False
    for holder, name in holders:
        if _is_stock(getattr(holder, name)):
            setattr(holder, name, ours)
    return True


def serves_stock() -> bool:
    """Return whether a `daphne` command or runserver of this process would use daphne's stock server."""
    return any(_is_stock(getattr(holder, name)) for holder, name in _holders())


def _holders() -> list[tuple[Any, str]]:
    """Return what holds the server class: daphne's command line, and runserver when daphne is an app of the site."""
    if "daphne.server" not in sys.modules:
        return []
    holders = [(importlib.import_module("daphne.cli").CommandLineInterface, "server_class")]
    if "daphne.apps" in sys.modules:  # imported by Django's registry; its runserver imports Django
        holders.append((importlib.import_module("daphne.management.commands.runserver").Command, "server_cls"))
    return holders


def _is_stock(cls: Any) -> bool:
    return cls is sys.modules["daphne.server"].Server


def main(args: Sequence[str] | None = None) -> None:
    """Serve an app: `app:app --host --port`, a flag for each field of FlowConfig, and daphne's own options."""
    from daphne.cli import CommandLineInterface

    command = CommandLineInterface()
    command.description = command.parser.description = "daphne with write back-pressure, limits and a graceful drain"
    add_arguments(command.parser)
    given = list(sys.argv[1:] if args is None else args)
    namespace = command.parser.parse_args(given)
    try:
        options = FlowConfig(**{one.name: getattr(namespace, one.name) for one in fields(FlowConfig)})
    except ValueError as error:
        command.parser.error(str(error))
    command.server_class = server_class(options)
    command.run(given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of FlowConfig, and --host, the same as daphne's --bind."""
    parser.add_argument("--host", dest="host", help="The address to listen on; the same as --bind")
    for one in fields(FlowConfig):
        flag, kind = f"--{one.name.replace('_', '-')}", int if isinstance(one.default, int) else float
        parser.add_argument(flag, dest=one.name, type=kind, default=one.default, help=f"(default: {one.default})")
