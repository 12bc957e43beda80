"""SQLite's write lock, held as another process holds it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from django.db import connection, connections

on_sqlite = pytest.mark.skipif(connection.vendor != "sqlite", reason="the lock is SQLite's")


@contextmanager
def write_lock() -> Iterator[sqlite3.Connection]:
    """Hold the lock until the block ends, or the yielded connection rolls back."""
    with closing(sqlite3.connect(connections.settings["default"]["NAME"], isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other
