"""Laws of the batches in the admin."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from streamserve.models import Batch, Job, StoredFile

pytestmark = pytest.mark.django_db
LIST = "admin:streamserve_batch_changelist"


@pytest.fixture
def batches() -> list[str]:
    """A batch that runs, and one that has ended; and a file."""
    fields = {"owner": "user:1", "tenant": "user:1", "input_file_id": "file-1", "expires_at": timezone.now()}
    Batch.objects.create(id="batch_runs", status="in_progress", **fields)
    Batch.objects.create(id="batch_done", status="completed", state="done", **fields)
    StoredFile.objects.create(
        id="file-1", name="secret", filename="in.jsonl", owner="user:1", tenant="user:1", num_bytes=7
    )
    return ["batch_runs", "batch_done"]


def test_batches_and_files_are_listed(root: Any, batches: list[str]) -> None:
    """A superuser sees them, and adds, changes and deletes none; where the storage has a file is not shown."""
    client = Client()
    client.force_login(root)
    page = client.get(reverse(LIST)).content.decode()
    assert all(name in page for name in batches)
    files = client.get(reverse("admin:streamserve_storedfile_changelist")).content.decode()
    assert "in.jsonl" in files
    assert "secret" not in files
    for model, pk in (("batch", "batch_runs"), ("storedfile", "file-1")):
        page = client.get(reverse(f"admin:streamserve_{model}_change", args=[pk])).content.decode()
        fields = ("who", "whose", "created", "expires")
        assert [name for name in fields if f"field-{name}" not in page] == []
        assert client.post(reverse(f"admin:streamserve_{model}_delete", args=[pk]), {"post": "yes"}).status_code == 403
        assert client.get(reverse(f"admin:streamserve_{model}_add")).status_code == 403


def test_cancelling_needs_its_permission(staff: Any, batches: list[str]) -> None:
    """Who may only look has no such action; a batch that has ended stays as it is."""
    client = Client()
    client.force_login(staff)
    assert client.get(reverse(LIST)).status_code == 403
    staff.user_permissions.add(Permission.objects.get(codename="view_batch"))
    action = {"action": "cancel", "_selected_action": batches}
    client.post(reverse(LIST), action)
    assert Batch.objects.get(pk="batch_runs").status == "in_progress"
    staff.user_permissions.add(Permission.objects.get(codename="cancel_batch"))
    client.post(reverse(LIST), action)
    assert dict(Batch.objects.values_list("pk", "status")) == {"batch_runs": "cancelling", "batch_done": "completed"}


def test_the_lists_are_narrow(root: Any, batches: list[str]) -> None:
    """A visitor's id is shortened in the lists, which have little room; the row's page has all."""
    owner = f"anon:{'5' * 32}"
    Batch.objects.filter(pk="batch_runs").update(owner=owner, num_rows=1500, num_completed=3, num_failed=1)
    job = Job.objects.create(
        id="a" * 32, pipeline="p", owner=owner, tenant=owner, stream_id="b" * 32, due_at=timezone.now()
    )
    client = Client()
    client.force_login(root)
    for model, pk in (("batch", "batch_runs"), ("job", job.pk)):
        page = client.get(reverse(f"admin:streamserve_{model}_changelist")).content.decode()
        assert ">visitor 55555555<" in page
        assert ("4 of 1,500, 1 failed" in page) is (model == "batch")
        assert owner in client.get(reverse(f"admin:streamserve_{model}_change", args=[pk])).content.decode()
