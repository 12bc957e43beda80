"""Laws of the error tree."""

import pytest

from streamserve.protocol import errors
from streamserve.protocol.errors import Refused, StreamserveError, error_for, to_body

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, StreamserveError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_is_drawn_in_the_tree(cls: type[StreamserveError]):
    """The drawing at the top of the file names each class, and each has a code, a status and a docstring."""
    assert cls.__name__ in (errors.__doc__ or "")
    assert cls.__doc__
    assert cls.code
    assert 400 <= cls.http_status <= 507


def test_codes_name_one_class_each():
    """No two classes share a code, except `overloaded`."""
    codes = [cls.code for cls in CLASSES if cls is not Refused]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("code", "retryable", "status"),
    [
        ("context_length_exceeded", False, 400),
        ("timeout", False, 504),
        ("cancelled", False, 499),
        ("abandoned", False, 499),
        ("quota_exceeded", True, 429),
        ("never_fits", False, 400),
        ("overloaded", True, 503),
        ("engine_unavailable", True, 503),
        ("made_up", True, 503),
        ("numerical", False, 500),
    ],
)
def test_the_code_of_an_error_event_finds_its_status(code: str, retryable: bool, status: int):
    """A non-stream response has the status, code and message of the stream's error."""
    body = to_body(error_for(code, "So it is.", retryable=retryable))
    assert (body.code, body.message, body.http_status) == (code, "So it is.", status)


@pytest.mark.parametrize(("asked", "shown"), [(-5, 1), (0, 1), (7, 7), (10_000, 120)])
def test_retry_after_is_what_clients_obey(asked: int, shown: int):
    """Retry-After is 1 to 120 seconds: SDKs ignore longer waits."""
    assert Refused("Not now.", retry_after=asked).retry_after == shown
