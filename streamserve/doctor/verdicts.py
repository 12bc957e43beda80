"""`Verdict`: what a check says of one address. Values only."""

from __future__ import annotations

from dataclasses import dataclass

OK, FOUND, LIMIT, UNKNOWN = "ok", "found", "limit", "could not tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a check. `said` is a sentence for people.

    `fault` is the name of what was found; docs/troubleshooting.md has a heading for each. `hops` are the proxies in
    which it may lie. A "limit" was found in a proxy of which no line mends it.
    """

    check: str
    state: str
    said: str
    fault: str = ""
    hops: tuple[str, ...] = ()


def ok(check: str, said: str) -> Verdict:
    """Return the verdict that nothing is wrong."""
    return Verdict(check=check, state=OK, said=said)


def found(check: str, fault: str, said: str) -> Verdict:
    """Return the verdict that something is."""
    return Verdict(check=check, state=FOUND, said=said, fault=fault)


def unknown(check: str, said: str) -> Verdict:
    """Return the verdict that the check cannot tell, and why."""
    return Verdict(check=check, state=UNKNOWN, said=said)
