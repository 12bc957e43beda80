"""The names that a key's list may have: the site's models and pipelines."""

from __future__ import annotations

from collections.abc import Iterable

from streamserve.clients.pipeline.client import PIPELINES
from streamserve.conf import get_settings
from streamserve.conf_reader import nearest


def known_names() -> tuple[str, ...]:
    """Return the names of all models, embedding models and pipelines."""
    return (*get_settings().models, *get_settings().embedding_models, *PIPELINES)


def complaint_about(names: Iterable[str]) -> str:
    """Return what is wrong with the first name that is neither a model nor a pipeline; "" if all are."""
    known = known_names()
    for name in names:
        if name not in known:
            hint = nearest(name, known) or f"There are: {', '.join(known)}."
            return f"There is no model or pipeline {name[:100]!r}. {hint}"
    return ""
