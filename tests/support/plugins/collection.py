"""No garbage collection while tests are collected, and none of what is collected: a third of collection's CPU.

Modules, tests and torch's tables live until the end; each full collection would walk through all of them.

And of files without proofs none is imported where proofs are asked for (`-m "proof…"`): seven of eight, in each worker.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_MARK = re.compile(r"mark\.(proof|covering)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests with the collector off; leave what they are out of its later runs."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@cache
def has_proofs(file: Path) -> bool:
    """Return whether a file of tests may have proofs: it is in their folder, or names a mark that makes them."""
    return "proofs" in file.parts or _MARK.search(file.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without proofs out, where these are asked for."""
    asks_for_proofs = config.getoption("markexpr").startswith("proof")
    is_file = collection_path.suffix == ".py" and collection_path.is_file()
    return True if asks_for_proofs and is_file and not has_proofs(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Fail where a proof would be left out, as its mark comes from another file, and where processes would disagree."""
    if " at 0x" in item.nodeid:
        raise pytest.UsageError(f"{item.nodeid} is another test in each process of xdist: name its parameter by `ids`")
    if item.get_closest_marker("proof") and not has_proofs(item.path):
        raise pytest.UsageError(f"{item.path} has proofs: write pytest.mark.proof there, see {__file__}")
