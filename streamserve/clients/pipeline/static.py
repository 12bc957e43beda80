"""`Static`: a text of a pipeline that is the same in every run, so that the prefix it makes is computed once for all.

    RULES = Static("You answer questions about bills. Prices: …")     # at import

    await run.generate([{"role": "system", "content": RULES}, {"role": "user", "content": run.question}])

The prefix cache keeps tenants apart by a salt, or the speed of an answer would show what other tenants have asked.
Messages that are `Static`, before the first that is not, need no salt: they were there before any request. That is a
property of the object and not of its text, so a caller who sends the same words shares nothing, and a text made of a
`Static` and something else is an ordinary text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from itertools import takewhile
from typing import Any

# Set for the task of a run, and so for the threads that it calls.
IS_IN_RUN: ContextVar[bool] = ContextVar("is_in_run", default=False)


class Static(str):
    """The content of a message that is the same in every run. Make it when your module is imported.

    Raises RuntimeError in a run, where it may hold a caller's text.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Static:
        if IS_IN_RUN.get():
            message = "A Static text is made in a run, where it may hold a caller's text. Make it at import."
            raise RuntimeError(message)
        return super().__new__(cls, text)

    def __copy__(self) -> Static:
        return self

    def __deepcopy__(self, memo: object) -> Static:
        return self


def num_static(messages: Iterable[Mapping[str, Any]]) -> int:
    """Return how many messages are static, before the first that is not.

    A message that has more than a role and a content may hold a caller's text there.
    """
    return sum(1 for _ in takewhile(_is_static, messages))


def _is_static(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], Static)
