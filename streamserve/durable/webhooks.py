"""`Webhook`: a target that jobs may name, from the settings; `read_webhooks` checks them. No I/O, no Django.

    WEBHOOKS = {"billing": {"URL": "https://billing.example.org/hook", "SECRET": "whsec_..."}}

A caller gives a name and never an address: a server that posts to addresses of callers reaches what they cannot.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from streamserve.conf_reader import Reader

_PREFIX = "whsec_"
_MIN_SECRET_BYTES = 24  # Standard Webhooks: 24 to 64 random bytes
_MAX_NAME_CHARS = 64
_KEYS = ("URL", "SECRET", "TIMEOUT_SECONDS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """One target. `secret` signs what is posted."""

    name: str
    url: str
    secret: bytes = field(repr=False)
    timeout_seconds: float = 10.0


def read_webhooks(reader: Reader, given: Mapping[str, Any]) -> Mapping[str, Webhook]:
    """Return the targets of WEBHOOKS; problems go to the reader."""
    out = {}
    for name, raw in reader.mapping(given.get("WEBHOOKS", {}), "WEBHOOKS").items():
        where = f'WEBHOOKS["{name}"]'
        options = reader.mapping(raw, where)
        reader.refuse_unknown(options, _KEYS, where)
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS:
            reader.wrong(f"STREAMSERVE WEBHOOKS has the name {name!r}.", "A name has 1 to 64 characters.")
            continue
        url, secret = options.get("URL"), _secret(options.get("SECRET"))
        seconds = options.get("TIMEOUT_SECONDS", 10.0)
        if not isinstance(url, str) or not _is_address(url):
            reader.wrong(f'{where}["URL"] is no address.', "Try https://billing.example.org/hook.")
        elif secret is None:
            reader.wrong(
                f'{where}["SECRET"] is no secret.',
                "It is 'whsec_' and at least 24 random bytes in base64. To make one: python -c "
                "\"import base64, os; print('whsec_' + base64.b64encode(os.urandom(32)).decode())\"",
            )
        elif seconds == 0:
            reader.wrong(f'{where}["TIMEOUT_SECONDS"] is 0.', "No receiver answers at once. It takes seconds, as 10.")
        elif reader.fits(seconds, float, f'{where}["TIMEOUT_SECONDS"]'):
            out[name] = Webhook(name=name, url=url, secret=secret, timeout_seconds=float(seconds))
    return MappingProxyType(out)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port over 65,535, half of an IPv6 address
        return False


def _secret(raw: object) -> bytes | None:
    if not isinstance(raw, str) or not raw.startswith(_PREFIX):
        return None
    try:
        secret = base64.b64decode(raw.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
    return secret if len(secret) >= _MIN_SECRET_BYTES else None
