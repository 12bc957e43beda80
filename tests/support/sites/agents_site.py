"""Settings: the demo site with an echo engine that thinks and calls, and the pipelines of agents_app."""

from __future__ import annotations

import json
from typing import Any

from project.settings import *  # noqa: F403
from project.settings import INSTALLED_APPS as DEMO_APPS
from project.settings import STREAMSERVE as DEMO


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


INSTALLED_APPS = [*DEMO_APPS, "tests.support.sites.agents_app"]
STREAMSERVE = {
    **DEMO,
    "CONVERSATIONS": True,
    "MODELS": {
        "echo": {
            "PATH": "echo",
            "FORMAT": "qwen3",
            "ANSWERS": {
                "Weather report": "It is sunny.",
                "is cancelled": "Done.",
                "refused": "As you like.",
                "sky": _call("find", city="Oslo"),
                "drop it": _call("cancel_invoice", number=7),
                "ponder": "<think>Hm. Let me see.</think>Yes.",
                "long": " ".join(f"Word {number}." for number in range(30)),
                "hello": "Hi! 🎉",
            },
        }
    },
    "DEFAULT_MODEL": "echo",
    "ECHO_STEP_SECONDS": 0.01,
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 1000},
}
