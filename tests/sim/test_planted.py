"""The planted faults still fit the engine; `make mutants` shows whether they are caught."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, ROOT
from tests.sim.planted import Mutant

README = Path(__file__).with_name("README.md").read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_fits(mutant: Mutant) -> None:
    """The text that it changes occurs once in the engine, and the changed file is valid Python."""
    path = ROOT / "streamserve" / "engine" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"refit {mutant.name!r} to {mutant.file}"
    compile(text.replace(mutant.old, mutant.new), path.name, "exec")


def test_every_law_has_a_fault() -> None:
    """A law that no fault breaks may check nothing."""
    laws = {int(number) for number in re.findall(r"^(\d+)\. ", README, re.MULTILINE)}
    assert laws == set(range(1, 40))
    assert {mutant.law for mutant in MUTANTS} == laws


def test_names_are_unique() -> None:
    """`make mutants` names survivors by them."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
