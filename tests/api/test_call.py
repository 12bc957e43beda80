"""Laws of `Call`: what a query and a body may be, with either server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from streamserve.api.call import Call, Caller
from streamserve.protocol.errors import BadRequest, TooLarge, UnsupportedMedia
from streamserve.protocol.limits import Limits

LIMITS = Limits(max_body_bytes=10)


class Body:
    """A body in pieces; `num_read` of them have been read."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.num_read = 0

    async def __call__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.num_read += 1
            yield piece


async def wait(work: Coroutine[Any, Any, Any], /) -> Any:
    return await work


def call(*pieces: bytes, query: str = "", **headers: str) -> tuple[Call, Body]:
    body = Body(*pieces)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    made = Call(
        method="POST", headers=named, caller=Caller("u1"), request_id="r1", body=body, wait=wait, query_string=query
    )
    return made, body


def test_a_parameter_given_twice_is_named() -> None:
    """The query has one value for a name; no value of two is preferred."""
    assert call(query="a=1&b=&c=%C3%A9")[0].query() == {"a": "1", "b": "", "c": "é"}
    with pytest.raises(BadRequest, match="'b' is given 3 times") as raised:
        call(query="a=1&b=2&b=2&b=3")[0].query()
    assert raised.value.param == "b"
    with pytest.raises(BadRequest, match="too many"):
        call(query="&".join(f"a{n}=1" for n in range(2000)))[0].query()


async def test_a_body_is_read_no_further_than_the_limit() -> None:
    """The piece that passes the limit is the last one read; an encoding in the head is refused before."""
    made, body = call(b"1234", b"56789", b"ab", b"never")
    with pytest.raises(TooLarge):
        await made.json(LIMITS, optional=True)
    assert body.num_read == 3
    made, body = call(b"{}", content_encoding="gzip")
    with pytest.raises(UnsupportedMedia):
        await made.json(LIMITS)
    assert body.num_read == 0


async def test_a_body_in_pieces_is_one_object() -> None:
    """However it is cut; no body is {} where it is optional."""
    made, _ = call(b'{"a":', b" 1", b"}", content_type="application/json; charset=utf-8")
    assert await made.json(LIMITS) == {"a": 1}
    assert await call()[0].json(LIMITS, optional=True) == {}
