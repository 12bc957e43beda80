"""The bytes of every dialect, as they were recorded: a change of the fold or of a dialect shows here first.

`python -m tests.dialects.test_golden` records them anew, after a change that is meant.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamserve.dialects import native
from streamserve.dialects.ag_ui import events as ag_ui
from streamserve.dialects.ai_sdk import chunks
from streamserve.dialects.anthropic import message
from streamserve.dialects.encoder import Encoder, coalesce
from streamserve.dialects.fold import Answer
from streamserve.dialects.mcp import Asked as McpCall
from streamserve.dialects.mcp import McpEncoder
from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.openai import chat, completions
from streamserve.dialects.openai.completions import CompletionEncoder, Joined
from streamserve.dialects.openai.plain_tokens import PlainEncoder
from streamserve.dialects.openai.responses import output as response_output
from streamserve.dialects.openai.shapes import fingerprint
from streamserve.dialects.plain import TextEncoder, TokensEncoder
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import Done, GoingAway, LoggedEvent, is_terminal
from tests.support.bodies.event_logs import LOG_ID, blocks, interrupted, two_choices
from tests.support.bodies.random_logs import RandomAnswer, named, random_answer

RECORDED = Path(__file__).resolve().parents[1] / "data" / "dialects" / "golden.json"
SEEDS = range(80)
USAGE: dict[str, Any] = {"include_usage": True}
COUNTING: dict[str, Any] = {"include_usage": True, "continuous_usage": True}
IDS: dict[str, Any] = {"return_token_ids": True, "prompt_token_ids": (1, 2, 3)}
RESPONSE_HEAD: dict[str, Any] = {"model": "helpdesk", "tools": [{"type": "custom", "name": "look_up"}]}
# Each takes the id of the reader's last frame where the dialect shows an event in several.
ENCODERS: dict[str, Callable[..., Encoder]] = {
    "ag-ui": lambda answer, **last: ag_ui.encoder_for(answer, **last),
    "chat": lambda answer, **last: chat.encoder_for(answer, **last),
    "chat, usage": lambda answer, **last: chat.encoder_for(answer, **USAGE, **last),
    "chat, counting": lambda answer, **last: chat.encoder_for(answer, **COUNTING, **last),
    "chat, obfuscated": lambda answer, **last: chat.encoder_for(answer, include_obfuscation=True, **last),
    "chat, no thoughts": lambda answer, **last: chat.encoder_for(answer, include_reasoning=False, **last),
    "chat, one field": lambda answer, **last: chat.encoder_for(answer, reasoning_field="reasoning", **last),
    "chat, ids": lambda answer, **last: chat.encoder_for(answer, **IDS, **last),
    "responses": lambda answer, **last: response_output.encoder_for(answer, RESPONSE_HEAD, **last),
    "mcp": lambda answer, **last: McpEncoder(answer, McpCall(id=1, token="p", is_resumable=True, is_primed=True)),
    "mcp, newer": lambda answer, **last: McpEncoder(answer, McpCall(id="a", is_modern=True)),
    "completions": lambda answer, **last: CompletionEncoder(answer, **last),
    "completions, counting": lambda answer, **last: CompletionEncoder(answer, **COUNTING, **last),
    "completions, ids": lambda answer, **last: CompletionEncoder(answer, **IDS, **last),
    "messages": lambda answer, **last: message.encoder_for(answer, **last),
    "messages, no thoughts": lambda answer, **last: message.encoder_for(answer, shows_thinking=False, **last),
    "ui messages": lambda answer, **last: chunks.encoder_for(answer, **last),
    "native": lambda answer, **last: NativeEncoder(answer.log_id, answer),
    "native, unnamed": lambda answer, **last: NativeEncoder(answer.log_id),
    "text": lambda answer, **last: TextEncoder(),
    "tokens": lambda answer, **last: TokensEncoder(answer.log_id),
    "plain tokens": lambda answer, **last: PlainEncoder(answer.log_id),
}
READABLE = (
    "ag-ui",
    "chat",
    "responses",
    "mcp",
    "completions",
    "messages",
    "ui messages",
    "native",
    "text",
    "tokens",
    "plain tokens",
)


def frames(encoder: Encoder, log: list[LoggedEvent], after: int = 0) -> str:
    """Return what a reader gets who has the events up to `after`."""
    parts = [encoder.first_bytes, encoder.keepalive, encoder.keepalive_event]
    parts += [part for logged in log if (part := encoder.encode(logged)) and logged.seq > after]
    return b"".join([*parts, encoder.keepalive_event]).decode()


def streamed(answer: RandomAnswer, make: Callable[..., Encoder]) -> Iterator[str]:
    """Yield the frames of a whole stream, with tokens joined, of one that is resumed, and of one that is cut off."""
    log, middle = answer.log, len(answer.log) // 2
    yield frames(make(answer), log)
    yield frames(make(answer), coalesce(log, max_tokens=3))
    yield "".join(frames(make(answer, last_id=f"{LOG_ID}-{middle}:{letter}1"), log, middle) for letter in "ctm")
    cut = make(answer)
    frames(cut, log[:middle])
    yield cut.going_away(GoingAway(stream_id=answer.id, seq=middle, retry_ms=5)).decode()


def joined(answer: RandomAnswer) -> str:
    """Return the frames of two streams in one response of text completions."""
    end = Joined(2, include_usage=True)
    parts = (
        CompletionEncoder(answer, joined=end, completion_id="cmpl-x", first_index=place, include_usage=True)
        for place in (0, answer.request.n)
    )
    return "".join(frames(part, answer.log) for part in parts) + end.last_bytes().decode()


def messages(answer: RandomAnswer) -> Iterator[str]:
    """Yield the WebSocket's messages."""
    for logged in answer.log:
        if isinstance(logged.event, Done):
            yield json.dumps(native.closing_message(answer, logged.event))
        yield json.dumps(native.websocket_message(answer.id, answer.log_id, logged))


def whole(answer: RandomAnswer) -> Iterator[str]:
    """Yield the answer as each dialect shows it that does not stream; the error where it has failed."""
    folded = Answer.of(answer.log, answer.request.n)
    named, ids = chat.identity(answer), (1, 2, 3)
    yield _attempt(lambda: chat.completion_json(folded, **named))
    yield _attempt(lambda: chat.completion_json(folded, include_reasoning=False, **IDS, **named))
    yield _attempt(lambda: completions.completion_json([(answer, folded)]))
    twice = 2 * [(answer, folded)]
    yield _attempt(lambda: completions.completion_json(twice, shows_prompt=True, prompt_token_ids=2 * [ids]))
    yield _attempt(lambda: message.message_json(folded, **message.identity(answer)))
    yield _attempt(lambda: native.run_json(folded, stream_id=answer.id, pipeline="p", created=answer.created))


def _attempt(make: Callable[[], dict[str, Any]]) -> str:
    try:
        return json.dumps(make(), ensure_ascii=False)
    except StreamserveError as error:
        return f"{error.code}: {error.message}"


def views(answer: RandomAnswer) -> Iterator[tuple[str, str]]:
    """Yield each view of an answer by its name, without what a release changes."""
    neutral = fingerprint(answer.model)
    for name, make in ENCODERS.items():
        yield name, "\n".join(streamed(answer, make)).replace(neutral, "fp_1")
    yield "completions, joined", joined(answer).replace(neutral, "fp_1")
    yield "responses, whole", json.dumps(response_output.response_json(answer.log, answer, RESPONSE_HEAD))
    yield "websocket", "\n".join(messages(answer))
    if is_terminal(answer.log[-1].event):
        yield "whole", "\n".join(whole(answer)).replace(neutral, "fp_1")


def recorded() -> dict[str, dict[str, str]]:
    """Return what is recorded: the bytes of a short answer, and a digest of each view of many others."""
    short, asking = named(blocks()), named(interrupted())
    shown = {name: frames(ENCODERS[name](short), short.log) for name in READABLE}
    asked = {name: frames(ENCODERS[name](asking), asking.log) for name in READABLE}
    asked["whole"] = "\n".join(whole(asking))
    digests: dict[str, Any] = {}
    for answer in (short, named(two_choices(), n=2), *map(random_answer, SEEDS)):
        for name, text in views(answer):
            digests.setdefault(name, hashlib.sha256()).update(text.encode())
    return {
        "short": {name: text.replace(fingerprint(short.model), "fp_1") for name, text in shown.items()},
        "interrupted": {name: text.replace(fingerprint(short.model), "fp_1") for name, text in asked.items()},
        "digests": {name: digest.hexdigest() for name, digest in digests.items()},
    }


@pytest.mark.parametrize("kind", ["short", "interrupted", "digests"])
def test_the_bytes_are_those_that_were_recorded(kind: str) -> None:
    """No view of any answer has changed by a byte."""
    now, before = recorded()[kind], json.loads(RECORDED.read_text())[kind]
    assert now.keys() == before.keys()
    assert [name for name in before if now[name] != before[name]] == []


if __name__ == "__main__":
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps(recorded(), indent=1, ensure_ascii=False) + "\n")
