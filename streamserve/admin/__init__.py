"""Streamserve in Django's admin, which imports this package: its modules register theirs.

    records.py          `RecordAdmin`: rows that the program alone writes, and what their lists share
    keys.py, streams.py, work.py
    conversations.py    the tree of a conversation, share links, attachments
    messages.py         questions and answers, ratings; export.py: as a file
    live.py, usage.py   the live page; what was used

No query outside managers, no rule of the business: the admin shows, revokes, cancels and stops.
"""

from streamserve.admin import conversations, keys, live, messages, streams, usage, work

__all__ = ["conversations", "keys", "live", "messages", "streams", "usage", "work"]
