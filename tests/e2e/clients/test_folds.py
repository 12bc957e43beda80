"""The official anthropic client puts our streamed messages together to the messages that we show whole. No server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from streamserve.dialects.anthropic import message
from streamserve.dialects.fold import Answer
from tests.e2e.clients.test_clients import python as python  # the fixture
from tests.support.bodies.event_logs import blocks
from tests.support.bodies.random_logs import RandomAnswer, named, random_answer
from tests.support.checks.message_checks import events_in

SCRIPT = Path(__file__).parent / "scripts" / "fold_messages.py"


def pair(answer: RandomAnswer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of a message, and the whole of it."""
    encoder = message.encoder_for(answer)
    events = events_in(b"".join(map(encoder.encode, answer.log)))
    return [data for _, data in events], message.message_json(Answer.of(answer.log), **message.identity(answer))


def is_readable(whole: dict[str, Any]) -> bool:
    """Return whether every call has arguments that are JSON: at others that client raises."""
    return not any("partial_json" in block.get("input", ()) for block in whole["content"])


def test_the_clients_fold_is_the_whole_message(python: Path) -> None:
    """Its accumulator, fed our events, makes the message that is not streamed."""
    pairs = [pair(named(blocks())), *(pair(random_answer(seed, succeeds=True)) for seed in range(150))]
    readable = [one for one in pairs if is_readable(one[1])]
    assert len(readable) > 80
    done = subprocess.run(
        [str(python), str(SCRIPT)], input=json.dumps(readable), text=True, capture_output=True, timeout=120
    )
    assert done.stdout == "folded\n", done.stderr[-4000:]
