"""The admin's delivery page: who sees it, and that its token is good for a probe."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from streamserve.web.chat_page import CONTENT_SECURITY_POLICY

ADDRESS = "/admin/streamserve/live/delivery/"


def test_the_page_is_for_who_may_see_the_live_page(client: Client, staff: Any, root: Any) -> None:
    """Staff without the permission get 403, visitors the login."""
    assert client.get(ADDRESS).status_code == 302
    client.force_login(staff)
    assert client.get(ADDRESS).status_code == 403
    client.force_login(root)
    response = client.get(ADDRESS)
    assert response.status_code == 200
    assert response["Content-Security-Policy"] == CONTENT_SECURITY_POLICY


@pytest.mark.django_db(transaction=True)
async def test_its_token_is_good_for_a_probe(async_client: Any, root: Any) -> None:
    """The site's own address; the probe begins at once."""
    await async_client.aforce_login(root)
    page = (await async_client.get(ADDRESS)).content.decode()
    shown = re.search(r'data-probe-url="(/streams/doctor\?token=[^"]+)"', page)
    assert shown is not None
    response = await async_client.get(shown[1])
    assert (response.status_code, response["X-Stream-Id"]) == (200, "doctor")
    pieces = response.streaming_content
    assert await anext(pieces) == b": ok\n\n"
    assert b'"http_version"' in await anext(pieces)
    await pieces.aclose()
