"""The log of a stream's events: `EventLog` is the contract, `MemoryLog` keeps events in memory."""

from streamserve.streams.log.base import EventLog, MemoryLog

__all__ = ["EventLog", "MemoryLog"]
