"""An exception after the third token of one answer changes no other answer, on the whole site under real servers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proofs.scale import scaled
from tests.proofs.support.users import Site
from tests.support.checks.stream_checks import check_native, parse_sse

pytestmark = pytest.mark.timeout(1200)

NUM_REQUESTS = scaled(1000)


def test_an_exception_after_the_third_token(site: Site) -> None:
    """`error` event, EOF, no `[DONE]`; the next requests are served and reaped, each with its own answer."""
    ask = {"prompt": "FAIL", "max_tokens": 50, "ignore_eos": "true"}
    good = {**ask, "prompt": "hello", "seed": 1}
    with site.client() as http:
        expected = check_native(http.get("/streams/new", params=good).content)
        before = site.least(site.num_descriptors)
        failed = check_native(http.get("/streams/new", params=ask).content)
        assert [frame.event for frame in failed].count("error") == 1
        assert failed[-1].json["code"] == "internal_error"
        assert sum(len(frame.json["token_ids"]) for frame in failed if frame.event == "token") == 3
        tokens = parse_sse(http.get("/streams/new", params={**ask, "format": "tokens"}).content)
        assert tokens[-1].json["error"]["code"] == "internal_error"
        assert "[DONE]" not in [frame.data for frame in tokens]
        for number in range(NUM_REQUESTS):
            whole = check_native(http.get("/streams/new", params=good).content)
            assert token_ids_of(whole) == token_ids_of(expected), f"request {number}"
    bare = {"connections": 1, "deliveries": 0, "running": 0, "blocks_used": 0}  # its own connection
    site.until(lambda: site.control() == bare, "all is reaped")
    site.until(lambda: site.num_descriptors() <= before, "no descriptor is left")
    print(f"\n{NUM_REQUESTS} requests after two exceptions: all served and reaped")


def token_ids_of(frames: list[Any]) -> list[int]:
    return [token_id for frame in frames if frame.event == "token" for token_id in frame.json["token_ids"]]
