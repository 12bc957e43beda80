"""`answer_finished` for the rows of a batch: once for each answer, with its row."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.db import connection

from streamserve.models import ApiKey, BatchRow
from streamserve.signals import answer_finished, answer_refused, answer_started
from tests.support.sites.batch_runs import Tenant, jsonl, line
from tests.support.sites.connected import connected

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


async def test_each_row_s_answer_is_told_of_once(alice: Any, alice_key: str) -> None:
    """In the transaction of its row, with the usage in its response; a row that began no answer is not told of."""
    told: list[dict[str, Any]] = []
    others: list[Any] = []

    def note(sender: Any, **values: Any) -> None:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        assert connection.in_atomic_block
        assert BatchRow.objects.filter(pk=values["row"].pk).exists()
        told.append({**values, "sender": sender})

    def other(**values: Any) -> None:
        others.append(values)

    rows = [line(f"row {number}") for number in range(6)]
    rows.append({**line("lost"), "body": {**rows[0]["body"], "model": "no"}})
    with connected(answer_finished, note), connected(answer_started, other), connected(answer_refused, other):
        batch = await Tenant(alice_key).run(jsonl(rows))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 6)
    assert sorted(one["row"].custom_id for one in told) == [f"row {number}" for number in range(6)]
    assert len({one["stream_id"] for one in told}) == 6
    assert others == []
    results = {
        one["custom_id"]: one["response"]["body"] for one in await Tenant(alice_key).lines(batch["output_file_id"])
    }
    key = await ApiKey.objects.aget()
    for one in told:
        usage = results[one["row"].custom_id]["usage"]
        assert one["usage"].completion_tokens == usage["completion_tokens"] > 0
        assert one["usage"].prompt_tokens == usage["prompt_tokens"]
        assert (one["sender"], one["batch_id"], one["model"]) == (BatchRow, batch["id"], "echo")
        assert (one["user_id"], one["key_id"], one["finish_reason"]) == (alice.pk, key.pk, "length")


async def test_the_answers_of_several_prompts_are_one(alice_key: str) -> None:
    """A row of several prompts is one answer, with the sum of their usage."""
    told: list[dict[str, Any]] = []
    row = line("two", "/v1/completions", prompt=["a", "b"])
    row["body"]["max_tokens"] = 3
    with connected(answer_finished, lambda **values: told.append(values)):
        await Tenant(alice_key).run(jsonl([row]), "/v1/completions")
    assert [one["usage"].completion_tokens for one in told] == [6]
