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
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
