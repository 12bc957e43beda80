"""Faults to plant in the engine, one file per part of it; every law of README.md has at least one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: in `file` of `streamserve/engine/`, `old` (which stands there once) becomes `new`.

    `law` is the number in README.md of the law it breaks; the simulation may well notice it by another.
    """

    name: str
    law: int
    file: str
    old: str
    new: str
