"""Requests from this machine while DEBUG is on: from a developer's own browser."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from django.conf import settings as django_settings

# A proxy on this machine speaks for visitors who are elsewhere, and says so.
_FORWARDED = ("forwarded", "x-forwarded-", "x-real-ip", "via")


def is_local(headers: Mapping[str, str], address: str) -> bool:
    """Return whether DEBUG is on and the request comes from a loopback address and through no proxy."""
    if not django_settings.DEBUG or any(name.lower().startswith(_FORWARDED) for name in headers):
        return False
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a unix socket has no address
        return False
