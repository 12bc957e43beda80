"""What a probe is told of the models: ready or not, why, and how far loading has come. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from streamserve.protocol.stats import ModelDescription

# What a state means to whoever asks, where the engine itself says nothing.
_STATE_WORDS = {
    "paused": "The model is paused by an operator, and goes on when it is resumed.",
    "draining": "The model takes nothing new: it is to be stopped or replaced.",
    "failed": "The model cannot be used. The server's log says why.",
}


def readiness(
    descriptions: Iterable[ModelDescription], *, shows_messages: bool, is_going_down: bool
) -> tuple[int, dict[str, Any]]:
    """Return status (200 while every model is ready, else 503) and body of `/readyz`.

    `shows_messages`: engines' own words, which name folders and libraries: for the developer only.
    """
    models = list(descriptions)
    reasons = ["this process is going down"] if is_going_down else []
    reasons += [f"{model.alias} is {model.state}" for model in models if model.state != "ready"]
    progress = [_progress(model, shows_messages) for model in models]
    return 503 if reasons else 200, {"ready": not reasons, "reason": ", ".join(reasons), "models": progress}


def _progress(model: ModelDescription, shows_messages: bool) -> dict[str, Any]:
    return {
        "alias": model.alias,
        "state": model.state,
        "stage": model.stage,
        "fraction": round(model.fraction, 3),
        "loaded_bytes": model.loaded_bytes,
        "total_bytes": model.total_bytes,
        "elapsed_seconds": round(model.elapsed_seconds, 2),
        "message": (shows_messages and model.message) or _STATE_WORDS.get(model.state, ""),
    }
