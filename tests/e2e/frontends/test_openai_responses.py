"""`/v1/responses` read by the official Node client, on a site under daphne."""

from __future__ import annotations

import pytest

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.support.servers.node import FRONT_ENDS, run_script

SCRIPT = FRONT_ENDS / "openai" / "responses.mjs"


@pytest.mark.django_db(transaction=True)
def test_the_node_client_reads_responses(hard_server: DaphneServer, node: str) -> None:
    """Whole, streamed, on after a cut, continued, in the background, deleted."""
    read = run_script(SCRIPT, hard_server.url, ApiKey.objects.make()[1], "echo")
    assert read.pop("background") in ("completed", "incomplete")
    types = {one.removeprefix("response.") for one in read.pop("types")}
    assert types - {"completed", "incomplete"} == {
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
    }
    assert read == {"isWhole": True, "isRest": True, "previous": True, "items": 1, "gone": 404}
