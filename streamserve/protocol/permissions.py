"""Who may use a model or a pipeline, as a setting says it: a word, a Django permission, or a function. Pure.

A text with one dot is a permission ("shop.view_invoice"), a text with more is the dotted path of a function
("shop.rules.may_ask").
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

ANYONE, AUTHENTICATED, STAFF = WORDS = ("anyone", "authenticated", "staff")
Permission = str | Callable[..., object]
PERMISSION_HINT = (
    f"It takes one of {', '.join(WORDS)}, a permission as shop.view_invoice, or a function of user and caller, or its "
    "dotted path, as shop.rules.may_ask."
)
_DOTTED = re.compile(r"\w+(\.\w+)+")


def problem_of(permission: object) -> str | None:
    """Return what is wrong with the value, as the end of a sentence; None if it can be a permission."""
    if inspect.iscoroutinefunction(permission):
        return "is an async function."
    if callable(permission) or permission in WORDS:
        return None
    if isinstance(permission, str) and _DOTTED.fullmatch(permission):
        return None
    return f"is {permission!r}."


def is_path(permission: str) -> bool:
    """Return whether the text is the dotted path of a function."""
    return permission.count(".") > 1
