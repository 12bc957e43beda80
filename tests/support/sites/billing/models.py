"""What the receivers write."""

from __future__ import annotations

from django.db import models


class Bill(models.Model):
    """A start or an end that was told of, with the tokens of the answer."""

    kind = models.CharField(max_length=16)
    stream_id = models.CharField(max_length=32)
    prompt_tokens = models.PositiveIntegerField(default=0)
    completion_tokens = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.kind} {self.stream_id}"
