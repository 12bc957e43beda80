"""A folder for engine processes, which ends what listens in it."""

from tests.clients.conftest import folder

__all__ = ["folder"]
