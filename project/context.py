"""What the demo's chat page says of itself and offers: the assistants and their questions, or the model alone."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest

from project.help.assistant import FIRST_TOKEN_SECONDS, TOTAL_SECONDS

# Each is answered by a passage (tests/project/test_suggestions.py).
SUGGESTIONS = (
    "What is Quillbox?",
    "What does the Team plan cost?",
    "how do i cancle my subscription",
    "Gibt es einen Rabatt für Studenten?",
)
INTRO = (
    "You are a customer of Quillbox, an invented notebook app, and this is its help desk. It answers from Quillbox's "
    "help pages, and names the page behind each answer. Typing errors and other languages are welcome."
)
TITLES = {"helpdesk": "The model alone"}  # a pipeline brings its own


def assistant(request: HttpRequest) -> dict[str, Any]:
    """Return `assistant` for the home page's template."""
    pipelines, models = ["billing", "account_review"], [one for one in settings.STREAMSERVE["MODELS"] if one != "lab"]
    offered = models + pipelines if models == ["echo"] else pipelines + models
    return {
        "assistant": {
            "models": {alias: "" if alias in pipelines else TITLES.get(alias, f"{alias} alone") for alias in offered},
            "intro": INTRO,
            "suggestions": SUGGESTIONS,
            "first_token_budget": FIRST_TOKEN_SECONDS,
            "total_budget": TOTAL_SECONDS,
        }
    }
