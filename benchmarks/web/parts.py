"""Where the CPU of a web process's event loop goes: a profile, by part."""

from __future__ import annotations

import pstats
from collections import Counter

# A part, and what the path of a file has in it, first match: of our own files by room, then by what they stand on.
PARTS = (
    ("engine's frames: read, decode", ("streamserve/clients/", "streamserve/protocol/frames")),
    ("log: pack, commit, result", ("streams/log/", "streams/writer", "streams/outbox")),
    ("stream: count, keep, report", ("streamserve/streams/stream", "streams/transcript", "streams/recent",
                                     "streams/readers", "streamserve/protocol/measures", "streams/follower")),
    ("reader: join, time", ("streams/reader/", "streams/timers")),
    ("encode: dialect, JSON, SSE", ("streamserve/dialects/", "streamserve/protocol/", "/json/")),
    ("send: ASGI, server", ("streamserve/asgi/", "daphne/", "twisted/", "uvicorn/", "django/", "streamserve/api/")),
    ("loop: handles, tasks, timers", ("asyncio/", "selectors.py", "/heapq", "concurrent/futures")),
)  # fmt: skip
_NUM_FUNCTIONS = 40  # the dearest are listed, what they call in C counted with them
OTHER, POLL = "other", "poll and wake"
_WAIT = "<method 'poll' of 'select.epoll' objects>"
# What happens, and the function whose calls count it.
COUNTED = (
    ("turns of the loop", "asyncio/base_events.py", "_run_once"),
    ("timers armed", "asyncio/base_events.py", "call_at"),
    ("callbacks queued", "asyncio/base_events.py", "_call_soon"),
    ("socket reads", "", "<method 'recv' of '_socket.socket' objects>"),
    ("socket writes", "", "<method 'send' of '_socket.socket' objects>"),
    ("jobs to threads", "asyncio/base_events.py", "run_in_executor"),
    ("commits", "streams/writer.py", "_commit"),
    ("socket polls (ioctl)", "", "<built-in method fcntl.ioctl>"),
)


def part_of(path: str) -> str:
    """Return the part that a file belongs to."""
    return next((part for part, names in PARTS if any(name in path for name in names)), OTHER)


def report_parts(stats: pstats.Stats, cpu_seconds: float, num_tokens: int) -> None:
    """Print the parts' shares of the CPU, and the counts for each token."""
    seconds: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for (path, _, name), (_, num_calls, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        for what, file, function in COUNTED:
            if name == function and file in path:
                counts[what] += num_calls
        if name == _WAIT:
            seconds[POLL] += own
            continue
        if path != "~":
            seconds[part_of(path)] += own
            functions[_label(path, name)] += own
            continue
        for (caller, _, caller_name), (_, _, share, _) in callers.items():  # a built-in's time is its callers'
            seconds[part_of(caller)] += share
            functions[_label(caller, caller_name)] += share
    print(f"  {cpu_seconds / num_tokens * 1e6:.0f} us of CPU a token under the profiler, {num_tokens} tokens")
    for part in (*(one for one, _ in PARTS), OTHER, POLL):
        print(f"  {part:32}{seconds[part] / num_tokens * 1e6:8.0f} us{seconds[part] / cpu_seconds:8.1%}")
    for label, own in functions.most_common(_NUM_FUNCTIONS):
        print(f"    {own / num_tokens * 1e6:8.1f} us  {label}")
    print("  for each token: " + ", ".join(f"{what} {counts[what] / num_tokens:.2f}" for what, _, _ in COUNTED))


def _label(path: str, name: str) -> str:
    return f"{'/'.join(path.split('/')[-3:])} {name}"
