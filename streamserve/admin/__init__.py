"""Streamserve in Django's admin, which imports this package: its modules register theirs.

    records.py          `RecordAdmin`: rows that the program alone writes, and what their lists share
    keys.py, streams.py, work.py
    live.py             the live page

No query outside managers, no rule of the business: the admin shows, revokes, cancels and stops.
"""

from streamserve.admin import keys, live, streams, work

__all__ = ["keys", "live", "streams", "work"]
