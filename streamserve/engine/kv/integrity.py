"""`IntegrityError`: the engine's books do not add up. Checks that cost O(1) raise it in production too.

The core answers it with a quarantine (core.py): who holds blocks fails, and the engine goes on with an empty pool.
"""

from __future__ import annotations


class IntegrityError(Exception):
    """The books do not add up; the message holds the numbers that should."""
