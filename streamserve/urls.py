"""HTTP routes, and the ready chat page at `chat/`. Include them at the root: `path("", include("streamserve.urls"))`.

The table of routes is api/routes.py.
"""

from __future__ import annotations

from django.urls import path, register_converter
from django.urls.converters import StringConverter

from streamserve.api.routes import CONVERTERS, ROUTES
from streamserve.web.probe import probe
from streamserve.web.ready_page import ready_route
from streamserve.web.shared_page import shared_page
from streamserve.web.views import view_of

app_name = "streamserve"


class StreamIdConverter(StringConverter):
    """128 random bits in hex; anything else is not an id, and no query is made for it."""

    regex = CONVERTERS["stream_id"]


class RestConverter(StringConverter):
    """All that is left of a path, also nothing."""

    regex = CONVERTERS["rest"]


class NameConverter(StringConverter):
    """The name of a pipeline."""

    regex = CONVERTERS["pipeline_name"]


class PartConverter(StringConverter):
    """A part of a path: a model's name, or a client's own id."""

    regex = CONVERTERS["part"]


class FileIdConverter(StringConverter):
    """The id of a file or a batch, or what looks like an id: its endpoint decides."""

    regex = CONVERTERS["file_id"]


class ChatIdConverter(StringConverter):
    """A client's own id of a conversation: its endpoint decides."""

    regex = CONVERTERS["chat_id"]


register_converter(StreamIdConverter, "stream_id")
register_converter(RestConverter, "rest")
register_converter(NameConverter, "pipeline_name")
register_converter(PartConverter, "part")
register_converter(FileIdConverter, "file_id")
register_converter(ChatIdConverter, "chat_id")

urlpatterns = [
    ready_route("chat/", name="chat"),
    path("shared/<str:token>", shared_page, name="shared"),
    path("streams/doctor", probe, name="doctor"),  # before what answers all of /streams/
    *(path(route.path, view_of(route), name=route.name or None) for route in ROUTES),
]
