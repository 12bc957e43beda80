"""Faults to plant in the engine, one file per part of it; every law of README.md has at least one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: in `file` of `streamserve/engine/`, `old` (which occurs there once) becomes `new`.

    `law` is the number in README.md of the law that it breaks; the simulation may notice it by another law.
    """

    name: str
    law: int
    file: str
    old: str
    new: str
