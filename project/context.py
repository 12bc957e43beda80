"""What the demo's chat page offers: the assistant and its questions, or the model alone where it answers nonsense."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest

from project.help.assistant import FIRST_TOKEN_SECONDS, TOTAL_SECONDS

# Each is answered by a passage (tests/project/test_suggestions.py).
SUGGESTIONS = (
    "How do I pause my subscription?",
    "What does the Team plan cost?",
    "Is there a discount for students?",
    "What happens to my notebooks after I cancel?",
)


def assistant(request: HttpRequest) -> dict[str, Any]:
    """Return `assistant` for the home page's template."""
    pipelines, models = ["billing", "account_review"], [one for one in settings.STREAMSERVE["MODELS"] if one != "lab"]
    return {
        "assistant": {
            "models": models + pipelines if models == ["echo"] else pipelines + models,
            "suggestions": SUGGESTIONS,
            "first_token_budget": FIRST_TOKEN_SECONDS,
            "total_budget": TOTAL_SECONDS,
        }
    }
