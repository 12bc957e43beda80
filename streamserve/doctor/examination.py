"""`examine`: all checks of one address. `locate`: in which hop a fault lies, where several addresses were examined.

Probes run beside each other on threads; what reads the database runs on the caller's thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from streamserve.doctor import answers, checks
from streamserve.doctor.hops import hops_of, web_server_of
from streamserve.doctor.lines import NO_LINE, SITE, line_for
from streamserve.doctor.verdicts import FOUND, LIMIT, Verdict, found, ok, unknown
from streamserve.doctor.wire import Answer, NotUpgraded, Way, WayError, WebSocket
from streamserve.web.probe import PROBE_ID, Plan, token_for

CHECKS = (
    "buffering",
    "compression",
    "keepalives",
    "silence",
    "http",
    "request",
    "response",
    "websocket",
    "disconnect",
    "resume",
)
_OF_PROBES = ("buffering", "keepalives", "silence", "http", "request", "response")
_OF_ANSWERS = ("disconnect", "resume")
_SPARE_SECONDS = 30.0  # beyond the silence that a probe brings
_BROWSERS_CODINGS = "gzip, deflate, br, zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to examine, and how.

    `paths` are the site's: of the probe, its streams, its whole answers and its WebSocket. `owner` is whose answers the
    key begins. `model` is "" where no model may be asked.
    """

    paths: Mapping[str, str]
    key: str
    owner: str
    model: str
    silence_seconds: float
    keepalive_seconds: float
    only: tuple[str, ...] = CHECKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The outcome for one address."""

    url: str
    hops: tuple[str, ...] = ()
    web_server: str = ""
    verdicts: tuple[Verdict, ...] = ()

    def faults(self) -> set[str]:
        """Return the names of what was found."""
        return {verdict.fault for verdict in self.verdicts if verdict.state == FOUND}


@dataclass(slots=True)
class _Examiner:
    """One address, with what its first answer told."""

    way: Way
    order: Order
    is_outermost: bool
    hops: tuple[str, ...] = ()

    def ask(self, plan: Plan, codings: str = "identity") -> Answer:
        """Ask for a probe, with the headers whose way is to be followed."""
        headers = {
            **self.headers,
            "Accept": "text/event-stream",
            "Accept-Encoding": codings,
            "Last-Event-ID": checks.LAST_EVENT_ID,
        }
        if self.is_outermost:
            headers["X-Forwarded-For"] = checks.CLAIMED_ADDRESS
        path = f"{self.order.paths['probe']}?token={token_for(plan)}"
        return self.way.ask(path, headers, seconds=plan.quiet_seconds + _SPARE_SECONDS)

    def probe(self, plan: Plan, codings: str = "identity") -> Answer:
        """Ask for a probe. Raises WayError where another response came."""
        answer = self.ask(plan, codings)
        if answer.status != 200:
            raise WayError(f"A probe was answered with status {answer.status}. {_error(answer)[1]}".rstrip())
        return answer

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.order.key}"}

    def verdicts(self) -> Iterator[Verdict]:
        """Run what is ordered, and yield in the order of `CHECKS`."""
        wanted, seconds = self.order.only, self.order.silence_seconds
        plan = Plan(quiet_seconds=seconds if "silence" in wanted else 0.0)
        with ThreadPoolExecutor(4) as pool:
            plain = pool.submit(self.probe, plan) if set(wanted) & set(_OF_PROBES) else None
            packed = pool.submit(self.probe, Plan(), _BROWSERS_CODINGS) if "compression" in wanted else None
            socket = pool.submit(self.websocket) if "websocket" in wanted else None
            alpn = pool.submit(self.way.alpn) if self.way.is_tls and "http" in wanted else None
            by_answers = list(self.of_answers(wanted))
            if plain is not None:
                try:
                    yield from self.of_probe(plain.result(), "" if alpn is None else alpn.result())
                except WayError as error:
                    yield from (unknown(check, str(error)) for check in _OF_PROBES)
            if packed is not None:
                try:
                    yield checks.compression(packed.result())
                except WayError as error:
                    yield unknown("compression", str(error))
            if socket is not None:
                yield socket.result()
            yield from by_answers

    def of_probe(self, answer: Answer, alpn: str) -> Iterator[Verdict]:
        """Yield the verdicts on a probe. What is late is asked once more: a machine may have been busy."""
        pieces = answer.unpacked()
        if pieces is None:
            said = f"The stream came as {answer.header('content-encoding')}, though it was asked for plain."
            yield unknown("buffering", said)
            return
        probe = checks.received(pieces)
        late = [checks.buffering(probe), checks.keepalives(probe)]
        if any(verdict.fault == "buffered" for verdict in late):
            again = self.probe(Plan())
            second = checks.received(again.unpacked() or [])
            late = [
                once if once.state == FOUND == twice.state else (twice if once.state == FOUND else once)
                for once, twice in zip(late, (checks.buffering(second), checks.keepalives(second)), strict=True)
            ]
        yield from late
        yield checks.silence(answer, probe, self.order.silence_seconds, self.order.keepalive_seconds)
        yield checks.http_version(probe, is_tls=self.way.is_tls, alpn=alpn)
        yield from checks.request_headers(
            probe, self.way.url, has_proxy=bool(self.hops), is_outermost=self.is_outermost
        )
        yield from checks.response_headers(answer, PROBE_ID)

    def websocket(self) -> Verdict:
        """Open the site's WebSocket, have a message answered, be silent, and have another answered."""
        parts = urlsplit(self.way.url)
        seconds, path = self.order.silence_seconds, self.order.paths["websocket"]
        stays_open = "silence" in self.order.only
        try:
            with self.way.websocket(path, self.headers, f"{parts.scheme}://{parts.netloc}") as socket:
                if not _is_answered(socket, _SPARE_SECONDS):
                    return found("websocket", "no_upgrade", "A WebSocket opens, but its messages are not answered.")
                if stays_open and not _stays_open(socket, seconds):
                    said = f"A WebSocket is cut within {seconds:.0f} s of silence."
                    return found("websocket", "socket_cut", said)
        except NotUpgraded as refused:
            return _refused(refused)
        except (WayError, OSError) as error:
            return found("websocket", "no_upgrade", f"No WebSocket opens: {error}")
        silent = f", and stays open through {seconds:.0f} s of silence" if stays_open else ""
        return ok("websocket", f"A WebSocket opens, its messages are answered{silent}.")

    def of_answers(self, wanted: Sequence[str]) -> Iterator[Verdict]:
        """Run the checks that need a model."""
        if not self.order.model:
            said = "It needs answers of a model, and --no-answers was given."
            yield from (unknown(name, said) for name in _OF_ANSWERS if name in wanted)
            return
        for name in (name for name in _OF_ANSWERS if name in wanted):
            try:
                yield from self._of_answers(name)
            except (answers.NoAnswer, WayError) as error:
                yield unknown(name, str(error))

    def _of_answers(self, name: str) -> Iterator[Verdict]:
        order, paths = self.order, self.order.paths
        if name == "resume":
            yield answers.resume(self.way, paths["streams"], self.headers, order.model)
            return
        yield answers.disconnect(self.way, paths["streams"], self.headers, order.model)
        yield answers.whole_disconnect(self.way, paths["whole"], self.headers, order.model, order.owner)


def examine(url: str, order: Order, *, outermost: str = "") -> Examination:
    """Run the checks of `order` at `url`. `outermost` is the address that readers use, where `url` is a hop within."""
    outer = urlsplit(outermost or url)
    headers = {"Host": outer.netloc, "X-Forwarded-Proto": outer.scheme} if outermost else {}
    examiner = _Examiner(Way(url=url.rstrip("/"), headers=headers), order, is_outermost=not outermost)
    try:
        first = examiner.ask(Plan(num_events=0, num_keepalives=0))
    except WayError as error:
        return Examination(url=url, verdicts=(found("reach", "unreachable", str(error)),))
    reached = _reach(first, examiner.way)
    request = checks.received(first.unpacked() or []).first("request")
    shown = {name.lower(): first.header(name.lower()) for name, _ in first.headers}
    examiner.hops = hops_of(shown, dict(request.get("headers", ())), examiner.way.error_page())
    verdicts = [reached]
    if reached.state != FOUND:
        done = examiner.verdicts()
        verdicts += sorted(_wanted(done, order.only), key=lambda verdict: CHECKS.index(verdict.check))
    return Examination(url=url, hops=examiner.hops, web_server=web_server_of(shown), verdicts=tuple(verdicts))


def locate(examinations: Sequence[Examination]) -> Examination:
    """Return the outermost examination, each of its faults with the hops in which it may lie.

    A fault that is found at one address and not at the next one within lies between the two.
    """
    outermost = examinations[0]
    located = []
    for verdict in outermost.verdicts:
        if verdict.state == FOUND:
            depth = max(at for at, one in enumerate(examinations) if at == 0 or verdict.fault in one.faults())
            within = examinations[depth + 1].hops if depth + 1 < len(examinations) else ()
            between = tuple(hop for hop in examinations[depth].hops if hop not in within)
            hops = between or examinations[depth].hops or (SITE,)
            is_limit = all(line_for(verdict.fault, hop).startswith(NO_LINE) for hop in hops)
            verdict = replace(verdict, hops=hops, state=LIMIT if is_limit else FOUND)
        located.append(verdict)
    return replace(outermost, verdicts=tuple(located))


def _wanted(verdicts: Iterator[Verdict], only: Sequence[str]) -> Iterator[Verdict]:
    return (verdict for verdict in verdicts if verdict.check in only)


def _reach(answer: Answer, way: Way) -> Verdict:
    """Return whether the probe was answered by this site."""
    if answer.status == 200 and checks.received(answer.unpacked() or []).events:
        return ok("reach", "The address leads to this site.")
    if answer.status in (301, 302, 303, 307, 308):
        target = answer.header("location").partition("?")[0]
        return found("reach", "redirected", f"The address redirects to {target}. Examine that address instead.")
    code, message = _error(answer)
    if code:
        return found("reach", "refused_by_site", f"The site refuses the probe: {message}")
    if answer.status in (502, 503, 504):
        said = f"A proxy answers {answer.status}: it reaches no web process behind it."
        return found("reach", "no_web_process", said)
    if answer.status == 400:
        said = "The site answers 400: its host is not in ALLOWED_HOSTS, or a proxy changes it."
        return found("reach", "host_refused", said)
    said = f"Something else answers at {way.url}, with status {answer.status}: it is not this site."
    return found("reach", "other_site", said)


def _error(answer: Answer) -> tuple[str, str]:
    """Return code and message of an error of ours; "" for what is none."""
    try:
        error: dict[str, Any] = json.loads(answer.body)["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def _is_answered(socket: WebSocket, seconds: float) -> bool:
    """Send a ping and return whether its pong comes. A ping of the site's own may come before."""
    socket.send({"type": "ping"})
    while (message := socket.receive(seconds)) is not None:
        if message.get("type") == "pong":
            return True
    return False


def _stays_open(socket: WebSocket, seconds: float) -> bool:
    """Be silent for so long, and return whether a message is answered then."""
    until = time.monotonic() + seconds
    while socket.has_news(until - time.monotonic()):
        if socket.receive(_SPARE_SECONDS) is None:  # else it is a ping of the site's own
            return False
    try:
        return _is_answered(socket, _SPARE_SECONDS)
    except OSError:
        return False


def _refused(refused: NotUpgraded) -> Verdict:
    if refused.status in (401, 403):
        said = f"The site refuses the WebSocket (status {refused.status}): the origin or the key is not accepted."
        return found("websocket", "socket_refused", said)
    said = f"No WebSocket opens: the handshake is answered with status {refused.status}. The upgrade is not passed on."
    return found("websocket", "no_upgrade", said)
