"""No garbage collection while tests are collected, and none of what is collected: a third of collection's CPU.

Modules, tests and torch's tables live until the end; each full collection would walk through all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests with the collector off; leave what they are out of its later runs."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()
