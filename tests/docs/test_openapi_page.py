"""docs/openapi.md: its recipes for Django REST framework and django-ninja answer, over a real server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.checks.stream_checks import check_native
from tests.support.docs.doc_blocks import blocks_of
from tests.support.docs.doc_site import DocSite
from tests.support.servers.web_servers import wait_until_ready

pytestmark = pytest.mark.proof

PAGE = "docs/openapi.md"
USER = "from django.contrib.auth import get_user_model as g; g().objects.create_user('alice', password='pw')"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a site with the page's views."""
    pytest.importorskip("rest_framework", reason="djangorestframework is not installed")
    pytest.importorskip("ninja", reason="django-ninja is not installed")
    site = DocSite(tmp_path_factory.mktemp("frameworks"))
    for block in blocks_of(PAGE):
        if block.file_name:
            site.write(block)
    site.run(f'python manage.py shell -v 0 -c "{USER}"')
    with site.serve("daphne mysite.asgi:application") as server:
        wait_until_ready(server.url)
        yield server.url
    site.close()


@pytest.mark.parametrize("framework", ["drf", "ninja"])
def test_a_view_of_the_framework_answers(served: str, framework: str) -> None:
    """Whole and streamed, to a user that the framework has found; the fifth request of a minute is a 429."""
    with httpx.Client(base_url=f"{served}/{framework}", timeout=60, trust_env=False) as client:
        asked, alice = {"question": "Where is my invoice?"}, ("alice", "pw")
        assert client.post("/ask", json=asked).status_code in (401, 403)
        whole = client.post("/ask", json=asked, auth=alice)
        assert whole.status_code == 200
        assert whole.json()["text"]
        streamed = client.post("/tell", json=asked, auth=alice)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        check_native(streamed.content)
        refused = [client.post("/ask", json=asked, auth=alice).status_code for _ in range(4)]
        assert refused[0] == 200
        assert refused[-1] == 429
