"""docs/troubleshooting.md has what the doctor can find, each with its lines; docs/doctor.md has every check."""

from __future__ import annotations

import re
from pathlib import Path

from streamserve.doctor import answers, checks, examination
from streamserve.doctor.examination import CHECKS
from streamserve.doctor.hops import ALB, CLOUDFLARE, TRAEFIK
from streamserve.doctor.lines import LINES, UNTRIED

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text()
_FOUND = re.compile(r'found\(\s*"\w+",\s*"(\w+)"')
_NOT_RUN = (TRAEFIK, ALB, CLOUDFLARE)


def test_each_fault_has_its_heading() -> None:
    """Those of the table, and those that the code names."""
    named = {
        fault
        for module in (answers, checks, examination)
        for fault in _FOUND.findall(Path(module.__file__).read_text())
    }
    assert len(named) > 15
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == named | set(LINES)


def test_each_line_stands_under_its_fault() -> None:
    """As the doctor prints it; a line that no test has tried is marked."""
    for fault, lines in LINES.items():
        section = PAGE.partition(f"\n### {fault}\n")[2].partition("\n### ")[0]
        expected = [
            f"| {proxy} | `{line}`{' *not tried*' if (proxy, fault) in UNTRIED or proxy in _NOT_RUN else ''} |"
            for proxy, line in lines.items()
        ]
        assert re.findall(r"^\| (?!in |--).*$", section, re.MULTILINE) == expected, fault


def test_each_check_has_its_row() -> None:
    """In the order in which the command prints them."""
    assert re.findall(r"^\| `(\w+)` \| .* \| .* \|$", (DOCS / "doctor.md").read_text(), re.MULTILINE) == [
        "reach",
        *CHECKS,
    ]
