"""A site's rows as they are in practice: long names of models, people and files, ids whole. For the admin's pages.

`python -m tests.support.sites.admin_rows` writes them to the database of DJANGO_SETTINGS_MODULE.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

MODEL = "meta-llama/Llama-3.3-70B-Instruct-AWQ-INT4-group128"
PIPELINE = "account_review_with_every_invoice_and_reminder"
PERSON = "maximilian.oberhuber@versicherungsgesellschaft.example"
QUESTION = "Why was I charged twice in October, and when do I get the second payment back?"
ANSWER = (
    "You were charged twice because the first payment was declined by your bank and went through a day later.\n\n"
    "- **2 October**: declined\n- **3 October**: both payments booked\n\n"
    "The second payment is refunded within five working days <b>to the same card</b>."
)


CITATIONS = [
    {"source": "help", "id": "refunds", "title": "Refunds and second payments", "url": "https://help.example/refunds"},
    {"source": "help", "id": "x", "title": "A source that is no address", "url": "javascript:alert(1)"},
]
STEPS = [{"status": "step", "step": 1, "of": 2, "message": "Reading the payments of October"}]


def make_rows() -> dict[str, str]:
    """Insert rows of every kind that the admin shows; return the id of one of each by its model's name."""
    from django.contrib.auth import get_user_model
    from django.utils import timezone

    from streamserve.models import (
        ApiKey,
        Batch,
        Job,
        StoredFile,
        Stream,
        Watch,
        WebhookDelivery,
        Worker,
    )

    now = timezone.now()
    user = get_user_model().objects.create_user(PERSON, password=None)
    key, _ = ApiKey.objects.make(
        user=user,
        name="nightly export of the data warehouse, staging",
        scopes=["chat", "ops", "watch"],
        latency_class="completion",
        last_used_at=now,
        expires_at=now + timedelta(days=300),
    )
    owners = [(f"user:{user.pk}", f"user:{user.pk}"), (f"key:{key.pk}", f"user:{user.pk}")]
    owners += [(f"anon:{'5f3a' * 8}",) * 2, ("user:987654",) * 2, ("key:123456",) * 2]
    streams = [_stream(number, *owners[number % len(owners)]) for number in range(10)]
    Stream.objects.bulk_create([*streams, _job_stream(*owners[0])])
    failed = {"state": "failed", "error_code": "structured_output_failed", "error_message": "The grammar. " * 20}
    job = Job.objects.create(
        id="0b" * 16,
        stream_id="ab" * 16,
        pipeline=PIPELINE,
        owner=owners[1][0],
        tenant=owners[1][1],
        webhook="accounting-department-production",
        attempts=3,
        due_at=now,
        started_at=now - timedelta(hours=5),
        finished_at=now,
        producer="worker-" + "7" * 25,
        progress=json.dumps({"step": "Reading every invoice of the last two years", "of": 12}),
        **failed,
    )
    for number in range(3):
        job.steps.create(name=f"Reading every invoice of {2024 + number}", ordinal=0, result="{}", seconds=83.2)
    hook = WebhookDelivery.objects.create(
        id="msg_" + "c" * 24, job=job, webhook=job.webhook, due_at=now, attempts=9, **failed
    )
    Worker.objects.create(id="w" * 32, kinds="jobs, batches, webhooks", concurrency=4, beat_at=now)
    owner = {"owner": owners[1][0], "tenant": owners[1][1]}
    for name, filename in (("file-in", "questions-of-the-quality-assurance-team.jsonl"), ("file-out", "out.jsonl")):
        pk = f"{name}-{'9' * 24}"
        StoredFile.objects.create(
            id=pk, name=pk, filename=filename, purpose="batch_output", num_bytes=123_456_789, is_ready=True, **owner
        )
    batch = Batch.objects.create(
        id="batch_" + "d" * 32,
        endpoint="/v1/chat/completions",
        status="cancelled",
        state="cancelled",
        input_file_id=f"file-in-{'9' * 24}",
        output_file_id=f"file-out-{'9' * 24}",
        num_rows=50_000,
        num_completed=12_345,
        num_failed=678,
        metadata={"team": "quality assurance", "run": "nightly"},
        due_at=now,
        started_at=now - timedelta(hours=50),
        expires_at=now + timedelta(hours=24),
        **owner,
    )
    watch = Watch.objects.create(
        stream_id=streams[0].pk,
        stream_owner=owners[2][0],
        watcher=owners[1][0],
        username=PERSON,
        address="2001:db8:85a3:8d3:1319:8a2e:370:7348",
        last_seq=12_345,
        ended_at=now,
    )
    attachment, conversation, answer, share = _conversation(user, owners[1][0], streams)
    rows: dict[str, Any] = {"stream": streams[0], "job": job, "webhookdelivery": hook, "batch": batch, "watch": watch}
    rows |= {"apikey": key, "worker": Worker.objects.get(pk="w" * 32), "storedfile": StoredFile.objects.earliest("id")}
    rows |= {"attachment": attachment, "conversation": conversation, "message": answer, "share": share}
    rows["usageday"] = _usage(owners)
    return {name: str(row.pk) for name, row in rows.items()}


def _usage(owners: Sequence[tuple[str, str]]) -> Any:
    """What each owner has used on each of twenty days, much on some and nothing on others."""
    from django.utils import timezone

    from streamserve.models import UsageDay

    days = [
        UsageDay(
            day=timezone.localdate() - timedelta(days=ago),
            owner=owner,
            tenant=tenant,
            team="quality assurance" if ago % 2 else "",
            model=PIPELINE if ago % 3 else "small",
            kind="answer",
            requests=12_345 + ago,
            prompt_tokens=(ago % 7) * 123_456_789,
            cached_tokens=(ago % 7) * 23_456_789,
            completion_tokens=(ago % 5) * 3_456_789,
            errors=ago,
            engine_seconds=40_000.5,
            cost=Decimal("1234.5678"),
        )
        for ago in range(20)
        for owner, tenant in owners
    ]
    return UsageDay.objects.bulk_create(days)[0]


def _conversation(user: Any, owner: str, streams: list[Any]) -> tuple[Any, ...]:
    """A question with two answers, a rated one that goes on to a second question whose answer is being written."""
    from django.utils import timezone

    from streamserve.models import Attachment, Conversation, Message, Share

    now, tenant = timezone.now(), f"user:{user.pk}"
    conversation = Conversation.objects.create(
        id="cc" * 16, owner=owner, tenant=tenant, user=user, title=QUESTION, model=PIPELINE, leaf="04" * 16
    )

    def message(number: int, parent: int | None, text: str, **fields: Any) -> Any:
        blocks = [{"index": 0, "kind": "text", "text": text}]
        if "stream_id" in fields:
            call = {
                "index": 1,
                "kind": "tool_use",
                "name": "find_payments",
                "text": '{"month": "2026-10", "all": true}',
            }
            blocks = [{"index": 0, "kind": "thinking", "text": "Two payments. " * 30}, call, *blocks]
        content = (
            {"blocks": blocks, "citations": CITATIONS, "steps": STEPS} if "stream_id" in fields else {"blocks": blocks}
        )
        return Message.objects.create(
            id=f"{number:02}" * 16,
            conversation=conversation,
            parent_id=None if parent is None else f"{parent:02}" * 16,
            role="assistant" if "stream_id" in fields else "user",
            content=json.dumps(content),
            text=text,
            created_at=now + timedelta(seconds=number),
            model=PIPELINE,
            **fields,
        )

    question = message(1, None, QUESTION)
    first = {"stream_id": streams[4].pk, "finish_reason": "stop", "finished_at": now + timedelta(seconds=75)}
    rating = {
        "rating": -1,
        "comment": "=HYPERLINK(1) This is not what my bank says, see the statement.",
        "rated_at": now,
    }
    answer = message(2, 1, ANSWER, **first, **rating, prompt_tokens=812, cached_tokens=768, completion_tokens=120)
    message(3, 1, "You were not.", stream_id=streams[8].pk, state="failed", error_code="context_length_exceeded")
    message(4, 2, "And what about " + "a" * 300 + "?")
    message(5, 4, "", stream_id=streams[2].pk, state="running")
    attachment = Attachment.objects.create(
        owner=owner,
        tenant=tenant,
        user=user,
        name="bank-statement-of-october-2026-for-the-joint-account.csv",
        content_type="text/csv",
        num_bytes=123_456,
        num_chars=120_000,
        text="date;amount\n" * 40,
        is_ready=True,
        is_sent=True,
    )
    attachment.messages.add(question)
    share = Share.objects.create(conversation=conversation, leaf=answer.pk, digest="d" * 64, expires_at=now)
    return attachment, conversation, answer, share


def _stream(number: int, owner: str, tenant: str) -> Any:
    from django.utils import timezone

    from streamserve.models import Stream

    began = timezone.now() - timedelta(minutes=7 * number, seconds=number)
    ends: list[dict[str, Any]] = [
        {"state": "finished", "finish_reason": "length", "finished_at": began + timedelta(seconds=3723)},
        {"state": "finished", "error_code": "context_length_exceeded", "finished_at": began},
        {"state": "running", "producer": "p" * 32, "fence": 12},
        {"state": "finished", "finish_reason": "content_filter", "finished_at": began + timedelta(seconds=2)},
    ]
    return Stream(
        id=f"{number:x}" * 32,
        log_id=f"{number:x}" * 12,
        owner=owner,
        tenant=tenant,
        model=MODEL if number % 2 else PIPELINE,
        prompt_tokens=123_456,
        cached_tokens=98_304,
        completion_tokens=12_345,
        ttft_seconds=12.345,
        phases={"network_in": 0.02, "queue": 1.5, "prefill": 2.75, "decode": 3600.25, "waiting_for_reader": 119.5},
        created_at=began,
        **ends[number % len(ends)],
    )


def _job_stream(owner: str, tenant: str) -> Any:
    from streamserve.models import Stream

    return Stream(
        id="ab" * 16, log_id="ab" * 6, owner=owner, tenant=tenant, model=PIPELINE, state="running", on_disconnect="job"
    )


if __name__ == "__main__":
    import django

    django.setup()
    print(json.dumps(make_rows()))
