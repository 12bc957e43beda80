"""docs/checks.md names every system check, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from streamserve import checks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checks.md"


def test_every_check_is_documented() -> None:
    """The ids of the page are those of the code."""
    ids = set(re.findall(r"streamserve\.[EW]\d{3}", Path(checks.__file__).read_text()))
    assert set(re.findall(r"streamserve\.[EW]\d{3}", PAGE.read_text())) == ids
