"""Files and batches with the official OpenAI client, from the upload to the results. The web process has a worker."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from tests.e2e.clients.conftest import MODEL
from tests.support.sites.batch_runs import ENDED, jsonl, line

HELLO = [{"role": "user", "content": "Hello!"}]
_DEADLINE_SECONDS = 120.0


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    """Poll as the guide shows it, until the batch has ended."""
    until = time.monotonic() + _DEADLINE_SECONDS
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < until, batch
        time.sleep(0.05)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_upload_to_results(client: openai.OpenAI) -> None:
    """Answers are those of the route, in the order of the input; wrong rows are in the error file."""
    ask = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 40}
    rows = [line(f"row-{n}", **ask, seed=n) for n in range(6)] + [line("wrong", **{**ask, "temperature": 9})]
    file = client.files.create(file=("tickets.jsonl", jsonl(rows)), purpose="batch")
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "tickets.jsonl")
    assert client.files.content(file.id).read() == jsonl(rows)
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"job": "nightly"},
    )
    assert (batch.object, batch.status in ("validating", "in_progress"), batch.metadata) == (
        "batch", True, {"job": "nightly"},
    )  # fmt: skip
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 7, "completed": 6, "failed": 1}
    alone = client.chat.completions.create(**ask, seed=0)
    output = results(client, batch.output_file_id)
    assert [one["custom_id"] for one in output] == [f"row-{n}" for n in range(6)]
    for one in output:
        answer = openai.types.chat.ChatCompletion.model_validate(one["response"]["body"])
        assert answer.choices == alone.choices
    (wrong,) = results(client, batch.error_file_id)
    assert wrong["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [one.id for one in client.batches.list()]
    assert {file.id, batch.output_file_id} <= {one.id for one in client.files.list()}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_wrong_file_and_a_cancelled_batch(client: openai.OpenAI) -> None:
    """The errors of a failed batch have lines; a batch is cancelled once."""
    row = line("a", model=MODEL, messages=HELLO, max_tokens=4)
    file = client.files.create(file=("twice.jsonl", jsonl([row, row])), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = ended(client, batch.id)
    assert batch.status == "failed"
    assert [(one.code, one.line) for one in batch.errors.data] == [("duplicate_custom_id", 2)]
    with pytest.raises(openai.BadRequestError, match="nothing left to cancel"):
        client.batches.cancel(batch.id)
    with pytest.raises(openai.BadRequestError, match="takes no batches"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h")
    many = jsonl(line(f"r{n}", model=MODEL, messages=HELLO, max_tokens=400, ignore_eos=True) for n in range(200))
    file = client.files.create(file=("many.jsonl", many), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    kept = results(client, batch.output_file_id) if batch.output_file_id else []
    assert len(kept) + len(results(client, batch.error_file_id)) == 200
