"""Connects the receivers in every process of the site."""

from __future__ import annotations

import random
import time
from typing import Any

from django.apps import AppConfig
from django.db import transaction

_MOST_SECONDS = 0.02  # so that a kill finds a receiver between its write and the commit now and then


class BillingConfig(AppConfig):
    """See above."""

    name = "tests.support.sites.billing"
    label = "billing"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Connect."""
        from streamserve.signals import answer_finished, answer_started

        answer_started.connect(_start)
        answer_finished.connect(_finish)


def _start(stream_id: str, **told: Any) -> None:
    _bill("start", stream_id)


def _finish(stream_id: str, usage: Any, **told: Any) -> None:
    _bill("end", stream_id, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
    time.sleep(random.random() * _MOST_SECONDS)


def _bill(kind: str, stream_id: str, **tokens: int) -> None:
    from tests.support.sites.billing.models import Bill

    assert transaction.get_connection().in_atomic_block
    Bill.objects.create(kind=kind, stream_id=stream_id, **tokens)
