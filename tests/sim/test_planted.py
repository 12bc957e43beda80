"""The planted faults still fit the engine; `make mutants` shows whether they are caught."""

from __future__ import annotations

import re
from pathlib import Path

from tests.sim.mutants import MUTANTS, ROOT

README = Path(__file__).with_name("README.md").read_text()


def test_every_fault_fits() -> None:
    """The text that a fault changes occurs once in the engine, and the changed file is valid Python."""
    misfits = []
    for mutant in MUTANTS:
        path = ROOT / "streamserve" / "engine" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            misfits.append(f"refit {mutant.name!r} to {mutant.file}: its text is there {text.count(mutant.old)} times")
        compile(text.replace(mutant.old, mutant.new), path.name, "exec")
    assert misfits == []


def test_every_law_has_a_fault() -> None:
    """A law that no fault breaks may check nothing."""
    laws = {int(number) for number in re.findall(r"^(\d+)\. ", README, re.MULTILINE)}
    assert laws == set(range(1, 42))
    assert {mutant.law for mutant in MUTANTS} == laws


def test_names_are_unique() -> None:
    """`make mutants` names survivors by them."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
