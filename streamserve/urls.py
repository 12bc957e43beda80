"""HTTP routes. Include them at the root: `path("", include("streamserve.urls"))`. Each view has declared its access."""

from __future__ import annotations

from django.urls import path, register_converter

from streamserve.web import views_native as views
from streamserve.web import views_openai, views_ops, views_watch
from streamserve.web.access import declared

app_name = "streamserve"


class StreamIdConverter:
    """128 random bits in hex; anything else is not an id, and no query is made for it."""

    regex = "[0-9a-f]{32}"

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: str) -> str:
        return value


register_converter(StreamIdConverter, "stream_id")

urlpatterns = [
    path("streams", declared(views.start_stream), name="streams"),
    path("streams/new", declared(views.new_stream), name="new_stream"),
    path("streams/<stream_id:stream_id>", declared(views.stream_state), name="stream"),
    path("streams/<stream_id:stream_id>/events", declared(views.stream_events), name="stream_events"),
    path("streams/<stream_id:stream_id>/stop", declared(views.stop_stream), name="stop_stream"),
    path("streams/<stream_id:stream_id>/watch", declared(views_watch.watch_stream), name="watch_stream"),
    path("streams/<path:path>", declared(views_ops.unknown)),
    path("v1/chat/completions", declared(views_openai.chat_completions), name="chat_completions"),
    path("v1/models", declared(views_openai.models), name="models"),
    path("v1/<path:path>", declared(views_openai.unknown)),
    path("livez", declared(views_ops.livez), name="livez"),
    path("readyz", declared(views_ops.readyz), name="readyz"),
    path("metrics", declared(views_ops.metrics), name="metrics"),
]
