"""Receivers of a signal, connected while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.dispatch import Signal


@contextmanager
def connected(signal: Signal, *receivers: Callable[..., Any]) -> Iterator[None]:
    """Connect receivers while the block runs."""
    for receiver in receivers:
        signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        for receiver in receivers:
            signal.disconnect(receiver)
