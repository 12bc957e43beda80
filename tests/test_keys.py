"""Laws of API keys: made once, kept as a digest, found by its digest, closed for good."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from streamserve import keys
from streamserve.models import ApiKey

pytestmark = pytest.mark.django_db


def test_a_made_key_has_its_shape_and_is_found() -> None:
    """A key is `ss_live_<8>_<43>`; only its prefix and digest are in the row."""
    row, key = ApiKey.objects.make(name="x")
    assert keys.MADE.fullmatch(key)
    assert key not in str(ApiKey.objects.values().get())
    assert ApiKey.objects.find_active(key) == row


@pytest.mark.parametrize("own", ["a" * 16, "A-Z_09" * 8, "x" * 128])
def test_a_given_key_is_found(own: str) -> None:
    """A key of the operator's own has 16 to 128 of A-Z a-z 0-9 _ - and is found."""
    row, key = ApiKey.objects.make(own)
    assert key == own
    assert ApiKey.objects.find_active(own) == row
    assert row.prefix not in own
    assert row.prefix not in row.digest


@pytest.mark.parametrize("bad", ["", "short", "x" * 129, "ä" * 20, "a b" * 10, "a\n" * 10, "' OR 1=1 -- xxxxxxxx"])
def test_an_invalid_key_causes_no_query(bad: str, django_assert_num_queries: Any) -> None:
    """A fixed pattern refuses other strings before any query."""
    with django_assert_num_queries(0):
        assert ApiKey.objects.find_active(bad) is None


def test_a_wrong_secret_under_a_right_prefix_does_not_open(django_assert_num_queries: Any) -> None:
    """A wrong secret costs one query, and its error is that of an unknown prefix."""
    _row, key = ApiKey.objects.make()
    with django_assert_num_queries(1):
        assert ApiKey.objects.find_active(key[:-4] + "0000") is None


def test_revoked_expired_and_deactivated_keys_do_not_open(django_user_model: Any) -> None:
    """A key is closed in three ways: revoked, expired, or of a deactivated user."""
    past = timezone.now() - timedelta(seconds=1)
    user = django_user_model.objects.create_user("gone", is_active=False)
    revoked, one = ApiKey.objects.make()
    ApiKey.objects.filter(pk=revoked.pk).revoke()
    for key in (one, ApiKey.objects.make(expires_at=past)[1], ApiKey.objects.make(user=user)[1]):
        assert ApiKey.objects.find_active(key) is None
    assert ApiKey.objects.get(pk=revoked.pk).state == "revoked"


def test_revoking_twice_keeps_the_first_date() -> None:
    """The guard against a second revocation is in the WHERE."""
    row, _key = ApiKey.objects.make()
    assert ApiKey.objects.all().revoke() == 1
    first = ApiKey.objects.get(pk=row.pk).revoked_at
    assert ApiKey.objects.all().revoke() == 0
    assert ApiKey.objects.get(pk=row.pk).revoked_at == first


def test_last_use_is_written_once_a_minute() -> None:
    """The last use is written once a minute a key, not once a request."""
    ApiKey.objects.make()
    now = timezone.now()
    assert ApiKey.objects.all().touch(now) == 1
    assert ApiKey.objects.all().touch(now + timedelta(seconds=30)) == 0
    assert ApiKey.objects.all().touch(now + timedelta(seconds=90)) == 1


def test_scopes_are_checked() -> None:
    """A key has at least one scope, and only known ones."""
    from django.core.exceptions import ValidationError

    from streamserve.models import validate_scopes

    validate_scopes(["chat", "ops"])
    for bad in ([], ["root"], "chat", None):
        with pytest.raises(ValidationError):
            validate_scopes(bad)
