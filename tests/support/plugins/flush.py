"""A cheaper end of a `transaction=True` test: only tables with rows are emptied, and what `migrate` made stays.

Django's own deletes from every table and makes content types and permissions anew: three quarters of what the test of
a request costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from django.db import connections, transaction
from django.test import TransactionTestCase

MADE_BY_MIGRATE = ("django_content_type", "auth_permission")

djangos_own = TransactionTestCase._fixture_teardown
# How many rows of each of MADE_BY_MIGRATE Django's own flush leaves, by database.
made: dict[str, tuple[int, ...]] = {}


def flush(test_case: TransactionTestCase) -> None:
    """Do what Django's flush does; leave it to Django for the first test, and for one that changed those rows."""
    aliases = test_case._databases_names(include_mirrors=False)
    if any(made.get(alias) != counts(alias) for alias in aliases):
        djangos_own(test_case)
        made.update((alias, counts(alias)) for alias in aliases)
        return
    for alias in aliases:
        empty(alias)


def empty(alias: str) -> None:
    """Delete all rows but those that `migrate` made."""
    connection = connections[alias]
    names = [connection.ops.quote_name(name) for name in tables(alias)]
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'EXISTS(SELECT 1 FROM {name})' for name in names)}")
        for name, has_rows in zip(names, cursor.fetchone(), strict=True):
            if has_rows:
                cursor.execute(f"DELETE FROM {name}")


@cache
def tables(alias: str) -> list[str]:
    """Return the tables of models that `empty` empties; no test makes or drops one."""
    return sorted(set(connections[alias].introspection.django_table_names(only_existing=True)) - set(MADE_BY_MIGRATE))


def counts(alias: str) -> tuple[int, ...]:
    """Return the number of rows of each of MADE_BY_MIGRATE."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'(SELECT COUNT(*) FROM {name})' for name in MADE_BY_MIGRATE)}")
        return tuple(cursor.fetchone())


@pytest.fixture(scope="session", autouse=True)
def cheap_flush() -> Iterator[None]:
    """Replace Django's flush."""
    TransactionTestCase._fixture_teardown = flush
    yield
    TransactionTestCase._fixture_teardown = djangos_own
