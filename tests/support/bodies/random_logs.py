"""Random event logs that keep the grammar of events, for tests of the dialects: a seed always makes the same log."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from streamserve.protocol.events import (
    BlockStart,
    BlockStop,
    ChoiceDone,
    Citation,
    Done,
    Error,
    Event,
    LoggedEvent,
    Meta,
    PositionLogprobs,
    Status,
    Token,
    TokenLogprob,
    Unknown,
    Usage,
)
from streamserve.protocol.requests import GenerateRequest, SamplingParams
from tests.support.bodies.event_logs import LOG_ID, numbered

_TEXTS = ("", "a", "Hé", "llo ", "\n\n", "🎉", '{"a":', "1}", '\\"', "\u2028", "x" * 30, "</think>")
_PIECES = (b"a", "🎉".encode()[:2], "🎉".encode()[2:], "é".encode(), b"\xff", b"")
_SUCCESSES = ("stop", "length", "tool_calls", "content_filter")
_CODES = ("engine_unavailable", "timeout", "queue_timeout", "internal_error", "producer_lost", "invalid_value")


@dataclass(frozen=True, kw_only=True)
class RandomAnswer:
    """A log, and what names its stream to a dialect. It may lack its end."""

    log: list[LoggedEvent]
    request: GenerateRequest
    has_token_ids: bool
    id: str = "f" * 32
    log_id: str = LOG_ID
    model: str = "helpdesk"
    created: int = 1_700_000_000
    outline: tuple[Citation | Status, ...] = ()


def named(log: list[LoggedEvent], n: int = 1) -> RandomAnswer:
    """Return a log that was made by hand, with a name."""
    outline = tuple(one.event for one in log if _is_of_outline(one.event))
    request = GenerateRequest(model="helpdesk", prompt="F", n=n)
    return RandomAnswer(log=log, request=request, has_token_ids=True, outline=outline)  # type: ignore[arg-type]


class _Maker:
    """Makes one answer."""

    def __init__(self, seed: int, *, succeeds: bool) -> None:
        self.random = random.Random(seed)
        self.succeeds = succeeds
        self.n = self.random.choice([1, 1, 1, 2, 3])
        self.has_ids = self.random.random() > 0.15
        self.has_logprobs = self.random.random() < 0.3
        self.is_plain = self.random.random() < 0.3
        self.echoes = self.random.random() < 0.2 and self.has_ids
        self.scores = self.random.random() < 0.2 and self.has_ids

    def answer(self) -> RandomAnswer:
        choices = [list(self.choice(number)) for number in range(self.n)]
        if self.n > 1 and self.random.random() < 0.8:
            for number, events in enumerate(choices):
                stop = self.random.choice([None, "END"])
                events.append(
                    ChoiceDone(choice=number, finish_reason=self.random.choice(_SUCCESSES[:3]), stop_string=stop)
                )
        events = [*self.before(), *self.mixed(choices)]
        num_ids = sum(len(event.token_ids) for event in events if isinstance(event, Token))
        meta = Meta(
            model="helpdesk",
            stream_id="f" * 32,
            created=1_700_000_001,
            prompt_tokens=9,
            cached_tokens=4,
            has_token_ids=self.has_ids,
        )
        sampling = SamplingParams(logprobs=1, prompt_logprobs=1) if self.scores else SamplingParams()
        echo = self.echoes or self.scores
        return RandomAnswer(
            log=numbered(meta, *events, *self.end(num_ids)),
            request=GenerateRequest(model="helpdesk", prompt="F", n=self.n, echo=echo, sampling=sampling),
            has_token_ids=self.has_ids,
            outline=tuple(one for one in events if _is_of_outline(one)),  # type: ignore[misc]
        )

    def before(self) -> Iterator[Event]:
        if self.random.random() < 0.4:
            yield Status(status="queued", step=2)
        if self.random.random() < 0.3:
            yield Status(status="step", step=1, of=2, message="Search")
        if self.random.random() < 0.2:
            yield Status(status="trimmed", step=2, of=5, message="Left out 3.")
        if self.random.random() < 0.3:
            yield self.citation()
        if self.scores:  # of all choices; no token is sampled before
            begin = TokenLogprob(token_id=5, token="F", bytes_=b"F", logprob=None)
            yield Token(text="", token_ids=(), logprobs=(PositionLogprobs(chosen=begin), self.position()))
            yield Token(text="", token_ids=(), logprobs=(self.position(), self.position()))

    def mixed(self, choices: list[list[Event]]) -> Iterator[Event]:
        """Yield the events of all choices, each in its order, and between them some of the stream."""
        while any(choices):
            events = self.random.choice([one for one in choices if one])
            for _ in range(min(self.random.randint(1, 3), len(events))):
                yield events.pop(0)
            if self.random.random() < 0.1:
                yield Status(status="step", step=2, of=2, message="Write")
            if self.random.random() < 0.05:
                yield Unknown(kind="mood", fields=b"\x80")

    def choice(self, number: int) -> Iterator[Event]:
        first = 0
        if self.scores and number == 0:
            first = 1
        if self.echoes:
            yield Token(text="Prompt ", token_ids=(), choice=number)
            first = 1
        if self.is_plain:
            yield from self.tokens(number, 0)
            return
        for index in range(first, first + self.random.randint(0, 4)):
            yield from self.block(number, index)
            if self.random.random() < 0.3:
                yield self.citation(self.random.choice([None, number]))

    def block(self, choice: int, index: int) -> Iterator[Event]:
        kind = self.random.choice(["text", "text", "thinking", "tool_use", "mood"])
        start = BlockStart(choice=choice, index=index, kind=kind)
        if kind == "tool_use":
            start = replace(start, id=f"call_{index}", name=self.random.choice(["look_up", None]))
        yield start
        yield from self.tokens(choice, index)
        signature = self.random.choice([None, "s1"]) if kind == "thinking" else None
        yield BlockStop(choice=choice, index=index, signature=signature)

    def tokens(self, choice: int, index: int) -> Iterator[Event]:
        for _ in range(self.random.randint(0, 5)):
            num_ids = self.random.choice([1, 1, 1, 0, 2]) if self.has_ids else 0
            ids = tuple(self.random.randint(0, 2**20) for _ in range(num_ids))
            text = self.random.choice(_TEXTS)
            if text or ids:
                logprobs = tuple(self.position() for _ in ids) if self.has_logprobs and ids else None
                yield Token(text=text, token_ids=ids, choice=choice, index=index, logprobs=logprobs)
                if self.random.random() < 0.15:
                    is_of_choice = self.random.random() < 0.6
                    yield self.citation(choice, self.random.choice([None, index])) if is_of_choice else self.citation()

    def position(self) -> PositionLogprobs:
        chosen = self.candidate(-self.random.randint(0, 900) / 100)
        top = [
            self.candidate(self.random.choice([-0.5, float("-inf"), -3.25])) for _ in range(self.random.randint(0, 3))
        ]
        return PositionLogprobs(chosen=chosen, top=tuple(top))

    def candidate(self, logprob: float) -> TokenLogprob:
        piece = self.random.choice(_PIECES)
        text = piece.decode("utf-8", "replace")
        return TokenLogprob(token_id=self.random.randint(0, 99), token=text, bytes_=piece, logprob=logprob)

    def citation(self, choice: int | None = None, index: int | None = None) -> Citation:
        start = self.random.randint(0, 3) if index is not None and self.random.random() < 0.7 else None
        return Citation(
            source=self.random.choice(["docs", "web"]),
            id=str(self.random.randint(0, 3)),
            title=self.random.choice([None, "T"]),
            url=self.random.choice([None, "/u", "https://x/é"]),
            choice=choice,
            index=index,
            start=start,
            end=None if start is None else start + 2,
        )

    def end(self, num_ids: int) -> list[Event]:
        usage = Usage(
            prompt_tokens=9,
            completion_tokens=num_ids,
            cached_tokens=4,
            reasoning_tokens=self.random.choice([0, 7]),
        )
        done = Done(
            finish_reason=self.random.choice(_SUCCESSES),
            usage=usage,
            latency=0.51234,
            breakdown={"ttft": 0.125},
            stop_string=self.random.choice([None, "END"]),
            phases=self.random.choice([None, {"queue": 0.1}]),
        )
        fate = self.random.random()
        if self.succeeds or fate < 0.7:
            return [done]
        if fate < 0.8:
            return [replace(done, finish_reason=self.random.choice(["cancelled", "abandoned"]), kept_seq=3)]
        code = self.random.choice(_CODES)
        return [Error(code=code, message="It failed: é.", retryable=self.random.random() < 0.5)] if fate < 0.92 else []


def _is_of_outline(event: Event) -> bool:
    return isinstance(event, Citation) or (isinstance(event, Status) and event.status in ("step", "trimmed"))


def random_answer(seed: int, *, succeeds: bool = False) -> RandomAnswer:
    """Return the answer of a seed; `succeeds`: its log ends in success."""
    return _Maker(seed, succeeds=succeeds).answer()
