"""The stream fixtures, here too."""

from tests.streams.conftest import echo, echo_streams, gate, scripted, streams

__all__ = ["echo", "echo_streams", "gate", "scripted", "streams"]
