"""`Caller`: who asks, as the host of `asgi.stream_app` says; `anyone`, for hosts that do not ask. Values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from streamserve.asgi.types import Scope


@dataclass(frozen=True, slots=True)
class Caller:
    """`owner` is who limits are counted for; `tenant` ("": the owner alone) is who may read and stop a stream.

    Owners that begin with "anon:" share the places for visitors without a login.
    """

    owner: str
    tenant: str = ""

    def __post_init__(self) -> None:
        if not self.owner:
            raise ValueError("a Caller needs an owner; return None for nobody")
        if not self.tenant:
            object.__setattr__(self, "tenant", self.owner)


# Given the ASGI scope. None is nobody: 401. On the event loop: what blocks must be awaited. May raise a
# StreamserveError of its own, which is shown as it is.
Authenticate = Callable[[Scope], Caller | Awaitable[Caller | None] | None]


def anyone(scope: Scope) -> Caller:
    """Let everybody in as one and the same visitor, who may read every stream whose id it knows."""
    return Caller("anon:anyone")
