"""Figures in words, for the pages of the admin. Pure."""

from __future__ import annotations


def in_words(seconds: float | None) -> str:
    """Return a time with its unit; "–" for none."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{max(1, round(1000 * seconds))} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
