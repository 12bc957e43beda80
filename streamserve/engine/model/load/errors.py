"""Why a model cannot be loaded; each message names the problem and the way out, for the operator:

ModelLoadError
├── ModelNotFound      no folder there, or no such repository on the hub
├── HubUnreachable     the hub is offline or was switched off
├── NoSafetensors      the folder has no weights we read
└── UnsupportedModel   our attention would not compute what the model means
"""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be loaded as configured."""


class ModelNotFound(ModelLoadError):
    """Nothing is at that path or under that name."""


class HubUnreachable(ModelLoadError):
    """The name is a hub id, and the hub does not answer."""


class NoSafetensors(ModelLoadError):
    """There are weights, but only in formats that can run code or that we do not read."""


class UnsupportedModel(ModelLoadError):
    """The architecture would give wrong answers in this engine."""
