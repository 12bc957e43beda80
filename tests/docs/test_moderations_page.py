"""docs/moderations.md: its blocks run, in a site that the README's blocks have made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.docs.doc_blocks import blocks_of
from tests.support.docs.doc_site import DocSite
from tests.support.servers.web_servers import wait_until_ready

pytestmark = pytest.mark.proof

PAGE = "docs/moderations.md"


def test_the_client_gets_the_verdict_of_the_sites_function(tmp_path: Path) -> None:
    """A text is flagged by a category of the site's own."""
    site = DocSite(tmp_path)
    for block in blocks_of(PAGE):
        if block.file_name:
            site.write(block, "mysite" if block.file_name == "settings.py" else "")
    key = site.run("python manage.py streamserve_key create").split()[-1]
    (client,) = [block.code for block in blocks_of(PAGE) if "OpenAI(" in block.text]
    with site.serve("daphne mysite.asgi:application") as server:
        wait_until_ready(server.url)
        (site.project / "ask.py").write_text(client.replace("http://127.0.0.1:8000", server.url).replace("sk-…", key))
        assert site.run("python ask.py") == "False 0.0\nTrue 1.0\n"
    site.close()
