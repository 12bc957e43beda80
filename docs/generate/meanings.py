"""The meaning of each field of a class: the string that stands below it in the source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise


def meanings_of(cls: type) -> dict[str, str]:
    """Return field → meaning; a field without a string below it is left out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    return dict(_pairs(tree.body))


def annotations_of(cls: type) -> dict[str, str]:
    """Return field → annotation, as it is written."""
    return {name: str(annotation) for name, annotation in inspect.get_annotations(cls).items()}


def _pairs(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field, ast.AnnAssign)
            assert isinstance(field.target, ast.Name)
            yield field.target.id, inspect.cleandoc(str(below.value.value))
