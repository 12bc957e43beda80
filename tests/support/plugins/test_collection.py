"""Laws of the files that `make proofs` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plugins.collection import has_proofs

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("proofs/kills/test_kills.py", True),
        ("native/test_sanitizers.py", True),
        ("engine/model/test_engine.py", True),  # by `covering`
        ("test_conf.py", False),
    ],
)
def test_a_file_has_proofs_by_its_folder_or_a_mark(file: str, expected: bool) -> None:
    """Each other file is left out; a proof in it would end the collection."""
    assert has_proofs(TESTS / file) is expected
