"""`read_key`: the key of a server elsewhere, from the environment only, so that no settings file and no log has it."""

from __future__ import annotations

import os

from streamserve.clients.remote.config import RemoteConfig


def read_key(config: RemoteConfig) -> str:
    """Return the key; "" where none is named, or the variable is not set."""
    return os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
