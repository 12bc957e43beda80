"""docs/conversations.md: its curl lines run in order on a served site, and answer in the shapes that it shows."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

import httpx
import pytest

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.support.checks.stream_checks import check_native
from tests.support.docs.doc_blocks import Block, blocks_of

PAGE = "docs/conversations.md"
SHOWN = "http://127.0.0.1:8000"
DEADLINE = 60.0


class Shell:
    """Runs the page's commands on a server, with the variables that it names."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._env = url, {**os.environ, "KEY": key}
        self._headers = {"Authorization": f"Bearer {key}"}

    def set(self, **variables: str) -> None:
        self._env |= variables

    def run(self, block: Block) -> list[bytes]:
        """Return what each command of a block writes, when no answer runs any more."""
        out = []
        for command in block.commands:
            command = command.replace(SHOWN, self._url).replace("curl ", "curl -sS --noproxy '*' ")
            done = subprocess.run(
                ["bash", "-c", command], env=self._env, capture_output=True, check=True, timeout=DEADLINE
            )
            out.append(done.stdout)
            self._until_written()
        return out

    def _until_written(self) -> None:
        """An answer's message is written after its readers have the last event."""
        until = time.monotonic() + DEADLINE
        while any(one["running"] for one in self._listed()):
            assert time.monotonic() < until
            time.sleep(0.02)

    def _listed(self) -> list[dict[str, Any]]:
        listed = httpx.get(f"{self._url}/conversations", headers=self._headers, trust_env=False)
        return list(listed.json()["conversations"])


def shapes(heading: str) -> list[set[str]]:
    """Return the fields of the objects that the page shows under a heading."""
    return [set(json.loads(block.text)) for block in blocks_of(PAGE, heading) if block.language == "json"]


def shown(heading: str) -> dict[str, Any]:
    """Return the one object that the page shows under a heading."""
    (block,) = (block for block in blocks_of(PAGE, heading) if block.language == "json")
    return dict(json.loads(block.text))


def commands(heading: str) -> list[Block]:
    return [block for block in blocks_of(PAGE, heading) if block.language == "sh"]


@pytest.mark.django_db(transaction=True)
def test_the_page_s_commands_run(hard_server: DaphneServer) -> None:
    """A conversation is made, asked, read, branched and shared as the page says, with the fields that it shows."""
    shell = Shell(hard_server.url, ApiKey.objects.make()[1])
    made, asked = commands("One conversation")
    conversation = json.loads(shell.run(made)[0])
    assert set(conversation) == shapes("One conversation")[0]
    shell.set(CONVERSATION=conversation["id"])
    first, second, listed = shell.run(asked)
    check_native(first)
    check_native(second)
    whole: dict[str, Any] = json.loads(listed)
    assert [one["role"] for one in whole["messages"]] == ["user", "assistant"] * 2
    answer = whole["messages"][-1]
    assert set(answer) == shapes("One conversation")[1]
    assert set(answer["blocks"][0]) == {"index", "kind", "text"}
    shell.set(QUESTION=answer["parent"])
    for block in commands("Ask"):
        for events in shell.run(block):
            check_native(events)
    upload, brought = commands("Attachments")
    attached = json.loads(shell.run(upload)[0])
    assert attached == {**shown("Attachments"), "id": attached["id"], "created": attached["created"]}
    shell.set(ATTACHMENT=attached["id"])
    check_native(shell.run(brought)[0])
    (share,) = commands("Share links")
    link = json.loads(shell.run(share)[0])
    assert set(link) == shapes("Share links")[0]
    assert httpx.get(hard_server.url + link["url"], trust_env=False).status_code == 200
