"""streamserve: stream language-model answers from a Django site, with an engine of its own.

    from streamserve import acomplete, complete, stream      docs/python.md
    from streamserve import aembed, embed                    docs/embeddings.md
    from streamserve import Run, Static, pipeline, run_pipeline, tool      docs/pipelines.md
    from streamserve import current_run, http_client, openai_client      docs/agents.md
    from streamserve import aenqueue_job, enqueue_job        docs/jobs.md
    from streamserve import answer_finished, job_finished    docs/signals.md, which has all five

They are imported on first use (PEP 562): the package itself imports neither Django nor the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamserve.clients.pipeline.client import pipeline as pipeline
    from streamserve.clients.pipeline.run import Run as Run
    from streamserve.clients.pipeline.run import current_run as current_run
    from streamserve.clients.pipeline.static import Static as Static
    from streamserve.clients.pipeline.tools import tool as tool
    from streamserve.signals import answer_finished as answer_finished
    from streamserve.signals import answer_refused as answer_refused
    from streamserve.signals import answer_started as answer_started
    from streamserve.signals import job_finished as job_finished
    from streamserve.signals import message_rated as message_rated
    from streamserve.web.calls.answers import acomplete as acomplete
    from streamserve.web.calls.answers import aenqueue_job as aenqueue_job
    from streamserve.web.calls.answers import complete as complete
    from streamserve.web.calls.answers import enqueue_job as enqueue_job
    from streamserve.web.calls.answers import run_pipeline as run_pipeline
    from streamserve.web.calls.answers import stream as stream
    from streamserve.web.calls.embeddings import aembed as aembed
    from streamserve.web.calls.embeddings import embed as embed
    from streamserve.web.calls.transport import http_client as http_client
    from streamserve.web.calls.transport import openai_client as openai_client

__version__ = "0.2.0"

_HOMES = {
    "acomplete": "streamserve.web.calls.answers",
    "complete": "streamserve.web.calls.answers",
    "stream": "streamserve.web.calls.answers",
    "http_client": "streamserve.web.calls.transport",
    "openai_client": "streamserve.web.calls.transport",
    "aenqueue_job": "streamserve.web.calls.answers",
    "enqueue_job": "streamserve.web.calls.answers",
    "run_pipeline": "streamserve.web.calls.answers",
    "aembed": "streamserve.web.calls.embeddings",
    "embed": "streamserve.web.calls.embeddings",
    "pipeline": "streamserve.clients.pipeline.client",
    "Run": "streamserve.clients.pipeline.run",
    "current_run": "streamserve.clients.pipeline.run",
    "Static": "streamserve.clients.pipeline.static",
    "tool": "streamserve.clients.pipeline.tools",
    "answer_finished": "streamserve.signals",
    "answer_refused": "streamserve.signals",
    "answer_started": "streamserve.signals",
    "job_finished": "streamserve.signals",
    "message_rated": "streamserve.signals",
}


def __getattr__(name: str) -> Any:
    """Import a name of the Python API."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
