"""The native library of each level, as in tests/native/."""

from tests.native.conftest import library

__all__ = ["library"]
