"""`seal` and `unseal`: a system prompt that travels through the visitor's page, who can neither read nor change it.

The page of a widget holds the sealed text and sends it with each question, so every process can open it and nothing is
stored. It is encrypted and authenticated (Fernet) with a key made of SECRET_KEY; SECRET_KEY_FALLBACKS open older pages.
A visitor may leave it out, as any caller of the API may: it instructs the model, and protects nothing.
"""

from __future__ import annotations

import base64
import hashlib

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings as django_settings

from streamserve.protocol.errors import BadRequest

_PURPOSE = b"streamserve.system:"  # keeps this key apart from other keys made of SECRET_KEY


def seal(system: str) -> str:
    """Return the text for the page."""
    return _box().encrypt(system.encode()).decode("ascii")


def unseal(sealed: str) -> str:
    """Return the system prompt. Raises BadRequest for text that this site has not sealed."""
    try:
        return _box().decrypt(sealed).decode()
    except (InvalidToken, ValueError):
        message = "sealed_system is not from a page of this site, or its SECRET_KEY has changed. Reload the page."
        raise BadRequest(message, code="invalid_value", param="sealed_system") from None


def _box() -> MultiFernet:
    secrets = (django_settings.SECRET_KEY, *django_settings.SECRET_KEY_FALLBACKS)
    return MultiFernet([_fernet(secret) for secret in secrets])


def _fernet(secret: str | bytes) -> Fernet:
    raw = secret if isinstance(secret, bytes) else secret.encode()
    return Fernet(base64.urlsafe_b64encode(hashlib.sha256(_PURPOSE + raw).digest()))
