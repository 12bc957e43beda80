"""API keys as text: make and recognise them, compute prefix and digest; digests under the site's secret. No I/O.

A made key is `ss_live_<8>_<43>`: a public prefix and 256 random bits. A chosen key is 16 to 128 of `[A-Za-z0-9_-]`
(`make run KEY=...`). SHA-256 is enough for a secret with 128 bits and more; slow hashes invite denial of service.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string

from django.conf import settings as django_settings

MADE = re.compile(r"ss_live_([a-z0-9]{8})_[A-Za-z0-9_-]{43}", re.ASCII)
ANY = re.compile(r"[A-Za-z0-9_-]{16,128}", re.ASCII)
_PREFIX_ALPHABET = string.ascii_lowercase + string.digits


def new_key() -> str:
    """Return a new key. Only its prefix and digest are stored."""
    return f"ss_live_{_new_prefix()}_{secrets.token_urlsafe(32)}"


def is_well_formed(key: str) -> bool:
    """Return whether `key` has the form of a key. Checked before any look-up."""
    return ANY.fullmatch(key) is not None


def prefix_of(key: str) -> str:
    """Return the public part, by which lists name the key; a random text for a chosen key, which has no public part."""
    made = MADE.fullmatch(key)
    return made.group(1) if made else _new_prefix()


def _new_prefix() -> str:
    return "".join(secrets.choice(_PREFIX_ALPHABET) for _ in range(8))


def digest_of(key: str) -> str:
    """Return the SHA-256 that is stored instead of the key; of any text, which may be no key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def salt_of(tenant: str) -> str:
    """Return the tenant's prefix-cache salt: it cannot be guessed, and no blocks of two tenants match."""
    return secret_digest("salt", tenant)


def secret_digest(kind: str, text: str) -> str:
    """Return the HMAC of `text` under SECRET_KEY, apart for each `kind`."""
    secret, named = django_settings.SECRET_KEY.encode(), f"streamserve.{kind}:{text}".encode()
    return hmac.new(secret, named, hashlib.sha256).hexdigest()
