"""The checks that need no model: each compares what the site sent in a probe with what arrived. Pure.

A probe (web/probe.py) brings its own times: `sent` of each event, and the request as Django got it. Times of two
clocks are never compared by themselves: an event's delay counts beyond the smallest delay of its probe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from streamserve.doctor.verdicts import Verdict, found, ok, unknown
from streamserve.doctor.wire import Answer, Piece
from streamserve.protocol.sse import SSEDecoder, SSEError

# Half of the events later than the fastest by this much: they were held together. A machine that stalls once delays
# fewer of them.
HELD_SECONDS = 0.35
CLAIMED_ADDRESS = "203.0.113.77"  # RFC 5737: an address of nobody's, which the doctor claims to have
LAST_EVENT_ID = "doctor-1"
_MAX_BYTES = 1 << 20
_KEEPALIVE = b": keepalive"
_PACKED = ("gzip", "br", "zstd", "deflate", "compress")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A probe as it arrived: its events with their times of arrival, and the times of its keepalives."""

    events: tuple[tuple[float, Mapping[str, Any]], ...]
    keepalives: tuple[float, ...]
    is_whole: bool

    def first(self, kind: str) -> Mapping[str, Any]:
        """Return the first event of a kind; {} for none."""
        return next((event for _, event in self.events if event.get("kind") == kind), {})


def received(pieces: Sequence[Piece]) -> Received:
    """Read a probe. What is no event of ours is left out."""
    decoder, text = SSEDecoder(_MAX_BYTES), b""
    events: list[tuple[float, Mapping[str, Any]]] = []
    kept: list[float] = []
    for piece in pieces:
        text += piece.data
        kept += [piece.at] * (text.count(_KEEPALIVE) - len(kept))
        try:
            events += [(piece.at, json.loads(data)) for data in decoder.feed(piece.data)]
        except (SSEError, ValueError):
            break
    whole = any(event.get("kind") == "end" for _, event in events)
    return Received(events=tuple(events), keepalives=tuple(kept), is_whole=whole)


def delays(probe: Received) -> list[float]:
    """Return by how much each beat came later than the fastest of them, in seconds."""
    lags = [at - event["sent"] for at, event in probe.events if event["kind"] in ("request", "beat")]
    return [lag - min(lags) for lag in lags] if lags else []


def buffering(probe: Received) -> Verdict:
    """Events arrive when they are sent."""
    late = delays(probe)
    if len(late) < 3:
        return unknown("buffering", "Too few events arrived to tell.")
    sent = [event["sent"] for _, event in probe.events if event["kind"] in ("request", "beat")]
    arrived = [at for at, event in probe.events if event["kind"] in ("request", "beat")]
    if median(late) < HELD_SECONDS:
        return ok("buffering", f"{len(late)} events arrived as they were sent.")
    return found(
        "buffering",
        "buffered",
        f"Events are held back: {len(late)} events sent over {sent[-1] - sent[0]:.1f} s arrived within "
        f"{arrived[-1] - arrived[0]:.1f} s, up to {max(late):.1f} s late.",
    )


def compression(answer: Answer) -> Verdict:
    """A stream that a browser asks for is not compressed on the way."""
    coding = answer.header("content-encoding").strip().lower()
    if not any(word in coding for word in _PACKED):
        return ok("compression", "Streams are not compressed.")
    return found(
        "compression",
        "compressed",
        f"Streams are compressed on the way (Content-Encoding: {coding}), which can hold events back until a block is "
        "full.",
    )


def keepalives(probe: Received) -> Verdict:
    """The comments that keep idle connections open arrive, when they are sent."""
    sent = probe.first("quiet").get("keepalives")
    if not sent:
        return unknown("keepalives", "The probe broke before its keepalives.")
    if len(probe.keepalives) < len(sent):
        num_lost = len(sent) - len(probe.keepalives)
        return found("keepalives", "keepalives_lost", f"{num_lost} of {len(sent)} keepalives (SSE comments) were lost.")
    lags = [at - event["sent"] for at, event in probe.events]
    late = median(at - then for at, then in zip(probe.keepalives, sent, strict=False)) - min(lags)
    if late >= HELD_SECONDS:
        return found("keepalives", "buffered", f"Keepalives (SSE comments) are held back, by {late:.1f} s.")
    return ok("keepalives", f"{len(sent)} keepalives arrived as they were sent.")


def silence(answer: Answer, probe: Received, seconds: float, keepalive_seconds: float) -> Verdict:
    """A connection on which nothing comes is left open for longer than keepalives are apart."""
    if probe.is_whole:
        return ok(
            "silence",
            f"A connection stays open through {seconds:.0f} s of silence; streams send a keepalive every "
            f"{keepalive_seconds:.0f} s. Whole answers are silent for longer: --silence tries how long.",
        )
    quiet = next((at for at, event in probe.events if event["kind"] == "quiet"), None)
    if quiet is None:
        return unknown("silence", f"The probe broke before its silence: {answer.cut or 'it ended early'}.")
    lasted = answer.ended_at - quiet
    return found(
        "silence",
        "cut_in_silence",
        f"A connection is cut after {lasted:.0f} s of silence, of {seconds:.0f} s that were tried. Streams send a "
        f"keepalive every {keepalive_seconds:.0f} s.",
    )


def http_version(probe: Received, *, is_tls: bool, alpn: str) -> Verdict:
    """The web process is asked by HTTP/1.1 at least, and browsers by HTTP/2 where there is TLS."""
    inner = probe.first("request").get("http_version")
    if inner == "1.0":
        return found(
            "http",
            "http10",
            "The proxy asks the web process by HTTP/1.0: WebSockets fail, and a stream that is cut looks like one that "
            "has ended.",
        )
    if not inner:
        return unknown("http", "The probe did not tell by which HTTP it was asked.")
    if is_tls and alpn != "h2":
        return found(
            "http",
            "no_http2",
            "Browsers are not offered HTTP/2. By HTTP/1.1 they open six connections to a site at most, for all their "
            "tabs together: the seventh open stream waits.",
        )
    outer = "browsers are offered HTTP/2" if is_tls else "there is no TLS here, and so no HTTP/2"
    return ok("http", f"The web process is asked by HTTP/{inner}; {outer}.")


def request_headers(probe: Received, url: str, *, has_proxy: bool, is_outermost: bool) -> list[Verdict]:
    """What the site needs of a request arrives unchanged. One verdict for each fault; one ok where there is none."""
    seen = probe.first("request")
    if not seen:
        return [unknown("request", "The probe did not tell how its request arrived.")]
    headers = dict(seen["headers"])
    parts, faults = urlsplit(url), []
    if is_outermost and seen["host"].lower() != parts.netloc.lower():
        said = f"Django takes its host for {seen['host']}, not {parts.netloc}: its pages' WebSockets and forms fail."
        faults.append(found("request", "host_changed", said))
    if is_outermost and parts.scheme != seen["scheme"]:
        said = (
            f"Django takes the request for {seen['scheme']}, not {parts.scheme}: links, cookies and origins are wrong."
        )
        faults.append(found("request", "scheme_unknown", said))
    if "authorization" not in headers:
        said = "The Authorization header does not arrive: API keys are refused."
        faults.append(found("request", "authorization_lost", said))
    if headers.get("last-event-id") != LAST_EVENT_ID:
        said = "The Last-Event-ID header does not arrive: a reader that returns gets its answer from the start again."
        faults.append(found("request", "last_event_id_lost", said))
    if is_outermost and (has_proxy or not _is_loopback(parts.hostname or "")):
        faults += _address_faults(seen["client"], headers, has_proxy=has_proxy)
    return faults or [ok("request", "Host, scheme, Authorization, Last-Event-ID and the client's address arrive.")]


def _is_loopback(host: str) -> bool:
    """Return whether the doctor asks its own machine: the web server may believe what comes from there."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _address_faults(client: str, headers: Mapping[str, str], *, has_proxy: bool) -> list[Verdict]:
    """The address that the site counts by is the reader's: neither the proxy's, nor what the reader claims."""
    if client == CLAIMED_ADDRESS:
        said = (
            "A caller may claim any address: the site believes the X-Forwarded-For that the caller sends, and the "
            "limits per address count nothing."
        )
        return [found("request", "address_claimed", said)]
    forwarded, real = headers.get("x-forwarded-for", ""), headers.get("cf-connecting-ip", "")
    hops = [address.strip() for address in forwarded.split(",")]
    if has_proxy and set(hops) <= {"", CLAIMED_ADDRESS}:
        said = "The proxy does not pass on the caller's address: the limits per address count all callers together."
        return [found("request", "address_lost", said)]
    if has_proxy and (client not in hops or (real and client != real)):
        said = (
            f"The web server does not use the address that the proxy passes on ({real or forwarded}): it counts all "
            f"callers as {client}."
        )
        return [found("request", "address_unused", said)]
    return []


def response_headers(answer: Answer, probe_id: str) -> list[Verdict]:
    """What readers and caches need of a response arrives unchanged."""
    kind, cache = answer.header("content-type"), answer.header("cache-control").lower()
    faults = []
    if not kind.lower().startswith("text/event-stream"):
        said = f"The Content-Type text/event-stream arrives as {kind or 'nothing'}: browsers refuse the stream."
        faults.append(found("response", "content_type_changed", said))
    if not ("no-cache" in cache or "no-store" in cache) or answer.header("age"):
        said = f"Streams may be kept by a cache: Cache-Control arrives as {cache or 'nothing'}."
        faults.append(found("response", "cacheable", said))
    if answer.header("content-length"):
        said = "The response has a Content-Length: something has collected all of it before it sent any."
        faults.append(found("response", "buffered", said))
    if answer.header("x-stream-id") != probe_id:
        said = (
            "The X-Stream-Id header does not arrive: a page cannot resume an answer that breaks before its first event."
        )
        faults.append(found("response", "stream_id_lost", said))
    return faults or [ok("response", "Content-Type, Cache-Control and X-Stream-Id arrive.")]
