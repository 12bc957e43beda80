"""The checks by themselves: what they say of a probe that arrived in this way or that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from streamserve.doctor import checks
from streamserve.doctor.examination import Examination, locate
from streamserve.doctor.hops import ALB, CLOUDFLARE, TRAEFIK, hops_of
from streamserve.doctor.verdicts import found
from streamserve.doctor.wire import Answer, Piece
from streamserve.protocol.sse import FIRST_BYTES, KEEPALIVE, frame, one_line_json

_CLOCK = 5000.0  # how far the reader's clock is ahead of the server's
_EVERY = 0.25


def event(kind: str, sent: float, **fields: Any) -> bytes:
    return frame(one_line_json({"kind": kind, "sent": sent, **fields}), event=kind)


def probe(late: Sequence[float], *, seen: dict[str, Any] | None = None, is_whole: bool = True) -> list[Piece]:
    """Return a probe whose beats arrive so late, each."""
    request = {"http_version": "1.1", "host": "example.org", "scheme": "https", "client": "198.51.100.1", "headers": []}
    pieces = [Piece(_CLOCK + 0.02, FIRST_BYTES + event("request", 0.0, **{**request, **(seen or {})}))]
    beats = [(number * _EVERY, delay) for number, delay in enumerate(late)]
    pieces += [Piece(_CLOCK + sent + 0.02 + delay, event("beat", sent, number=0)) for sent, delay in beats]
    over = len(late) * _EVERY
    pieces.append(Piece(_CLOCK + over + 0.02, KEEPALIVE + event("quiet", over, seconds=0.0, keepalives=[over])))
    return [*pieces, *([Piece(_CLOCK + over + 0.03, event("end", over))] if is_whole else [])]


def answer(*headers: tuple[str, str], pieces: Iterable[Piece] = ()) -> Answer:
    return Answer(status=200, headers=list(headers), asked_at=_CLOCK, pieces=list(pieces))


@pytest.mark.parametrize(
    ("late", "fault"),
    [
        ([0.0] * 12, ""),
        ([0.0] * 4 + [1.0, 0.75, 0.5, 0.25] + [0.0] * 4, ""),  # the reader's machine stalled once
        ([3.0 - number * _EVERY for number in range(12)], "buffered"),  # held to the end
        ([1.0, 0.75, 0.5, 0.25] * 3, "buffered"),  # passed once a second
    ],
)
def test_events_that_are_held_are_told_from_a_machine_that_stalls(late: list[float], fault: str) -> None:
    """Most events are late where they are held; clocks that differ make no difference."""
    assert checks.buffering(checks.received(probe(late))).fault == fault


def test_pieces_may_end_anywhere() -> None:
    """An event arrives with the piece that completes it, as does a keepalive."""
    whole = b"".join(piece.data for piece in probe([0.0, 0.0]))
    got = checks.received([Piece(float(at), whole[at : at + 1]) for at in range(len(whole))])
    assert [fields["kind"] for _, fields in got.events] == ["request", "beat", "beat", "quiet", "end"]
    assert (len(got.keepalives), got.is_whole) == (1, True)


def test_lost_keepalives_are_found() -> None:
    """The probe says how many it has sent."""
    pieces = [Piece(piece.at, piece.data.replace(KEEPALIVE, b"")) for piece in probe([0.0, 0.0])]
    assert checks.keepalives(checks.received(pieces)).fault == "keepalives_lost"


@pytest.mark.parametrize(
    ("version", "is_tls", "alpn", "fault"),
    [
        ("1.1", True, "h2", ""),
        ("2", True, "h2", ""),
        ("1.1", False, "", ""),
        ("1.1", True, "http/1.1", "no_http2"),
        ("1.0", True, "h2", "http10"),
    ],
)
def test_the_version_of_http_is_judged_on_both_sides(version: str, is_tls: bool, alpn: str, fault: str) -> None:
    """HTTP/1.1 at the web process; HTTP/2 for browsers, which speak it over TLS only."""
    got = checks.received(probe([0.0], seen={"http_version": version}))
    assert checks.http_version(got, is_tls=is_tls, alpn=alpn).fault == fault


_RIGHT = {"authorization": "present", "last-event-id": "doctor-1", "x-forwarded-for": "198.51.100.1"}


@pytest.mark.parametrize(
    ("client", "headers", "faults"),
    [
        ("198.51.100.1", {}, []),
        ("10.0.0.2", {}, ["address_unused"]),
        ("203.0.113.77", {"x-forwarded-for": "203.0.113.77, 198.51.100.1"}, ["address_claimed"]),
        ("10.0.0.2", {"x-forwarded-for": "203.0.113.77"}, ["address_lost"]),
        # All readers come from one address of Cloudflare's.
        ("104.16.0.1", {"x-forwarded-for": "104.16.0.1", "cf-connecting-ip": "198.51.100.1"}, ["address_unused"]),
        ("198.51.100.1", {"authorization": ""}, []),
    ],
)
def test_the_address_of_a_caller_is_its_own(client: str, headers: dict[str, str], faults: list[str]) -> None:
    """Neither a proxy's, nor what the caller claims."""
    got = checks.received(probe([0.0], seen={"client": client, "headers": list({**_RIGHT, **headers}.items())}))
    found = checks.request_headers(got, "https://example.org", has_proxy=True, is_outermost=True)
    assert [verdict.fault for verdict in found if verdict.fault] == faults


def test_a_stream_with_a_length_was_collected() -> None:
    """A response that is sent as it comes has no length."""
    headers = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache"), ("X-Stream-Id", "doctor")]
    found = checks.response_headers(answer(*headers, ("Content-Length", "900")), "doctor")
    assert [verdict.fault for verdict in found] == ["buffered"]


@pytest.mark.parametrize(
    ("shown", "request_headers", "hops"),
    [
        ({"server": "cloudflare", "cf-ray": "8a"}, {"cf-connecting-ip": "198.51.100.1"}, (CLOUDFLARE,)),
        ({"server": "uvicorn"}, {"x-amzn-trace-id": "Root=1"}, (ALB,)),
        ({"server": "uvicorn"}, {"x-forwarded-server": "a", "x-forwarded-port": "443"}, (TRAEFIK,)),
        ({"server": "nginx/1.22"}, {"cf-ray": "8a"}, (CLOUDFLARE, "nginx")),
        ({"server": "uvicorn"}, {}, ()),
    ],
)
def test_proxies_are_known_by_their_marks(
    shown: dict[str, str], request_headers: dict[str, str], hops: tuple[str, ...]
) -> None:
    """In what they answer, and in what they add to a request; those that tests run are in test_proxies.py."""
    assert hops_of(shown, request_headers, b"") == hops


def test_a_fault_lies_between_the_addresses_where_it_is_and_where_it_is_not() -> None:
    """What is found at the innermost address lies behind it."""
    lost, cut = found("resume", "last_event_id_lost", "."), found("silence", "cut_in_silence", ".")
    outer = Examination(url="https://example.org", hops=(CLOUDFLARE, "nginx"), verdicts=(lost, cut))
    inner = Examination(url="http://10.0.0.1", hops=("nginx",), verdicts=(cut,))
    located = {verdict.fault: verdict.hops for verdict in locate([outer, inner]).verdicts}
    assert located == {"last_event_id_lost": (CLOUDFLARE,), "cut_in_silence": ("nginx",)}
