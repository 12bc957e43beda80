"""Hand-made event logs for the tests of the dialects."""

from __future__ import annotations

from dataclasses import replace

from streamserve.protocol.events import (
    Approval,
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

LOG_ID = "abcdefghijkl"
IDENTITY = {"completion_id": "chatcmpl-1", "model": "helpdesk", "created": 1_700_000_000}
META = Meta(model="helpdesk", stream_id="f" * 32, created=1_700_000_000, prompt_tokens=9, cached_tokens=4)
USAGE = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=4)


def numbered(*events: Event) -> list[LoggedEvent]:
    """Return `events` as a log numbers them."""
    return [LoggedEvent(seq=seq, event=event) for seq, event in enumerate(events, start=1)]


def tok(
    text: str, *ids: int, choice: int = 0, index: int = 0, logprobs: tuple[PositionLogprobs, ...] | None = None
) -> Token:
    """Return a token event."""
    return Token(text=text, token_ids=ids or (7,), choice=choice, index=index, logprobs=logprobs)


def block(index: int, kind: str, *texts: str, choice: int = 0, signature: str | None = None) -> list[Event]:
    """Return a whole block; a tool call has an id and a name."""
    named = {"id": "call_1", "name": "look_up"} if kind == "tool_use" else {}
    return [
        BlockStart(choice=choice, index=index, kind=kind, **named),
        *(tok(text, choice=choice, index=index) for text in texts),
        BlockStop(choice=choice, index=index, signature=signature),
    ]


def blocks() -> list[LoggedEvent]:
    """Return a log of every kind of event: a thought, text with a citation, a call, and an event of a later release."""
    cited = Citation(source="docs", id="d1", title="A", url="https://a", choice=0, index=1, start=0, end=5)
    return numbered(
        META,
        Citation(source="docs", id="d0"),
        *block(0, "thinking", "Hm", ".", signature="s1"),
        *block(1, "text", "Hel", "lo"),
        cited,
        Unknown(kind="mood", fields=b"\x80"),
        *block(2, "tool_use", "", '{"a":', "1}"),
        Done(finish_reason="tool_calls", usage=replace(USAGE, completion_tokens=7, reasoning_tokens=2)),
    )


def interrupted() -> list[LoggedEvent]:
    """Return a log of a run that waits for its user: a text, a call with its result, and a call that it asks about."""
    return numbered(
        META,
        Status(status="step", step=1, of=2, message="Look"),
        tok("I look."),
        BlockStart(choice=0, index=1, kind="server_tool_use", id="call_1", name="find"),
        tok('{"number": 7}', index=1),
        BlockStop(choice=0, index=1),
        BlockStart(choice=0, index=2, kind="server_tool_use", id="call_2", name="cancel"),
        tok('{"number": 7}', index=2),
        BlockStop(choice=0, index=2),
        BlockStart(choice=0, index=3, kind="tool_result", id="call_1"),
        Token(text="Found.", token_ids=(), index=3),
        BlockStop(choice=0, index=3),
        Approval(id="call_2", name="cancel", arguments='{"number": 7}', message="Cancel invoice 7?"),
        Done(finish_reason="interrupt", usage=replace(USAGE, completion_tokens=3), latency=0.5),
    )


def success(*tokens: Event, reason: str = "stop") -> list[LoggedEvent]:
    """Return a log that ends in success."""
    done = Done(finish_reason=reason, usage=USAGE, latency=0.5, breakdown={"ttft": 0.125})
    return numbered(META, Status(status="prefill"), *tokens, done)


def failure(*tokens: Event) -> list[LoggedEvent]:
    """Return a log that ends in an engine failure."""
    return numbered(META, *tokens, Error(code="engine_unavailable", message="The engine is gone.", retryable=True))


def two_choices() -> list[LoggedEvent]:
    """Return a log of n=2 whose choices interleave; the second finishes first, with another reason."""
    return success(
        tok("A", choice=0),
        tok("x", choice=1),
        ChoiceDone(choice=1, finish_reason="length"),
        tok("B", choice=0),
        ChoiceDone(choice=0, finish_reason="stop"),
    )


def split_emoji() -> Token:
    """Return "🎉" made of two tokens; neither is text alone, and the bytes show each half."""
    first, second = "🎉".encode()[:2], "🎉".encode()[2:]
    return tok("🎉", 11, 12, logprobs=(_position(11, first, -0.25), _position(12, second, -0.5)))


def _position(token_id: int, piece: bytes, logprob: float) -> PositionLogprobs:
    token = piece.decode("utf-8", "replace")
    chosen = TokenLogprob(token_id=token_id, token=token, bytes_=piece, logprob=logprob)
    masked = TokenLogprob(token_id=99, token="no", bytes_=b"no", logprob=float("-inf"))
    return PositionLogprobs(chosen=chosen, top=(chosen, masked))
