"""Laws of `manage.py streamserve_export`: all that is kept about a user, and nothing of another's or secret."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from streamserve.models import ApiKey, Attachment, Conversation, Job, Message, StoredResponse, Stream
from streamserve.rows.branch import question_content

pytestmark = pytest.mark.django_db(transaction=True)


def filled(user: Any) -> str:
    """Give a user a row in several tables; return the user's API key."""
    tenant = f"user:{user.pk}"
    conversation = Conversation.objects.create(owner=tenant, tenant=tenant, user=user, title=f"{user} asks")
    question = Message.objects.create(
        conversation=conversation, role="user", content=question_content("Why?"), text="Why?"
    )
    Message.objects.create(conversation=conversation, role="assistant", parent=question, text="\N{SNOWMAN}")
    attachment = Attachment.objects.create(owner=tenant, tenant=tenant, user=user, name="bill.csv", num_bytes=3)
    attachment.messages.add(question)
    stream = Stream.objects.create(id=f"{user.pk:032x}", log_id=f"{user.pk:012d}", owner=tenant, tenant=tenant)
    StoredResponse.objects.create(stream=stream, tenant=tenant, head="{}", items="[]")
    Job.objects.create(id=stream.pk, stream_id=stream.pk, pipeline="audit", owner=tenant, tenant=tenant)
    return ApiKey.objects.make(user=user, name=f"{user}'s")[1]


def test_everything_of_a_user_is_exported(alice: Any, bob: Any, tmp_path: Path) -> None:
    """Conversations with messages and names of attachments, streams, jobs, keys: as valid JSON, of the user alone."""
    secrets = [filled(alice), filled(bob)]
    out = StringIO()
    call_command("streamserve_export", "alice", stdout=out)
    whole = json.loads(out.getvalue())
    assert (whole["user"], whole["id"]) == ("alice", alice.pk)
    (conversation,) = whole["conversations"]
    question, answer = sorted(conversation["messages"], key=lambda one: one["role"] != "user")
    assert (question["text"], answer["text"], answer["parent_id"]) == ("Why?", "\N{SNOWMAN}", question["id"])
    assert question["content"]["blocks"][0]["text"] == "Why?"
    (attachment,) = whole["attachments"]
    assert (attachment["name"], question["attachments"]) == ("bill.csv", [attachment["id"]])
    assert [len(whole[name]) for name in ("streams", "stored_responses", "jobs", "keys")] == [1] * 4
    assert "bob" not in out.getvalue()
    assert not any(secret in out.getvalue() for secret in secrets)
    assert ApiKey.objects.get(user=alice).digest not in out.getvalue()
    path = tmp_path / "alice.json"
    call_command("streamserve_export", "alice", output=str(path))
    again = json.loads(path.read_text())
    assert {**again, "exported_at": 0} == {**whole, "exported_at": 0}


def test_a_wrong_name_or_file_is_an_error(alice: Any, tmp_path: Path) -> None:
    """An unknown user, and a file that exists already, are named."""
    with pytest.raises(CommandError, match="No user has the name 'zoe'"):
        call_command("streamserve_export", "zoe")
    (tmp_path / "there").touch()
    with pytest.raises(CommandError, match="exists"):
        call_command("streamserve_export", "alice", output=str(tmp_path / "there"))
