"""Laws of the tests' own flush: it leaves what Django's leaves."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.test import TransactionTestCase

from streamserve.models import ApiKey
from tests.support.plugins import flush

pytestmark = pytest.mark.django_db(transaction=True)


def empty_and_count() -> tuple[int, ...]:
    flush.flush(TransactionTestCase("__init__"))
    return flush.counts("default")


def test_rows_go_and_what_migrate_made_stays(alice: Any) -> None:
    before = empty_and_count()
    user = get_user_model().objects.create_user("carol")
    user.user_permissions.add(Permission.objects.get(codename="view_batch"))
    ApiKey.objects.make(user=user, name="carol's")
    kind = ContentType.objects.get_for_model(ApiKey)
    assert empty_and_count() == before
    assert before == (ContentType.objects.count(), Permission.objects.count())
    assert not any(model.objects.exists() for model in (get_user_model(), ApiKey))
    assert ContentType.objects.get_for_model(ApiKey) == kind


@pytest.mark.parametrize("change", ["one more", "one less"])
def test_a_changed_permission_is_put_right(change: str) -> None:
    """As by Django's own, which makes them all anew."""
    before = empty_and_count()
    if change == "one more":
        kind = ContentType.objects.get_for_model(ApiKey)
        Permission.objects.create(codename="paint", name="Can paint", content_type=kind)
    else:
        Permission.objects.get(codename="view_batch").delete()
    assert empty_and_count() == before
    assert Permission.objects.filter(codename="view_batch").exists()
    assert not Permission.objects.filter(codename="paint").exists()
