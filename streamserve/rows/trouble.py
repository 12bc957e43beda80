"""`trouble_of`: what an error reveals about the database itself, and not about the query that met it.

Sources: SQLite's result codes (sqlite.org/rescode.html), PostgreSQL's SQLSTATEs (its manual, appendix A), MySQL's error
numbers: below 2000 they are the server's, from 2000 on the connection's. Pure functions; no connection is touched.
"""

from __future__ import annotations

from enum import Enum

from django.db import DatabaseError, InterfaceError, OperationalError


class Trouble(Enum):
    """Why no query can be done now. The value is shown by `/readyz`."""

    LOCKED = "locked"  # by another connection: it may be free in a moment
    LOST = "lost"  # the connection; a new connection may work
    AWAY = "away"  # no connection can be made, or the file is no database
    SLOW = "slow"  # no answer in time

    @property
    def message(self) -> str:
        """What a client is shown."""
        return f"The site's database {_WORDS[self]}. Try again in some seconds; the server's log has the cause."


_WORDS = {
    Trouble.LOCKED: "is locked",
    Trouble.LOST: "cannot be reached",
    Trouble.AWAY: "cannot be used",
    Trouble.SLOW: "does not answer",
}
# The low byte of SQLite's result code: BUSY, LOCKED; READONLY, IOERR, CORRUPT, FULL, CANTOPEN, PROTOCOL, NOTADB.
_SQLITE = {5: Trouble.LOCKED, 6: Trouble.LOCKED} | dict.fromkeys((8, 10, 11, 13, 14, 15, 26), Trouble.AWAY)
# lock_not_available, read_only_sql_transaction, too_many_connections, disk_full.
_SQLSTATES = {"55P03": Trouble.LOCKED, "25006": Trouble.AWAY, "53300": Trouble.AWAY, "53100": Trouble.AWAY}
_UNDONE = ("40001", "40P01")  # serialization failure, deadlock: the whole transaction may be done again
_LOST_CLASSES = ("08", "57P")  # connection exceptions; the server shuts down, or is starting
_MYSQL_LOCKED, _MYSQL_DEADLOCK, _MYSQL_CLIENT = 1205, 1213, 2000


def is_passing(error: BaseException | None) -> bool:
    """Return whether the transaction that met this error may be done again: trouble, or undone for another's sake."""
    if trouble_of(error) is not None:
        return True
    cause = error.__cause__ if isinstance(error, DatabaseError) else None
    if cause is None:
        return False
    sqlstate = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return sqlstate in _UNDONE or (isinstance(error, OperationalError) and error.args[:1] == (_MYSQL_DEADLOCK,))


def trouble_of(error: BaseException | None) -> Trouble | None:
    """Return the trouble that an error comes from; None for one of the query's own."""
    if not isinstance(error, DatabaseError | InterfaceError):
        return None
    cause = error.__cause__
    if cause is None:  # not of a driver
        return None
    sqlite_code = getattr(cause, "sqlite_errorcode", None)
    if sqlite_code is not None:
        return _SQLITE.get(sqlite_code & 0xFF)
    sqlstate = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    if sqlstate:
        return _SQLSTATES.get(sqlstate) or (Trouble.LOST if sqlstate.startswith(_LOST_CLASSES) else None)
    if not isinstance(error, OperationalError | InterfaceError):
        return None
    number = error.args[0] if error.args and isinstance(error.args[0], int) else _MYSQL_CLIENT
    if number < _MYSQL_CLIENT:
        return Trouble.LOCKED if number == _MYSQL_LOCKED else None
    return Trouble.LOST
