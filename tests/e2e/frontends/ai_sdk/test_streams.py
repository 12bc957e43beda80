"""What the package's own parser, schema and reader make of our streams: the message that our tests expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamserve.dialects.ai_sdk import chunks
from tests.dialects.ai_sdk.test_chunks import LOGS, answers, wire
from tests.support.checks.ui_message_checks import check_chunks, read_chunks
from tests.support.servers.node import run_script

SCRIPT = Path(__file__).parent / "read_streams.mjs"

pytestmark = pytest.mark.usefixtures("node")


def read(tmp_path: Path, streams: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what Node has read of streams."""
    file = tmp_path / "streams.json"
    file.write_text(json.dumps(streams))
    return list(run_script(SCRIPT, str(file)))


def as_shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what the reader keeps beside it: raw inputs, ids of thoughts, fields without a value."""
    dropped = {"rawInput", "providerMetadata", "callProviderMetadata"}
    parts = []
    for part in message["parts"]:
        kept = {name: value for name, value in part.items() if name not in dropped and value is not None}
        if kept["type"] == "reasoning":
            kept.pop("id", None)
        parts.append({name: value for name, value in kept.items() if name != "output" or value is not None})
    while parts and parts[-1]["type"] == "step-start":  # the reader shows it with what follows
        parts.pop()
    return {**message, "parts": parts}


def test_every_chunk_is_of_the_packages_schema(tmp_path: Path) -> None:
    """Of all kinds of answers, whole, failed, stopped and cut off; the reader's message is ours."""
    streams = [wire(answer, joined) for answer in answers() for joined in (1, 64)]
    found = read(tmp_path, [{"body": body.decode()} for body in streams])
    assert len(found) == len(streams) > 300
    for body, one in zip(streams, found, strict=True):
        page = read_chunks(body)
        if page.is_over:
            assert as_shown(one["message"]) == as_shown(page.message)
        assert one["errors"] == ([page.error] if page.error else [])


def test_a_rebuilt_message_is_read_as_the_message(tmp_path: Path) -> None:
    """What was before, and then the answer after it, as a page reads them that was loaded anew."""
    before = check_chunks(wire(next(one for one in answers() if one.log is LOGS["call"]))).message
    answer = next(one for one in answers() if one.log is LOGS["run"])
    encoder = chunks.encoder_for(answer, message_id=before["id"], before=chunks.replay_frames(before))
    body = encoder.first_bytes + b"".join(encoder.encode(logged) for logged in answer.log)
    (one,) = read(tmp_path, [{"body": body.decode()}])
    assert one["errors"] == []
    assert as_shown(one["message"]) == as_shown(check_chunks(body).message)
